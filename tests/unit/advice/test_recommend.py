"""Which evidence comes first, what is allowed, what is a tie, and what the answer says."""

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from tests.make import make_environment, make_record, make_round, make_trial
from tests.typed import typed
from vivace.advice import Recommendation, Wanted
from vivace.advice.advise import recommend_from
from vivace.advice.committed import committed_tables
from vivace.advice.evidence import Judged, Seen, Spread, Table
from vivace.advice.measured import table_of
from vivace.advice.wanted import parse_size
from vivace.benchmark.store import Store
from vivace.cli import app
from vivace.errors import StoreError, UnknownModel, UsageError
from vivace.measure.gpus import Near, capability_of, near
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of
from vivace.spec.limits import Limits
from vivace.spec.record import Outcome, Round
from vivace.stats import Gate, Interval


def seen(text: str, gain: float | None = None, width: float = 0.01, **fields: object) -> Seen:
    """A row whose baseline takes 10 s an image."""
    recipe = resolve(text)
    point = gain or 1.0
    values = {
        "latency": Interval(10 / point, 10 / point * (1 - width), 10 / point * (1 + width)),
        "gain": None if gain is None else Interval(point, point * (1 - width), point * (1 + width)),
        "peak_bytes": 20_000_000_000,
        "num_rounds": 2,
        **fields,
    }
    return Seen(
        recipe=recipe.text,
        num_techniques=len(recipe.techniques),
        same_picture=recipe.same_picture,
        **values,  # type: ignore[arg-type]
    )


def table(
    *rows: Seen, kind: str = "own", gpu: str = "NVIDIA H100", model: str = "flux-dev", **fields: object
) -> Table:
    rows = rows if any(row.recipe == "baseline" for row in rows) else (seen("baseline"), *rows)
    values = {
        "kind": kind,
        "place": kind,
        "gpu": gpu,
        "model": model,
        "baseline": "baseline",
        "rows": rows,
        **fields,
    }
    return Table(**values)  # type: ignore[arg-type]


def ask(
    *tables: Table, model: str = "flux-dev", gpu: str | None = "H100", **fields: object
) -> Recommendation:
    return recommend_from(Wanted(model=model, gpu=gpu, **fields), tables)  # type: ignore[arg-type]


def test_evidence_is_ordered() -> None:
    ordered = [
        table(seen("compile", 1.1), place="own, this GPU"),
        table(seen("compile", 1.2), gpu="NVIDIA A100-SXM4-80GB", place="own, another GPU"),
        table(seen("compile", 1.3), kind="committed", place="committed, this GPU"),
        table(seen("compile", 1.4), kind="published", gpu="H100", place="published, this GPU"),
        table(seen("compile", 1.5), kind="committed", gpu="NVIDIA H200", place="committed, its generation"),
        table(seen("compile", 1.6), kind="published", gpu="H200", place="published, its generation"),
        table(seen("compile", 1.7), kind="committed", gpu="A100", place="committed, another GPU"),
        table(seen("compile", 1.8), kind="own", model="flux-schnell", place="own, of the family"),
        table(
            seen("compile", 1.9),
            kind="published",
            gpu="A100",
            model="flux-schnell",
            place="family, another GPU",
        ),
    ]
    left = list(reversed(ordered))
    for expected in ordered:
        answer = ask(*left)
        assert answer.basis is not None
        assert answer.basis.place == expected.place
        left.remove(expected)
    assert ask().recipe is None


def test_what_is_transferred_is_marked_and_never_sure() -> None:
    direct = ask(table(seen("compile", 1.5, judged=Judged(gate=Gate.PASSED))))
    assert (direct.sure, direct.doubts) == ("high", ())
    unseen = ask(table(seen("compile", 1.5)))
    assert (unseen.sure, unseen.doubts) == ("medium", ("its images were not judged",))
    other = ask(table(seen("compile", 1.5), gpu="NVIDIA A100-SXM4-80GB"))
    assert other.sure == "low"
    assert "another GPU, NVIDIA A100" in other.doubts[0]
    assert "no record of flux-dev on H100, nor on its generation" in other.missing
    near_by = ask(table(seen("compile", 1.5), gpu="NVIDIA H200"))
    assert near_by.sure == "medium"
    assert "no record of flux-dev on H100; of its generation: NVIDIA H200" in near_by.missing
    family = ask(table(seen("compile", 1.5), model="flux-schnell"))
    assert family.sure == "low"
    assert "no record compares recipes on flux-dev; of its family: flux-schnell" in family.missing
    assert ask(table(seen("compile", 1.5), model="sd15")).recipe is None, "a UNet tells nothing of FLUX"
    assert ask(table(seen("compile", 1.5), model="tiny-flux"), model="flux-dev").recipe is None


def test_without_a_gpu_the_answer_says_which_it_is_for() -> None:
    tables = [
        table(seen("compile", 1.5), kind="published", gpu="A100", place="there"),
        table(seen("fp8+compile", 1.9), kind="published", gpu="H100", place="there"),
    ]
    answer = recommend_from(Wanted(model="flux-dev", gpu=None), tables)
    if answer.gpu is not None:
        pytest.skip("this machine has a GPU")
    assert str(answer).startswith("flux-dev on H100 (no GPU was named)")
    assert answer.doubts[0] == "on A100 another recipe is best: give --gpu"
    assert answer.sure == "low"


def test_a_recipe_that_the_asked_gpu_cannot_run_is_left_out() -> None:
    rows = seen("fp8_static+compile", 1.9), seen("compile", 1.3)
    answer = ask(table(*rows, kind="committed", gpu="NVIDIA H200"), gpu="A100")
    assert answer.recipe == "compile"
    (out,) = answer.left_out
    assert out.kind == "hardware"
    assert "8.9" in out.why
    assert "better, but quantize(fp8_static)+compile" in str(answer)
    assert (
        ask(table(*rows, kind="committed", gpu="NVIDIA H200"), gpu="RTX 4090").recipe
        == "quantize(fp8_static)+compile"
    )
    several = table(seen("parallel(ulysses)", 1.9), seen("compile", 1.3), kind="committed")
    assert ask(several).recipe == "compile"


def test_overlapping_intervals_are_a_tie_and_the_simpler_recipe_is_named() -> None:
    answer = ask(
        table(seen("fuse_qkv+compile", 1.52, 0.02), seen("compile", 1.5, 0.02), seen("tiny_vae", 1.1))
    )
    assert (answer.recipe, answer.is_tie) == ("compile", True)
    assert answer.runner_up is not None
    assert answer.runner_up.recipe == "fuse_qkv+compile"
    assert "simpler (1 technique instead of 2)" in answer.why
    clear = ask(table(seen("fuse_qkv+compile", 1.7, 0.02), seen("compile", 1.5, 0.02)))
    assert (clear.recipe, clear.is_tie, clear.ties) == ("fuse_qkv+compile", False, ())
    assert "takes 1.13 times as long" in clear.why
    nothing = ask(table(seen("compile", 1.01, 0.02)))
    assert nothing.recipe == "baseline"
    assert "none: nothing that is allowed is better" in str(nothing)


def test_of_equally_simple_recipes_the_one_that_keeps_the_picture_is_named() -> None:
    passed = Judged(gate=Gate.PASSED, reason="as good")
    answer = ask(table(seen("steps(14)", 1.52, 0.02, judged=passed), seen("compile", 1.5, 0.02)))
    assert answer.recipe == "compile"
    assert "keeps the picture" in answer.why


def test_one_process_cannot_tell_ten_percent() -> None:
    rows = [seen("fuse_qkv+compile", 1.6, 0.001, num_rounds=1), seen("compile", 1.5, 0.001, num_rounds=1)]
    assert ask(table(*rows)).recipe == "compile"
    assert (
        ask(table(*(row.model_copy(update={"num_rounds": 2}) for row in rows))).recipe == "fuse_qkv+compile"
    )


def test_the_limit_on_memory_is_hard_and_unknown_does_not_fit() -> None:
    rows = (
        seen("compile", 2.0, peak_bytes=24_100_000_000),
        seen("int8+compile", 1.5, peak_bytes=12_000_000_000),
        seen("cuda_graph", 3.0, peak_bytes=None),
    )
    answer = ask(table(*rows), max_bytes=24e9)
    assert answer.recipe == "quantize(int8)+compile"
    kinds = {one.recipe: one.kind for one in answer.left_out}
    assert kinds == {"compile": "memory", "cuda_graph": "memory unknown"}
    assert "not known to fit: cuda_graph" in str(answer)
    nothing = ask(table(*rows), max_bytes=1e9)
    assert nothing.recipe is None
    assert nothing.next[0] == "vivace plan flux-dev --card 1"


def test_a_better_table_that_allows_nothing_gives_way_to_the_next() -> None:
    mine = table(seen("baseline", peak_bytes=30e9), seen("compile", 2.0, peak_bytes=30e9))
    answer = ask(mine, table(seen("int8", 0.9, peak_bytes=10e9), kind="published"), max_bytes=12e9)
    assert answer.basis is not None
    assert (answer.recipe, answer.basis.kind) == ("quantize(int8)", "published")
    assert any("own is nearer, but compares nothing that is allowed" in one for one in answer.missing)


def test_recipes_that_change_the_picture_need_proof() -> None:
    caches = {
        "first_block_cache(0.1)": Judged(gate=Gate.PASSED, reason="passes"),
        "first_block_cache(0.2)": Judged(gate=Gate.UNCLEAR, reason="too few images"),
        "first_block_cache(0.3)": Judged(gate=Gate.FAILED, reason="shows something else"),
        "first_block_cache(0.4)": None,
    }
    gains = (1.5, 2.0, 2.5, 3.0)
    rows = [
        seen(text, gain, judged=judged) for (text, judged), gain in zip(caches.items(), gains, strict=True)
    ]
    answer = ask(table(*rows, seen("compile", 1.3)))
    assert answer.recipe == "first_block_cache(0.1)"
    assert answer.quality == "passes the quality gate: passes"
    assert sorted(one.kind for one in answer.left_out) == ["quality", "unproven", "unproven"]
    assert ask(table(*rows, seen("compile", 1.3)), same_picture=True).recipe == "compile"
    assert ask(table(*rows, seen("compile", 1.3)), limits=Limits()).recipe == "first_block_cache(0.1)"
    published = ask(table(*rows, kind="published"))
    assert published.recipe == "first_block_cache(0.4)"
    assert published.quality.startswith("unknown: the source publishes")


def test_random_weights_borrow_quality_from_an_embedded_model_of_the_kind() -> None:
    by_gate = {
        gate: next(
            row
            for tiny in committed_tables()
            if tiny.model == "tiny-flux"
            for row in tiny.rows
            if row.judged is not None and row.judged.gate is gate and "hits" in row.recipe
        )
        for gate in (Gate.PASSED, Gate.FAILED)
    }
    full = [seen(f"{row.recipe}+cuda_graph", 2.0) for row in by_gate.values()]
    rows = (full[0], full[1].model_copy(update={"gain": Interval(3.0, 2.9, 3.1)}), seen("compile", 1.3))
    answer = ask(table(*rows, random_weights=True))
    assert answer.chosen is not None
    assert answer.chosen.judged is not None
    assert (answer.recipe, answer.chosen.judged.of) == (rows[0].recipe, "tiny-flux")
    assert "judged on tiny-flux, a small model of the same kind, not on flux-dev" in answer.quality
    assert answer.sure == "medium"
    # A UNet is of another kind, with an embedded model of its own.
    unet = ask(table(*rows, random_weights=True, model="sdxl"), model="sdxl")
    assert unet.chosen is not None
    assert unet.chosen.judged is not None
    assert (unet.recipe, unet.chosen.judged.of) == (rows[0].recipe, "tiny-sd")
    few = ask(table(*rows, random_weights=True, model="flux-schnell"), model="flux-schnell")
    assert few.recipe == "compile", "four steps are not many"
    assert all("random weights" in one.why for one in few.left_out)


def test_fewer_steps_of_another_number_of_steps_are_another_share() -> None:
    """24 of tiny-flux's 28 steps pass; 24 of 50 are not known."""
    row = seen("steps(24)", 2.0)
    assert ask(table(row, random_weights=True, steps=28)).recipe == "steps(24)"
    assert [one.kind for one in ask(table(row, random_weights=True, steps=50)).left_out] == ["unproven"]


def test_operations_that_were_counted_are_no_times() -> None:
    counted = seen("steps(14)", 1.9, judged=Judged(gate=Gate.PASSED), is_counted=True, latency=None)
    answer = ask(table(counted, kind="committed"))
    assert (answer.recipe, answer.sure) == ("steps(14)", "low")
    assert "counted and not timed" in answer.doubts[0]
    assert "an image instead of" not in str(answer)


def test_committed_images_are_held_to_the_limits_that_are_asked() -> None:
    kept = Judged(gate=Gate.FAILED, reason="below 99 %", clip=Interval(0.96, 0.94, 0.98))
    rows = seen("steps(14)", 2.0, judged=kept), seen("steps(20)", 1.4, judged=Judged(gate=Gate.PASSED))
    loose = ask(table(*rows, kind="committed"), limits=Limits(clip=0.9))
    assert loose.recipe == "steps(14)"
    assert "CLIP margin kept [94, 98] %, 90 % asked" in loose.quality
    strict = ask(table(*rows, kind="committed"), limits=Limits(clip=0.95))
    assert strict.recipe == "baseline"
    lost = rows[0].model_copy(update={"judged": kept.model_copy(update={"is_lost": True})})
    assert ask(table(lost, kind="committed"), limits=Limits(clip=0.9)).recipe == "baseline"


def test_memory_prefers_the_faster_of_equal_peaks() -> None:
    rows = (
        seen("offload(group)", 0.3, peak_bytes=2_767_000_000),
        seen("offload(group, stream=True)", 0.4, peak_bytes=2_768_000_000),
        seen("offload(model)", 0.8, peak_bytes=24_000_000_000),
    )
    answer = ask(table(*rows), goal="memory")
    assert answer.recipe == "offload(group, stream=True)"
    assert "the chosen one is faster" in answer.why
    assert "2.77 GB at 0.40x the speed" not in str(answer)
    assert "peak 2.77 GB instead of 20.0 GB (-86 %)" in str(answer)


def test_throughput_and_cost_look_at_every_batch() -> None:
    one = table(seen("compile", 1.5))
    four = table(
        seen("baseline", latency=Interval(8, 7.9, 8.1), batch=4),
        seen("compile", 2.0, latency=Interval(4, 3.9, 4.1), batch=4),
        batch=4,
    )
    assert ask(one, four).chosen.latency.point == pytest.approx(10 / 1.5)  # type: ignore[union-attr]
    answer = ask(one, four, goal="throughput")
    assert answer.chosen is not None
    assert (answer.chosen.title, answer.chosen.gain) == (
        "compile, batch 4",
        Interval(2.5, 10 / 4.1, 10 / 3.9),
    )
    assert "0.25 images/s" in str(answer)
    cost = ask(one, four, goal="cost", price_per_hour=3.6)
    assert cost.chosen is not None
    assert cost.chosen.cost_per_1000 == pytest.approx(4.0)
    elsewhere = ask(table(seen("compile", 1.5), gpu="NVIDIA A100"), goal="cost", price_per_hour=3.6)
    assert elsewhere.chosen is not None
    assert elsewhere.chosen.cost_per_1000 is None, "another GPU's seconds are no price of this one"


def test_stability_needs_calls_enough() -> None:
    def spread(longest: float, number: int) -> Spread:
        return Spread(p50_s=1.0, min_s=1.0, max_s=longest, num_calls=number)

    rows = (
        seen("baseline", spread=spread(1.5, 20)),
        seen("compile", 1.5, spread=spread(1.05, 20)),
        seen("fp8", 2.0, spread=spread(1.0, 3)),
    )
    answer = ask(table(*rows), goal="stability")
    assert answer.recipe == "compile"
    assert [one.recipe for one in answer.left_out] == ["quantize(fp8)"]
    assert "p99 needs 200 timed calls" in answer.doubts
    assert "longest 1.050 of the shortest of 20 calls" in str(answer)


def test_the_next_command_measures_what_is_not_known_here() -> None:
    answer = ask(table(seen("fp8_static+compile", 1.9), seen("compile", 1.3), kind="committed"))
    assert answer.next == (
        "vivace bench --model flux-dev --recipe baseline --recipe 'quantize(fp8_static)+compile' --recipe compile "
        "--prompt-set real",
    )
    mine = table(seen("compile", 1.3))
    better = ask(mine, table(seen("fp8_static+compile", 1.9), kind="committed"))
    assert better.recipe == "compile"
    assert "--recipe 'quantize(fp8_static)+compile'" in better.next[0]
    for line in (*answer.next, *better.next):
        words = shlex.split(line)
        options = {option for param in app.commands[words[1]].params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options
        for word, value in itertools.pairwise(words):
            if word == "--recipe":
                resolve(value)


def test_a_tie_in_own_records_asks_for_more_rounds() -> None:
    answer = ask(table(seen("fuse_qkv+compile", 1.52, 0.02), seen("compile", 1.5, 0.02)))
    assert answer.next[-1].endswith("--rounds 4")


@pytest.mark.parametrize(
    ("wanted", "other", "expected"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", Near.SAME),
        ("4090", "NVIDIA GeForce RTX 4090", Near.SAME),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", Near.GENERATION),
        ("H100", "NVIDIA H200", Near.GENERATION),
        ("A100", "NVIDIA GeForce RTX 3090", Near.GENERATION),
        ("H100", "NVIDIA A100-SXM4-80GB", Near.OTHER),
        ("RTX 6000 Ada", "RTX PRO 6000", Near.OTHER),
        ("Some GPU", "NVIDIA some-gpu", Near.SAME),
        ("Some GPU", "NVIDIA H200", Near.OTHER),
    ],
)
def test_gpus_by_name(wanted: str, other: str, expected: Near) -> None:
    assert near(wanted, other) is expected
    assert near(other, wanted) is expected


def test_capabilities_by_name() -> None:
    names = [
        "NVIDIA H200",
        "A100",
        "RTX 3060",
        "NVIDIA L4",
        "RTX PRO 6000",
        "B200",
        "Tesla T4",
        "Tesla V100",
        "MI300X",
    ]
    assert list(map(capability_of, names)) == [
        (9, 0), (8, 0), (8, 6), (8, 9), (12, 0), (10, 0), (7, 5), (7, 0), None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"), [("12GB", 12e9), ("12", 12e9), ("1.5 GiB", 1.5 * 2**30), ("800mb", 8e8)]
)
def test_sizes(text: str, number: float) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "12 parsecs", "0", "1e9", "nan"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="12GB or 12GiB"):
        parse_size(text)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a comparison on tiny-sd: compile twice as fast, tiny_vae four times without judged images."""
    folder = tmp_path / ".vivace"
    with Store.create(folder) as opened:
        trials, environment = (
            [make_trial(r) for r in ("baseline", "compile", "tiny_vae", "bf16")],
            make_environment(),
        )
        opened.start_run("vivace bench", trials, environment)
        for trial, factor in zip(trials, (1.0, 0.5, 0.25, None), strict=True):
            for index in range(2):
                times = tuple(factor * s for s in (1.0, 1.01, 0.99, 1.0)) if factor else ()
                outcome = Outcome.MEASURED if factor else Outcome.CRASHED
                round_ = make_round(index, times, outcome)
                opened.append(trial.key(environment), round_)
    return folder


def test_a_store_comes_before_what_ships(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    answer = vivace.recommend("tiny-sd")
    assert answer.basis is not None
    assert (answer.recipe, answer.basis.kind, answer.basis.gpu) == ("compile", "own", "Test CPU")
    assert {one.recipe: one.kind for one in answer.left_out} == {
        "tiny_vae": "unproven",
        "dtype(bf16)": "not measured",
    }
    assert answer.elsewhere[0].basis.kind == "committed"
    assert "you have no records of it" not in answer.missing
    assert vivace.recommend("tiny-sd", store=[]).basis != answer.basis
    # A process's resident set counts on a CPU, and says nothing about a GPU.
    assert vivace.recommend("tiny-sd", max_memory="1GB").recipe == "compile"
    assert vivace.recommend("tiny-sd", max_memory="1GB", gpu="H100").recipe is None


def test_disturbed_times_are_not_compared() -> None:
    def at(python_ms: float, *times: float) -> tuple[Round, ...]:
        rounds = (make_round(index, times) for index in range(2))
        return tuple(r.model_copy(update={"conditions": {"python_ms": python_ms}}) for r in rounds)

    records = [
        make_record("baseline", *at(4.0, 1.0, 1.01, 0.99)),
        make_record("compile", *at(2.0, 0.5, 0.51, 0.49)),
    ]
    found = table_of("own", "here", rows_of(records))
    answer = ask(found, model="tiny-sd", gpu=None)
    assert answer.recipe is None, "nothing is compared"
    (out,) = answer.left_out
    assert (out.recipe, out.kind) == ("compile", "no figure")
    assert "disturbed its times" in out.why
    memory = ask(found, model="tiny-sd", gpu=None, goal="memory")
    assert memory.ties, "memory is not disturbed"
    assert memory.next[0].endswith("--rerun")
    assert ask(found, model="tiny-sd", gpu=None, goal="stability").recipe is None


def test_with_random_weights_a_threshold_decides_on_noise() -> None:
    record = make_record("first_block_cache(0.3)", make_round(0))
    random = record.trial.model.model_copy(update={"name": "synthetic:flux-dev", "source": "synthetic"})
    record = record.model_copy(update={"trial": record.trial.model_copy(update={"model": random})})
    (row,) = table_of("own", "here", rows_of([record])).rows
    assert (row.outcome, row.is_known) == ("untrusted", False)
    assert "decides on noise" in row.reason


def test_wrong_arguments_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --price-per-hour"):
        vivace.recommend("flux-dev", goal="cost")
    with pytest.raises(UsageError, match="goals: latency, memory"):
        vivace.recommend("flux-dev", goal="speed")  # type: ignore[arg-type]
    with pytest.raises(UnknownModel, match="did you mean 'flux-dev'"):
        vivace.recommend("flux-dv")
    with pytest.raises(StoreError, match="no store at"):
        vivace.recommend("flux-dev", store=tmp_path / "none")
    with pytest.raises(UsageError, match="max_memory=-1"):
        vivace.recommend("flux-dev", max_memory=-1.0)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def asked(*arguments: str, code: int = 0) -> str:
        assert typed(monkeypatch, "recommend", *arguments) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    lines = asked("flux-dev", "--gpu", "H200", "--max-memory", "20GB", "--same-picture").splitlines()
    assert lines[0].startswith("flux-dev on H200 within 20.0 GB, for latency")
    long = [line for line in lines if len(line) > 80]
    assert all(len(max(line.split(), key=len)) > 40 for line in long), "only recipes that cannot be broken"
    assert {"gain", "stands", "memory", "quality", "runner-up", "missing", "sure", "next"} <= {
        line.split()[0] for line in lines if line and not line.startswith(" ")
    }
    plain = json.loads(asked("flux-dev", "--gpu", "H200", "--format", "json"))
    answer = Recommendation.model_validate(plain)
    assert answer.basis is not None
    assert (answer.basis.kind, answer.basis.near) == ("committed", "same")
    assert str(answer).splitlines()[2].strip() == plain["recipe"]
    assert "--price-per-hour" in asked("sdxl", "--goal", "cost", code=2)
    assert "12GiB" in asked("sdxl", "--max-memory", "much", code=2)


def test_the_answer_needs_no_torch() -> None:
    code = (
        "import sys, vivace; print(vivace.recommend('flux-dev', gpu='A100').recipe, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False", done.stdout


@pytest.mark.parametrize("goal", ["latency", "memory"])
def test_answers_for_another_gpu_are_never_sure(goal: str) -> None:
    for name in ("sd15", "sdxl", "pony", "flux-schnell"):
        answer = vivace.recommend(name, gpu="Tesla V100", goal=goal, store=[])  # type: ignore[arg-type]
        assert (answer.sure, answer.basis is not None and answer.basis.near) == ("low", "other")
        assert "Tesla V100" in " ".join(answer.missing)


def test_the_limit_of_the_chip_is_told() -> None:
    answer = vivace.recommend("flux2-dev", gpu="H100", store=())
    assert answer.limit is not None
    assert answer.limit.half_s == pytest.approx(50 * 282.6 / 989.5, rel=1e-3)
    assert answer.limit.eight_s == pytest.approx(answer.limit.half_s / 2, rel=1e-6)
    assert "50 computed steps of 283 TFLOP take at" in str(answer)
    assert vivace.recommend("flux2-dev", gpu="RTX 2060", store=()).limit is None, "no data sheet"
    assert vivace.recommend("tiny-sd", gpu="H100", store=()).limit is None, "no count"


def test_a_cpu_that_changed_matters_only_while_the_gpu_waits() -> None:
    """The GPU's busy time bounds what the CPU's speed can have done to a speed-up."""

    def at(python_ms: float, busy_s: float, *times: float) -> tuple[Round, ...]:
        rounds = (make_round(index, times) for index in range(2))
        update = {"conditions": {"python_ms": python_ms}, "gpu_busy_s": busy_s}
        return tuple(r.model_copy(update=update) for r in rounds)

    records = [
        make_record("baseline", *at(2.0, 0.99, 1.0, 1.01, 0.99)),
        make_record("compile", *at(4.0, 0.4, 0.5, 0.51, 0.49)),
    ]
    plain = rows_of(records)[1].speedup
    _, row = table_of("own", "here", rows_of(records)).rows
    assert row.gain is not None
    assert plain is not None
    assert (row.gain.point, row.gain.low) == (plain.point, plain.low)
    # 0.1 s of waiting would be 0.05 s at the baseline's speed: 0.45 instead of 0.5 s.
    assert row.gain.high == pytest.approx(plain.high * 0.5 / 0.45)
    assert "the GPU was busy 80 % of the time" in row.note
    answer = ask(table_of("own", "here", rows_of(records)), model="tiny-sd", gpu=None)
    assert answer.recipe == "compile"


def test_a_table_with_another_baseline_is_compared_by_its_times() -> None:
    """A study that starts from fp32 has the larger gain, and a slower recipe."""
    usual = table(seen("compile", 1.5), kind="committed", place="usual", steps=50)
    study = table(
        seen("dtype(fp32)", latency=Interval(30.0, 29.9, 30.1)),
        seen("bf16+compile", 3.0, latency=Interval(10.0, 9.9, 10.1)),
        seen("baseline", 2.7, latency=Interval(11.0, 10.9, 11.1)),
        kind="committed",
        place="study",
        baseline="dtype(fp32)",
        steps=50,
    )
    assert study.rows[0].recipe == "dtype(fp32)"
    for tables in ((usual, study), (study, usual)):
        answer = ask(*tables)
        assert answer.basis is not None
        assert answer.basis.place == "usual"
    without = study.model_copy(update={"rows": study.rows[:2]})
    assert ask(without, usual).recipe == "compile", "10 s an image instead of the published model's 10 s"
    other_size = without.model_copy(update={"height": 512})
    assert ask(other_size, usual).recipe == "compile", "nothing says what the published model takes there"
    quick = without.rows[1].model_copy(update={"latency": Interval(5.0, 4.9, 5.1)})
    faster = without.model_copy(update={"rows": (without.rows[0], quick)})
    assert ask(usual, faster).recipe == "dtype(bf16)+compile"
    assert ask(faster).recipe == "dtype(bf16)+compile", "alone it is followed"


@pytest.mark.parametrize("model", ["flux-dev", "flux-schnell"])
def test_the_fused_recipe_is_what_an_h200_wants(model: str) -> None:
    """Its record is not beside the published model's, and the answer says so."""
    answer = vivace.recommend(model, gpu="H200", store=())
    assert answer.recipe is not None
    assert answer.recipe.startswith("fused(fp8, attention=fp8)")
    assert answer.basis is not None
    assert answer.basis.place == f"results/flux-fused-{model}.json"
    assert answer.chosen is not None
    assert answer.chosen.gain is not None
    assert answer.chosen.gain.low is not None
    assert answer.chosen.gain.low > 2.2
    assert any("of another sitting" in doubt for doubt in answer.doubts)
    assert answer.sure == "medium"
