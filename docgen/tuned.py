"""The tables of docs/tuning.md about recorded searches: what `vivace tune ... --format json` wrote below results/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docgen.fastest import all_measurements, fastest_known
from vivace.answers.formatting import clock, seconds, size
from vivace.answers.markdown import markdown_lines

START, END = "<!-- tuned -->", "<!-- end of tuned -->"
_NONE_YET = "No search is recorded yet."
_HEADINGS = ("recipe", "s/image", "times as fast", "peak", "first call", "quality")


def filled(page: str, records: Sequence[Path]) -> str:
    """Return the page with a table of each search."""
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    parts = [section(json.loads(record.read_text(encoding="utf-8"))) for record in records]
    text = "\n\n".join(parts) if parts else _NONE_YET
    return f"{before}{START}\n{text}\n{END}{after}"


def section(search: dict[str, Any]) -> str:
    """Return a search's answer: what was asked, the rows of its final, and how they compare with earlier records."""
    lines = [_what(search), "", *markdown_lines(_HEADINGS, map(_cells, search["final"]))]
    lines += ["", *_sentences(search)]
    return "\n".join(lines)


def _what(search: dict[str, Any]) -> str:
    limits = search["limits"]
    criteria = [f"goal {search['goal']}"]
    if limits["max_memory_bytes"] is not None:
        criteria.append(f"`--max-memory {size(limits['max_memory_bytes']).replace(' ', '')}`")
    if limits["max_first_call_s"] is not None:
        criteria.append(f"`--max-first-call {limits['max_first_call_s']:g}s`")
    recipes = f"{search['trials']} recipe{'' if search['trials'] == 1 else 's'}"
    return (
        f"**{search['model']}** on {search['device']}, {', '.join(criteria)}: {recipes} measured in "
        f"{clock(search['seconds'])}; the pick is `{search['recipe']}`."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    name = "baseline" if row["is_baseline"] else f"`{row['recipe']}`"
    if row["latency"] is None:
        return [name, row["outcome"], "-", "-", "-", "-"]
    speedup, memory, quality = row["speedup"], row["memory"], row["quality"]
    verdict = None if quality is None else quality["verdict"]
    return [
        name,
        f"{row['latency']['median_s']:.3f}",
        "-" if speedup is None else _ratio(speedup),
        "-" if memory is None else size(memory["peak_bytes"]),
        "-" if row["first_call_s"] is None else seconds(row["first_call_s"]),
        "its own" if row["is_baseline"] else verdict or "unjudged",
    ]


def _ratio(speedup: dict[str, Any]) -> str:
    low, high = speedup["ci95"] or (None, None)
    reach = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{speedup['ratio']:.2f}{reach}"


def _sentences(search: dict[str, Any]) -> Iterator[str]:
    best = _best_before(search)
    pick = next((r for r in search["final"] if r["recipe"] == search["recipe"] and r["latency"]), None)
    if best is not None and pick is not None:
        recipe, before_s = best
        now_s = pick["latency"]["median_s"]
        yield (
            f"The fastest recipe that vivace's other records have of this model within these limits is `{recipe}`, "
            f"{before_s:.3f} s in a comparison of its own; the pick takes {now_s:.3f} s, {now_s / before_s:.2f} times "
            "as long."
        )
    for note in search["notes"]:
        text = note.replace("keep the picture", "keep the image")  # as earlier versions wrote it
        yield f"{text[0].upper()}{text[1:]}."


def _best_before(answer: dict[str, Any]) -> tuple[str, float] | None:
    """Return the fastest known recipe on such a device that keeps the limit of memory, from other records."""
    if not answer["final"]:
        return None
    steps = answer["final"][0]["workload"]["num_inference_steps"]
    model = answer["model"].removeprefix("synthetic:")
    limit = answer["limits"]["max_memory_bytes"]
    allowed = [
        measured
        for measured in all_measurements()
        if measured.card == answer["device"]
        and not Path(measured.record).name.startswith("tune-")
        and (limit is None or (measured.peak_bytes is not None and measured.peak_bytes <= limit))
    ]
    best = next((row.best for row in fastest_known(allowed, (model,))), None)
    return None if best is None or best.steps != steps else (best.recipe, best.latency.point)
