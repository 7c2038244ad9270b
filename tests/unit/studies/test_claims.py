"""Conclusions: what published numbers and measured rows say of each kind of claim."""

from collections.abc import Sequence

import pytest

from tests.make import make_record, make_round
from vivace.evidence.studies import read_study
from vivace.evidence.studies.expand import ModelPart, expand
from vivace.evidence.studies.judging import ClaimVerdict, JudgedClaim, judge
from vivace.evidence.studies.study_columns import StudyCell, StudyColumn, cell_of, published_columns
from vivace.evidence.studies.study_file import Claim, Part, StudyFile
from vivace.foundation.spec.environment import Place
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval
from vivace.report.rows import Row, rows_of

FIGURES = ("latency", "p99", "peak_memory", "clip")


def part(*recipes: str) -> ModelPart:
    (planned,) = expand(
        StudyFile(
            name="x",
            title="T",
            part=(Part(name="p", models=("tiny-sd",), recipes=recipes, figures=FIGURES),),
        )
    )
    return planned


def published(name: str, figure: str = "latency", **values: float | None) -> StudyColumn:
    """A published GPU; rows by recipe, e.g. tiny_vae=1.0."""
    cells = {
        ("p", "tiny-sd", row, figure): StudyCell("published", Interval(value, None, None))
        if value is not None
        else StudyCell("absent", note="null in the source")
        for row, value in values.items()
    }
    return StudyColumn(name, "published", cells)


def measured(*records: Record) -> StudyColumn:
    rows: Sequence[Row] = rows_of(list(records))
    labels = {("p", "tiny-sd", row.recipe): row for row in rows}
    cells = {(*key, figure): cell_of(row, figure) for key, row in labels.items() for figure in FIGURES}
    return StudyColumn("Test CPU", "measured", cells, labels, {("p", "tiny-sd"): (rows[0],)})


def timed(recipe: str, *seconds: float) -> Record:
    """A record of one round for each time, with little spread."""
    return make_record(
        recipe, *(make_round(i, tuple(s * (1 + 0.001 * k) for k in range(10))) for i, s in enumerate(seconds))
    )


def only(claim: Claim, column: StudyColumn, *recipes: str) -> JudgedClaim:
    (verdict,) = judge(claim, [part(*recipes)], [column])
    return verdict


def faster(row: str = "tiny_vae", than: str = "baseline", kind: str = "faster", **fields: object) -> Claim:
    return Claim.model_validate({"says": "x", "kind": kind, "rows": (row,), "than": than, **fields})


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("faster", 0.9, ClaimVerdict.AGREES),
        ("faster", 1.0, ClaimVerdict.DISAGREES),
        ("faster", None, ClaimVerdict.CANNOT_TELL),
        ("slower", 1.1, ClaimVerdict.AGREES),
        ("slower", 0.9, ClaimVerdict.DISAGREES),
        ("same", 1.02, ClaimVerdict.AGREES),
        ("same", 1.05, ClaimVerdict.DISAGREES),
    ],
)
def test_published_times_are_compared_as_printed(
    kind: str, value: float | None, expected: ClaimVerdict
) -> None:
    verdict = only(faster(kind=kind), published("A100", tiny_vae=value, baseline=1.0), "tiny_vae")
    assert verdict.verdict is expected


def test_measured_times_need_an_interval_apart() -> None:
    clear = measured(timed("baseline", 1.0, 1.0), timed("tiny_vae", 0.5, 0.5))
    assert only(faster(), clear, "tiny_vae").verdict is ClaimVerdict.AGREES
    assert only(faster(kind="slower"), clear, "tiny_vae").verdict is ClaimVerdict.DISAGREES
    assert "2.00x [1." in only(faster(), clear, "tiny_vae").because
    close = measured(timed("baseline", 1.0, 1.0), timed("tiny_vae", 0.97, 0.99))
    assert only(faster(), close, "tiny_vae").verdict is ClaimVerdict.CANNOT_TELL


def test_rows_of_two_gpus_are_compared_by_way_of_their_own_baselines() -> None:
    """One GPU is half as fast as the other; the recipes are not."""

    def at(index: int, *records: Record) -> list[Row]:
        place = Place(uuid=f"GPU-{index}", index=index)
        return rows_of([r.model_copy(update={"environment": r.environment.at(place)}) for r in records])

    first = at(0, timed("baseline", 1.0, 1.0), timed("tiny_vae", 0.8, 0.8))
    second = at(1, timed("baseline", 2.0, 2.0), timed("steps(8)", 1.0, 1.0))
    rows = {("p", "tiny-sd", row.recipe): row for row in (*second, *first)}
    cells = {(*key, figure): cell_of(row, figure) for key, row in rows.items() for figure in FIGURES}
    column = StudyColumn("GPU", "measured", cells, rows, {("p", "tiny-sd"): (first[0], second[0])})
    verdict = only(faster("steps(8)", "tiny_vae"), column, "tiny_vae", "steps(8)")
    assert verdict.verdict is ClaimVerdict.AGREES
    assert "1.60x" in verdict.because


def test_a_row_that_was_not_measured_is_named_with_its_outcome() -> None:
    lost = make_record("tiny_vae", make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="40 GB wanted"))
    verdict = only(faster(), measured(timed("baseline", 1.0), lost), "tiny_vae")
    assert (verdict.verdict, verdict.because) == (
        ClaimVerdict.CANNOT_TELL,
        "tiny_vae out of memory: 40 GB wanted",
    )


def test_the_best_must_beat_each_other_row() -> None:
    claim = Claim(says="x", kind="best", rows=("tiny_vae",))
    rows = ("tiny_vae", "bf16")
    good = published("A100", tiny_vae=0.5, bf16=0.6, baseline=1.0)
    assert only(claim, good, *rows).verdict is ClaimVerdict.AGREES
    tied = published("A100", tiny_vae=0.5, bf16=0.5, baseline=1.0)
    verdict = only(claim, tied, *rows)
    assert (verdict.verdict, verdict.because) == (
        ClaimVerdict.DISAGREES,
        "holds in 1 of 2; tiny_vae 0.500 s, bf16 0.500 s",
    )


def test_a_limit_is_in_the_figures_unit() -> None:
    claim = Claim(says="x", kind="limit", rows=("tiny_vae",), figure="peak_memory", at_most=8)
    assert (
        only(claim, published("A100", "peak_memory", tiny_vae=7e9), "tiny_vae").verdict is ClaimVerdict.AGREES
    )
    assert (
        only(claim, published("A100", "peak_memory", tiny_vae=9e9), "tiny_vae").verdict
        is ClaimVerdict.DISAGREES
    )


def test_gpus_are_compared_row_by_row() -> None:
    claim = Claim(says="x", kind="gpu", gpu="H100", than="A100")
    columns = [
        published("A100", tiny_vae=1.0, baseline=2.0),
        published("H100", tiny_vae=0.5, baseline=2.5),
        measured(timed("baseline", 1.0)),
    ]
    gpus, here = judge(claim, [part("tiny_vae")], columns)
    assert gpus.verdict is ClaimVerdict.DISAGREES
    assert gpus.because == "holds in 1 of 2; baseline 2.50 s and 2.00 s, 0.80x"
    assert (here.column, here.verdict) == ("Test CPU", ClaimVerdict.CANNOT_TELL)


PUBLISHED_SAY = {
    # what the sources' own numbers say of the sources' conclusions, by GPU
    ("000", "Quantising without compiling slows"): "agrees agrees agrees",
    ("000", "Quantised and compiled is faster than compiled alone on an H100"): "agrees",
    ("000", "On an A100, compiling alone"): "agrees",
    ("000", "Full optimisation is the fastest on FLUX.1 [dev]"): "agrees agrees",
    ("000", "Full optimisation is the fastest of all ten"): "does",
    ("000", "The H100 is the fastest GPU in every"): "does",
    ("001", "Compiling with channels_last is 2.3"): "agrees",
    ("001", "A tiny VAE needs less memory"): "agrees",
    ("001", "The final configuration needs a little more memory"): "does",
    ("002", "Flash attention in fp32 is slower"): "agrees",
    ("002", "With flash attention in bf16 an image takes less than a minute"): "does",
    ("002", "Flash attention in bf16 is the fastest"): "does",
    ("003", "Quantisation lowers the memory of every"): "does",  # int4_gemm on SDXL
    ("003", "int4_gemm is faster than fp16"): "does",
    ("003", "Quantisation does not speed convolutional"): "agrees",
    ("003", "fp8 with static scales takes half"): "agrees",
    ("003", "fp8_w has better images than int8"): "does",
    ("004", "torchao's fp8 alone is no faster"): "cannot agrees",
    ("004", "Flash attention saves about 11 %"): "agrees",
    ("004", "bf16, flash attention and a first-block cache at 0.3 are the most stable"): "cannot does",
    ("004", "On an H100 a first-block cache is the fastest at 0.35"): "agrees",
    ("004", "On an A100 a first-block cache at 0.4"): "agrees",
    ("004", "torchao's fp8 and int8 make a combination with TeaCache"): "cannot agrees",
}


@pytest.mark.parametrize(("name", "start"), PUBLISHED_SAY)
def test_what_the_sources_own_numbers_say(name: str, start: str) -> None:
    file = read_study(name)
    parts = expand(file)
    columns = published_columns(
        file.cells, {p.part.name: p.part.tables for p in parts}, [p.model for p in parts]
    )
    (claim,) = [candidate for candidate in file.claim if candidate.says.startswith(start)]
    judgements = judge(claim, parts, columns)
    by_gpu = sorted(judgements, key=lambda judgement: judgement.column)
    assert (
        " ".join(judgement.verdict.value.split()[0] for judgement in by_gpu) == PUBLISHED_SAY[name, start]
    ), judgements


@pytest.mark.parametrize("name", ["000", "001", "002", "003", "004"])
def test_no_claim_is_empty(name: str) -> None:
    """A claim whose rows are in no part would never be judged."""
    file = read_study(name)
    parts = expand(file)
    columns = published_columns(
        file.cells, {p.part.name: p.part.tables for p in parts}, [p.model for p in parts]
    )
    for claim in file.claim:
        assert judge(claim, parts, columns), claim.says
        assert all(
            judgement.because != "no row of it was measured" for judgement in judge(claim, parts, columns)
        ), claim.says
