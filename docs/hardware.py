"""docs/hardware.md: which mode of which technique runs on which hardware, asked of the techniques themselves."""

from __future__ import annotations

import re

from vivace.spec.technique import Machine
from vivace.techniques import TECHNIQUES
from vivace.techniques.describe import states

_GPUS = (
    ("Turing, T4, RTX 20", (7, 5)),
    ("Ampere, A100", (8, 0)),
    ("Ampere, RTX 30", (8, 6)),
    ("Ada, RTX 40", (8, 9)),
    ("Hopper, H100", (9, 0)),
    ("Blackwell, B200", (10, 0)),
    ("Blackwell, RTX 50", (12, 0)),
)
# Named in the plainest words, since their names end up in reasons.
MACHINES: dict[str, Machine] = {
    "CPU": Machine("cpu", "the CPU", None, "c++", has_all_packages=True),
    **{
        f"{name} ({major}.{minor})": Machine("cuda", "the GPU", (major, minor), "c++", has_all_packages=True)
        for name, (major, minor) in _GPUS
    },
}


def page(note: str) -> str:
    """The page as Markdown."""
    lines = [
        note,
        "# What runs on which hardware\n",
        "Asked of the techniques' own declarations, with every optional package taken for installed; no record of a "
        "measurement stands behind a ✓. `vivace techniques` asks the same of the machine at hand and what is "
        "installed on it, and a model can still be refused: for its precision, or the sizes of its attention heads.\n",
        "What each mode does to weights and to arithmetic is told with its technique ([techniques](techniques.md)).\n",
        f"| recipe | {' | '.join(MACHINES)} |",
        "| --- |" + " :-: |" * len(MACHINES),
    ]
    everywhere, reasons = [], dict[str, int]()
    for technique in TECHNIQUES.values():
        columns = [
            {s["recipe"]: s["unsupported"] for s in states(technique, machine)}
            for machine in MACHINES.values()
        ]
        limited = [recipe for recipe in columns[0] if any(column[recipe] for column in columns)]
        free = [recipe for recipe in columns[0] if recipe not in limited]
        everywhere += free if limited else [technique.name]
        for recipe in limited:
            cells = [_cell(column[recipe], reasons) for column in columns]
            lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    lines += ["", f"Everywhere: {', '.join(f'`{recipe}`' for recipe in everywhere)}."]
    return "\n".join(lines) + "\n"


def _cell(reason: str | None, reasons: dict[str, int]) -> str:
    """A tick, or the number of the reason, which gets one if it is new."""
    if reason is None:
        return "✓"
    # What a column has, its heading says.
    brief = re.sub(r"[,;] the GPU has \S+$", "", reason)
    return f"[{reasons.setdefault(brief, len(reasons) + 1)}]"
