"""The tables of docs/tuning.md about recorded searches: what `vivace tune ... --format json` wrote below results/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import RecipeError
from vivace.recipes.resolve import resolve
from vivace.report.summary import clock, seconds, size
from vivace.studies.recorded import RecordedFigures, all_recorded

START, END = "<!-- tuned -->", "<!-- end of tuned -->"
_NONE_YET = "No search is recorded yet."
_HEAD = "| recipe | s/image | times as fast | peak | first call | quality |"


def filled(page: str, records: Sequence[Path]) -> str:
    """Return the page with a table of each search."""
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    parts = [section(json.loads(record.read_text())) for record in records]
    text = "\n\n".join(parts) if parts else _NONE_YET
    return f"{before}{START}\n{text}\n{END}{after}"


def section(found: dict[str, Any]) -> str:
    """Return a search's answer: what was asked, the rows of its final, and how they compare with earlier records."""
    lines = [_what(found), "", _HEAD, "| --- |" + " --- |" * _HEAD.count(" | ")]
    lines += [_row(row) for row in found["final"]]
    lines += ["", *_sentences(found)]
    return "\n".join(lines)


def _what(found: dict[str, Any]) -> str:
    limits = found["limits"]
    asked = [f"goal {found['goal']}"]
    if limits["max_memory_bytes"] is not None:
        asked.append(f"`--max-memory {size(limits['max_memory_bytes']).replace(' ', '')}`")
    if limits["max_first_call_s"] is not None:
        asked.append(f"`--max-first-call {limits['max_first_call_s']:g}s`")
    recipes = f"{found['trials']} recipe{'' if found['trials'] == 1 else 's'}"
    return (
        f"**{found['model']}** on {found['device']}, {', '.join(asked)}: {recipes} measured in "
        f"{clock(found['seconds'])}; the pick is `{found['recipe']}`."
    )


def _row(row: dict[str, Any]) -> str:
    name = "baseline" if row["is_baseline"] else f"`{row['recipe']}`"
    if row["latency"] is None:
        return f"| {name} | {row['outcome']} | - | - | - | - |"
    speedup, memory, quality = row["speedup"], row["memory"], row["quality"]
    verdict = None if quality is None else quality["verdict"]
    cells = [
        name,
        f"{row['latency']['median_s']:.3f}",
        "-" if speedup is None else _ratio(speedup),
        "-" if memory is None else size(memory["peak_bytes"]),
        "-" if row["first_call_s"] is None else seconds(row["first_call_s"]),
        "its own" if row["is_baseline"] else verdict or "unjudged",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(speedup: dict[str, Any]) -> str:
    low, high = speedup["ci95"] or (None, None)
    reach = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{speedup['ratio']:.2f}{reach}"


def _sentences(found: dict[str, Any]) -> Iterator[str]:
    best = _best_before(found)
    pick = next((r for r in found["final"] if r["recipe"] == found["recipe"] and r["latency"]), None)
    if best is not None and pick is not None:
        recipe, before_s = best
        now_s = pick["latency"]["median_s"]
        yield (
            f"The fastest recipe that vivace's other records have of this model within these limits is `{recipe}`, "
            f"{before_s:.3f} s in a comparison of its own; the pick takes {now_s:.3f} s, {now_s / before_s:.2f} times "
            "as long."
        )
    for note in found["notes"]:
        yield f"{note[0].upper()}{note[1:]}."


def _best_before(found: dict[str, Any]) -> tuple[str, float] | None:
    """Return the fastest recorded recipe on such a device that keeps the picture and the limit of memory."""
    first = found["final"][0] if found["final"] else None
    if first is None:
        return None
    workload = first["workload"]
    model = found["model"].removeprefix("synthetic:")
    limit = found["limits"]["max_memory_bytes"]

    def is_allowed(text: str, one: RecordedFigures) -> bool:
        try:
            same = resolve(text).same_picture
        except RecipeError:  # of an older vivace
            return False
        return one.device == found["device"] and same and (limit is None or one.peak_bytes <= limit)

    times = [
        (one.seconds(workload["num_inference_steps"]), text)
        for (name, text, height, width), known in all_recorded().items()
        if (name, height, width) == (model, workload["height"], workload["width"])
        for one in known
        if is_allowed(text, one)
    ]
    return (min(times)[1], min(times)[0]) if times else None
