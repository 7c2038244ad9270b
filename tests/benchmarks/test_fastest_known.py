"""What is called the fastest known: chosen once, and the same on every page."""

import math
from dataclasses import replace
from pathlib import Path

import vivace
from benchmarks.technique_cases import RESULTS
from benchmarks.technique_records import read_records
from docgen import fastest, readme
from docgen.choosing import FULL_SIZE
from docgen.fastest import Measurement, all_measurements, fastest_known
from docgen.targets import TARGETS, fastest_of
from vivace.answers.formatting import seconds
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError, StoreError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

ROOT = Path(__file__).parents[2]


def measured(recipe: str, seconds: float, **changes: object) -> Measurement:
    base = Measurement(
        model="sdxl",
        card="NVIDIA H200",
        height=1024,
        steps=50,
        recipe=recipe,
        latency=Interval(seconds, 0.99 * seconds, 1.01 * seconds),
        peak_bytes=12_400_000_000,
        gain=None if recipe == BASELINE else Interval(4 / seconds, 3.9 / seconds, 4.1 / seconds),
        reference=BASELINE,
        record="results/a.json",
    )
    return replace(base, **changes)


def test_the_readme_names_the_fastest_and_best_is_that_recipe() -> None:
    text = (ROOT / "README.md").read_text().partition(readme.FASTEST)[2].partition(readme.END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.strip().splitlines()[2:]]
    known = {
        readme.MODELS[row.best.model]: row.best
        for row in fastest_known(all_measurements(), list(readme.MODELS))
        if row.best.card == readme.CARD
    }
    assert len(rows) == len(readme.MODELS) == len(known)
    for title, _, before, after, times in rows:
        best = known[title]
        assert after.startswith(seconds(best.latency.point) + ",")
        assert float(times[1:].partition("]")[0]) > 1 < float(before.split()[0]) / float(after.split()[0])
        chosen = vivace.recommend(best.model, gpu="H200", same_picture=True)
        assert chosen.recipe == best.recipe, f"`best` draws {title} otherwise"


def test_choosing_names_the_fastest_of_every_card() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    models = [name for names in FULL_SIZE.values() for name in names]
    for row in fastest_known(all_measurements(), models):
        assert f"`{row.best.recipe}`, [{seconds(row.best.latency.point)}](../{row.best.record})" in text


def test_no_record_has_a_faster_row() -> None:
    """Each row is the shortest time of its model, card and steps in any record, and names a record that exists."""
    rows = {(row.best.model, row.best.card): row.best for row in fastest_known(all_measurements())}
    shortest: dict[tuple[str, str], float] = {}
    for path in sorted(RESULTS.glob("*.json")):
        try:
            records = read_records(path)
        except StoreError:
            continue  # of another kind
        if path.name.startswith(("offload-", "int4-")):
            continue  # of other libraries' own means, or of an older vivace's
        for record in records:
            model, workload = record.trial.model.name.removeprefix("synthetic:"), record.trial.workload
            entry = CATALOGUE[model]
            row = rows_of([record])[0]
            own = (entry.height, entry.num_inference_steps, 1)
            is_own = (workload.height, workload.num_inference_steps, workload.batch) == own
            if row.latency is None or not is_own or not is_of_one_gpu_and_every_step(row.recipe):
                continue
            key = (model, record.environment.device_name)
            shortest[key] = min(shortest.get(key, math.inf), row.latency.median.point)
    assert {("sd15", "NVIDIA H200"), ("flux-dev", "NVIDIA H200"), ("qwen-image-2512", "NVIDIA H200")} < set(
        shortest
    )
    for key, least in shortest.items():
        if key in rows:
            assert rows[key].latency.point <= 1.001 * least, key
    for best in rows.values():
        assert (ROOT / best.record).exists()
        assert best.recipe != BASELINE


def is_of_one_gpu_and_every_step(text: str) -> bool:
    try:
        recipe = resolve(text)
    except RecipeError:
        return False
    return recipe.same_picture and "parallel" not in text


PAGES = (
    "docs/models-measured.md",
    *(f"docs/performance/{name}.md" for name in ("flux", "today", "unets")),
)


def test_a_model_card_and_steps_have_one_figure_on_all_pages() -> None:
    """Also on the page of targets, for those at the model's own number of steps."""
    figures: dict[tuple[str, str, str], set[str]] = {}
    for page in PAGES:
        lines = (ROOT / page).read_text().splitlines()
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")
        ]
        for cells in rows:
            if len(cells) == len(fastest.HEADINGS) and cells[0] in CATALOGUE:
                figures.setdefault((cells[0], cells[1], cells[2].split(",")[0]), set()).add(
                    cells[6].split(" s")[0]
                )
    for target in TARGETS:
        for timed in [] if target.part else fastest_of(target, RESULTS):
            if timed.record == "new-prompts.jsonl":
                continue  # it has no baseline beside it
            key = (target.model, timed.card, str(target.steps))
            if key in figures:
                figures[key].add(seconds(timed.latency.point).removesuffix(" s"))
    assert len(figures) > 20
    assert {key: values for key, values in figures.items() if len(values) > 1} == {}


def test_a_model_whose_fastest_is_the_baseline_has_no_row() -> None:
    assert fastest_known([measured(BASELINE, 4.0)]) == []
    assert fastest_known([measured(BASELINE, 4.0), measured("compile", 5.0)]) == []


def test_a_gain_says_what_it_is_over_and_whether_it_is_proven() -> None:
    def gain(**changes: object) -> tuple[str, str]:
        (row,) = fastest_known([measured(BASELINE, 4.0), measured("compile", 2.0, **changes)])
        return row.cells[5], row.cells[7]

    assert gain() == ("`compile`", "2.00x [1.95, 2.05]")
    assert gain(reference="cuda_graph")[1] == "2.00x [1.95, 2.05] over `cuda_graph`"
    apart = gain(gain=None)
    assert apart[1].startswith("2.00x [1.9")
    assert apart[1].endswith("] †")
    assert gain(gain=Interval(1.05, 0.98, 1.1))[0] == "not proven: `compile`"
    assert gain(gain=Interval(1.08, 1.06, 1.1), num_rounds=1)[0] == "not proven: `compile`"
    assert gain(gain=Interval(1.08, 1.06, 1.1), num_rounds=2)[0] == "`compile`"


def test_what_others_reported_counts_where_there_is_no_record() -> None:
    reported = {"is_reported": True, "record": "results/community/a.json"}
    own = [measured(BASELINE, 4.0), measured("compile", 3.0)]
    elsewhere = [
        measured(recipe, seconds, card="NVIDIA GeForce RTX 4090", **reported)
        for recipe, seconds in ((BASELINE, 6.0), ("compile", 5.0))
    ]
    faster = measured("compile", 1.0, **reported)
    lines = [each.cells for each in fastest_known([*own, faster, *elsewhere])]
    assert [(cells[1], cells[-1]) for cells in lines] == [
        ("H200", "[record](../results/a.json)"),
        ("GeForce RTX 4090", "[reported by others](../results/community/a.json)"),
    ]
    assert lines[0][5] == "`compile`"
    assert lines[0][6] == "3.00 s"
