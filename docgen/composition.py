"""The page docs/composition.md, from the records that `python -m tests.composition.run` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.composition.recipes import MODELS, legal_pairs, named_recipes, refusing_pairs
from tests.composition.run import EXACT_LEAST_DB, STATED, WORST_MEMBER_DB, complaints, read, still_exists
from vivace.answers.markdown import markdown_lines
from vivace.techniques import TECHNIQUES

_SYMBOLS = {"measured": "✓", "unsupported": "u", "no_effect": "n"}
_HALF, _BROKEN, _MISSING, _NOT_LEGAL = "a", "✗", "?", "·"

Row = dict[str, Any]


def page(record: Path, note: str, named: Sequence[Path] = ()) -> str:
    """Return the page as Markdown.

    Args:
        record: a file that exists.
        note: the line above the heading that says the page is generated.
        named: existing records of the named recipes, one per device.
    """
    measured = read(record)
    rows, conditions = (
        [row for row in measured["rows"] if still_exists(row["recipe"])],
        measured["conditions"],
    )
    legal = {(case.model, *case.names) for case in legal_pairs()}
    pairs = {(row["model"], *row["names"]): row for row in rows if row["kind"] == "pair"}
    drawn = [row for row in rows if row["kind"] == "random"]
    broken = dict(complaints(rows))
    libraries = ", ".join(f"{name} {version}" for name, version in conditions["libraries"].items())
    steps = ", ".join(f"{model} in {num} steps" for model, num in conditions["steps"].items())
    lines = [
        note,
        "# What composes\n",
        f"Every pair of techniques, and random recipes of 3 to 6, run on the embedded models ({steps}) on a CPU, "
        f"`compile` with its `eager` backend; {libraries}. The record has **{len(pairs)} of "
        f"{len(legal)} legal pairs** (both models together) and "
        f"**{len(drawn)} of {conditions['random']} random recipes**.\n",
        "A pair works if its image is not black, flat, noise or not finite, and a second call gives the same image. "
        f"If all techniques keep the image, its PSNR to the baseline in fp32 must also be within {WORST_MEMBER_DB:g} "
        f"dB of the worst of them alone, or at least {EXACT_LEAST_DB:g} dB; if all are exact, at least "
        f"{EXACT_LEAST_DB:g} dB.\n",
        f"Pairs: {_counts(list(pairs.values()))}. Random recipes: {_counts(drawn)}. "
        + (f"{len(broken)} broke a rule; they are listed below.\n" if broken else "None broke a rule.\n"),
        f"In each cell the first symbol is for {MODELS[0]}, the second for {MODELS[1]}: ✓ works, {_HALF} works, but "
        f"one of the two had nothing to change, u unsupported here, n no effect, {_BROKEN} breaks a rule, {_MISSING} "
        f"not run yet, {_NOT_LEGAL} refused by declaration. The reasons are listed below. CUDA-only techniques read "
        "u here, since there is no GPU.\n",
    ]
    names = list(TECHNIQUES)
    lines += [f"{number}. {name}" for number, name in enumerate(names, 1)]
    lines += [
        "",
        f"| | {' | '.join(str(n) for n in range(1, len(names) + 1))} |",
        "|" + " --- |" * (len(names) + 1),
    ]
    for place, first in enumerate(names):
        cells = [""] * place
        for second in names[place:]:
            signs = [_sign((model, first, second), pairs, legal, broken) for model in MODELS]
            cells.append("".join(signs) if set(signs) != {_NOT_LEGAL} else _NOT_LEGAL)
        lines.append(f"| {place + 1} {first} | {' | '.join(cells)} |")
    lines += ["", "## Refused by declaration\n", _refused(), ""]
    lines += ["## Reasons\n", *_reasons(list(pairs.values())), ""]
    if named:
        lines += ["## With the real compiler\n", *_named(named), ""]
    if longer := [row for row in rows if "steps" in row]:
        lines += [
            "## Run with more steps\n",
            "These gave a flat image in so few steps, so they were run again with the model's own number. Whether the "
            "quality is good enough is for the quality gate to judge:\n",
            *(f"- {row['model']} `{row['recipe']}`: {row['steps']} steps" for row in longer),
            "",
        ]
    if broken:
        lines += [
            "## Broken rules\n",
            *(f"- `{recipe}`: {why}" for recipe, why in sorted(broken.items())),
            "",
        ]
    lines.append(
        "Made by `python -m tests.composition.run`, which continues where it stopped "
        f"([record](../results/{record.name}))."
    )
    return "\n".join(lines) + "\n"


def _named(records: Sequence[Path]) -> list[str]:
    """Return a table with a row per named recipe and a column per device, and how to read it."""
    runs = [read(record) for record in records]
    devices = [record["conditions"].get("device_name", "CPU") for record in runs]
    cells = {
        (row["model"], row["recipe"], device): row
        for device, record in zip(devices, runs, strict=True)
        for row in record["rows"]
        if row["kind"] == "named"
    }
    broken = {
        (device, recipe): why
        for device, record in zip(devices, runs, strict=True)
        for recipe, why in complaints(record["rows"])
    }
    lines = [
        "Typical recipes, with inductor, each in a separate process; the compiler's cache has only code of the same "
        "run. The rules are the same, and something must have been compiled. A cell gives PSNR to the baseline in "
        "fp32 (low where a technique changes the image), graphs, graph breaks, and the seconds for loading, "
        "compiling and two calls, on cores shared with other work, so do not compare times.\n",
    ]
    rows = []
    for case in named_recipes():
        figures = [_named_cell(cells.get((case.model, case.recipe, device))) for device in devices]
        rows.append([case.model, f"`{case.recipe}`", *figures])
    lines += markdown_lines(("model", "recipe", *devices), rows)
    lines += ["", *(f"- {_BROKEN} {device}: `{recipe}`: {why}" for (device, recipe), why in broken.items())]
    links = ", ".join(
        f"[{device}](../results/{path.name})" for device, path in zip(devices, records, strict=True)
    )
    lines.append(
        f"Made by `python -m tests.composition.run --named`, with `--device cuda` on a GPU (records: {links})."
    )
    return lines


def _named_cell(row: Row | None) -> str:
    if row is None:
        return _MISSING
    if row["outcome"] != "measured":
        return f"{_SYMBOLS.get(row['outcome'], _BROKEN)}: {row['reason']}"
    breaks = f", {row['graph_breaks']} breaks" if row["graph_breaks"] else ""
    return (
        f"✓ {row['psnr_db']:.1f} dB; {row['compiled_graphs']} graph{'s' * (row['compiled_graphs'] != 1)}{breaks}; "
        f"{row['wall_s']:.0f} s"
    )


def _sign(key: tuple[str, ...], pairs: dict[Any, Row], legal: set[Any], broken: dict[str, str]) -> str:
    if key not in legal:
        return _NOT_LEGAL
    row = pairs.get(key)
    if row is None:
        return _MISSING
    if f"{row['model']} {row['recipe']}" in broken:
        return _BROKEN
    if row["outcome"] == "measured" and row["warnings"]:
        return _HALF
    return _SYMBOLS.get(row["outcome"], _BROKEN)


def _counts(rows: list[Row]) -> str:
    if not rows:
        return "none run yet"
    outcomes = [*STATED, *sorted({row["outcome"] for row in rows} - set(STATED))]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in outcomes}
    return ", ".join(f"{num} {outcome.replace('_', ' ')}" for outcome, num in counts.items() if num)


def _refused() -> str:
    """List pairs of techniques with one slot, and the slots that allow them on different components."""
    never = refusing_pairs()
    pairs = ", ".join(f"{first} and {second}" for first, second in never)
    slots: dict[str, list[str]] = {}
    for name, technique in TECHNIQUES.items():
        slots.setdefault(technique.declared.owns, []).append(name)
    shared = "; ".join(f"{slot}: {', '.join(names)}" for slot, names in slots.items() if len(names) > 1)
    return (
        f"Techniques that are never allowed in one recipe: {pairs or 'none'}. A technique cannot be applied twice to "
        "one component; the diagonal has those that were run on two. Slots that several techniques own, so they "
        f"must target different components: {shared or 'none'}."
    )


def _reasons(rows: list[Row]) -> list[str]:
    """List each reason once, with its models and number of pairs."""
    by_reason: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["outcome"] != "measured":
            sign = _SYMBOLS.get(row["outcome"], _BROKEN)
            by_reason.setdefault((sign, row["reason"]), []).append(row)
    lines = []
    for (sign, reason), those in sorted(by_reason.items()):
        models = ", ".join(sorted({row["model"] for row in those}))
        count = "1 pair" if len(those) == 1 else f"{len(those)} pairs"
        lines.append(f"- {sign} {reason} ({models}; {count})")
    return lines
