"""Tables from published numbers: one for each model and GPU of a study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby

from vivace.errors import RecipeError
from vivace.evidence.studies.study_columns import Published
from vivace.evidence.studies.study_file import StudyFile, published_studies, read_study
from vivace.evidence.tables import CallSpread, EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.stats import Gate, Interval
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve_cached

TIMES = ("p50", "latency", "mean")
"""Metrics that are the time of an image, the most robust first."""
LEAST_CLIP = 0.9
"""Share of the baseline's published CLIP score below which images count as ruined: a lenient guess, since a score
has no known zero."""


def published_tables(names: Iterable[str] | None = None) -> list[EvidenceTable]:
    """Return the tables of published studies; None for all that ship with vivace."""
    studies = published_studies() if names is None else names
    return [table for name in studies for table in _shipped(name)]


@cache
def _shipped(name: str) -> tuple[EvidenceTable, ...]:
    return tuple(tables_of_study(read_study(name)))


def tables_of_study(file: StudyFile) -> list[EvidenceTable]:
    baselines = {_canonical(part.baseline.recipe)[0] for part in file.part}
    timed = [cell for cell in file.cells if cell.gpu and cell.model and cell.recipe]
    tables = []
    for (model, gpu), cells in groupby(sorted(timed, key=_place), key=_place):
        rows = list(_rows(list(cells)))
        if not any(row.latency is not None for row in rows):
            continue
        baseline = next((row for row in rows if row.recipe in baselines), rows[0])
        tables.append(_table(file, model, gpu, baseline, rows))
    return tables


_PROFILED = (
    "its times are of calls under a profiler, which are not seconds an image: only their ratios are given"
)


def _place(cell: Published) -> tuple[str, str]:
    return cell.model, cell.gpu


def _table(
    file: StudyFile, model: str, gpu: str, baseline: EvidenceRow, rows: list[EvidenceRow]
) -> EvidenceTable:
    """Return a table with speed-ups over the baseline, or over the first row if the source did not time the
    baseline."""
    reference = baseline if baseline.latency is not None else next(r for r in rows if r.latency is not None)
    base = reference.latency
    assert base is not None
    table = []
    for row in (reference, *(row for row in rows if row is not reference)):
        changes: dict[str, object] = {}
        if row is not reference:
            gain = None if row.latency is None else Interval(base.point / row.latency.point, None, None)
            changes = {"gain": gain, "judged": _against(row.judged, reference.judged)}
        if file.profiled:  # the gain stays, the times go
            changes |= {"latency": None, "spread": None}
            changes |= {"gain": Interval(1.0, None, None)} if row is reference else {}
        table.append(row.model_copy(update=changes))
    workload = file.model.get(model, file.workload)
    notes = [_PROFILED] if file.profiled else []
    if baseline.latency is None:
        notes.insert(
            0, f"the source did not time its baseline on this GPU: gains are over {reference.recipe}"
        )
    return EvidenceTable(
        kind="published",
        place=f"study {file.name}",
        model=model,
        gpu=gpu,
        height=workload.height or file.workload.height,
        width=workload.width or file.workload.width,
        steps=workload.num_inference_steps or file.workload.num_inference_steps,
        baseline=reference.recipe,
        rows=tuple(table),
        profiled=file.profiled,
        note="; ".join(notes),
    )


def _rows(cells: list[Published]) -> Iterator[EvidenceRow]:
    """Yield each row; a row in several tables of the source comes from the first."""
    rows: dict[tuple[str, str], dict[str, Published]] = {}
    for cell in cells:
        rows.setdefault((cell.row, cell.recipe), {}).setdefault(cell.metric, cell)
    for (label, text), metrics in rows.items():
        recipe, parsed = _canonical(text)
        numbers = {name: cell.number for name, cell in metrics.items() if cell.number is not None}
        time_s = next((numbers[name] for name in TIMES if name in numbers), None)
        missing = next((metrics[name].note for name in TIMES if name in metrics), "not in the source")
        clip = numbers.get("clip")
        yield EvidenceRow(
            recipe=recipe,
            label=label,
            num_techniques=0 if parsed is None else len(parsed.techniques),
            same_picture=parsed is not None and parsed.same_picture,
            outcome="measured" if time_s is not None else "not published",
            reason="" if time_s is not None else missing,
            latency=None if time_s is None else Interval(time_s, None, None),
            peak_bytes=int(numbers["peak_memory"]) if "peak_memory" in numbers else None,
            spread=CallSpread(p50_s=numbers["p50"], min_s=numbers["min"], p99_s=numbers.get("p99"))
            if {"p50", "min"} <= numbers.keys()
            else None,
            # The score itself until the baseline's is known, see _against.
            judged=None if clip is None else JudgedQuality(clip=Interval(clip, None, None)),
            note="; ".join(
                dict.fromkeys(
                    c.note for n, c in metrics.items() if c.note and n in (*TIMES, "peak_memory") and c.value
                )
            ),
        )


def _against(mine: JudgedQuality | None, reference: JudgedQuality | None) -> JudgedQuality | None:
    if mine is None or mine.clip is None or reference is None or reference.clip is None:
        return None
    here, there = mine.clip.point, reference.clip.point
    reason = f"published CLIP score {here:.4f}, the baseline's {there:.4f}"
    if here < LEAST_CLIP * there:
        return JudgedQuality(gate=Gate.FAILED, reason=reason)
    return JudgedQuality(gate=Gate.UNCLEAR, reason=f"{reason}; a score has no interval and no known zero")


@cache
def _canonical(text: str) -> tuple[str, Recipe | None]:
    """Return a recipe in canonical form; as the source's CSV has it if this version of vivace cannot read it."""
    try:
        recipe = resolve_cached(text)
    except RecipeError:
        return text, None
    return recipe.text, recipe
