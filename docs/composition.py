"""The page docs/composition.md, from the records that `python -m tests.composition.run` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.composition.recipes import MODELS, legal_pairs, named_recipes, refusing_pairs
from tests.composition.run import EXACT_LEAST_DB, STATED, WORST_MEMBER_DB, complaints, read
from vivace.techniques import TECHNIQUES

_SYMBOLS = {"measured": "✓", "unsupported": "u", "no_effect": "n"}
_HALF, _BROKEN, _MISSING, _NOT_LEGAL = "a", "✗", "?", "·"

Row = dict[str, Any]


def page(record: Path, note: str, named: Sequence[Path] = ()) -> str:
    """Markdown.

    Args:
        record: a file that exists.
        note: what stands above the heading: that the page is generated.
        named: files that exist, records of the named recipes, one for each device.
    """
    found = read(record)
    rows, conditions = found["rows"], found["conditions"]
    pairs = {(row["model"], *row["names"]): row for row in rows if row["kind"] == "pair"}
    drawn = [row for row in rows if row["kind"] == "random"]
    broken = dict(complaints(rows))
    libraries = ", ".join(f"{name} {version}" for name, version in conditions["libraries"].items())
    steps = ", ".join(f"{model} in {num} steps" for model, num in conditions["steps"].items())
    lines = [
        note,
        "# What composes\n",
        f"Pairs of techniques and random recipes of 3 to 6, drawn on the embedded models ({steps}) on a CPU, "
        f"`compile` with its `eager` backend; {libraries}. The record holds **{len(pairs)} of "
        f"{conditions['pairs']} legal pairs** (both models together) and "
        f"**{len(drawn)} of {conditions['random']} random recipes**.\n",
        f"A pair works if it draws a picture that is not black, flat, noise or not finite, and the same again in a "
        f"second call. Where all techniques keep "
        f"the picture, it also stays within {WORST_MEMBER_DB:g} dB (PSNR to the baseline in fp32) of the worst of them "
        f"alone, or at {EXACT_LEAST_DB:g} dB and more; where all are exact, at {EXACT_LEAST_DB:g} dB and more.\n",
        f"Of the pairs {_counts(list(pairs.values()))}; of the random recipes {_counts(drawn)}. "
        + (f"{len(broken)} broke a rule; they stand below.\n" if broken else "None broke a rule.\n"),
        f"In each cell the first sign is of {MODELS[0]}, the second of {MODELS[1]}: ✓ works, {_HALF} works, but one "
        f"of the two found its wish fulfilled already, u unsupported here, n no effect, {_BROKEN} breaks a rule, "
        f"{_MISSING} not drawn yet, {_NOT_LEGAL} refused by declaration. The reasons "
        "stand below. CUDA-only techniques read u here, whatever they do on a GPU.\n",
    ]
    names = list(TECHNIQUES)
    lines += [f"{number}. {name}" for number, name in enumerate(names, 1)]
    legal = {(case.model, *case.names) for case in legal_pairs()}
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
            "## Drawn over more steps\n",
            "Flat over so few steps, and so drawn again over all of the model's own. What that costs in quality is "
            "for the quality gate to say:\n",
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
        "Made by `python -m tests.composition.run`, which goes on where it stopped "
        f"([record](../results/{record.name}))."
    )
    return "\n".join(lines) + "\n"


def _named(records: Sequence[Path]) -> list[str]:
    """A table with one row a named recipe and one column a device, then what its figures need to be understood."""
    found = [read(record) for record in records]
    devices = [record["conditions"].get("device_name", "CPU") for record in found]
    cells = {
        (row["model"], row["recipe"], device): row
        for device, record in zip(devices, found, strict=True)
        for row in record["rows"]
        if row["kind"] == "named"
    }
    broken = {
        (device, recipe): why
        for device, record in zip(devices, found, strict=True)
        for recipe, why in complaints(record["rows"])
    }
    lines = [
        "Recipes as people type them, `compile` with inductor, each in a process of its own; of compiled code they "
        "find only what the run itself left. They are held to the same rules, and to having compiled something. In a "
        "cell: PSNR to the baseline in fp32 (low where a technique changes the picture), graphs, breaks between them, "
        "and the seconds of loading, compiling and drawing twice on cores shared with other work: nothing to compare "
        "by.\n",
        f"| model | recipe | {' | '.join(devices)} |",
        "| --- | --- |" + " --- |" * len(devices),
    ]
    for case in named_recipes():
        told = [_named_cell(cells.get((case.model, case.recipe, device))) for device in devices]
        lines.append(f"| {case.model} | `{case.recipe}` | {' | '.join(told)} |")
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
        return "none is drawn yet"
    seen = [*STATED, *sorted({row["outcome"] for row in rows} - set(STATED))]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in seen}
    return ", ".join(f"{num} {outcome.replace('_', ' ')}" for outcome, num in counts.items() if num)


def _refused() -> str:
    """Pairs of different techniques with one slot, and whether they have room on different components."""
    never = refusing_pairs()
    told = ", ".join(f"{first} and {second}" for first, second in never)
    slots: dict[str, list[str]] = {}
    for name, technique in TECHNIQUES.items():
        slots.setdefault(technique.owns, []).append(name)
    shared = "; ".join(f"{slot}: {', '.join(names)}" for slot, names in slots.items() if len(names) > 1)
    return (
        f"Different techniques that can never stand in one recipe: {told or 'none'}. A technique refuses itself on the "
        "same component; the diagonal has those that were drawn on two. Slots that several techniques own, so that "
        f"they have to be aimed at different components: {shared or 'none'}."
    )


def _reasons(rows: list[Row]) -> list[str]:
    """Each reason once, with the models and how many pairs gave it."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["outcome"] != "measured":
            sign = _SYMBOLS.get(row["outcome"], _BROKEN)
            found.setdefault((sign, row["reason"]), []).append(row)
    lines = []
    for (sign, reason), those in sorted(found.items()):
        models = ", ".join(sorted({row["model"] for row in those}))
        count = "1 pair" if len(those) == 1 else f"{len(those)} pairs"
        lines.append(f"- {sign} {reason} ({models}; {count})")
    return lines
