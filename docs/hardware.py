"""docs/hardware.md: which mode of which technique runs on which hardware, and what it does to weights and products,
asked of the techniques themselves."""

from __future__ import annotations

import re

from vivace.contract import Arithmetic, Machine
from vivace.recipes.describe import states
from vivace.techniques import TECHNIQUES

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
        "*Weights* says how those of the layers that a mode takes are stored, *products* what its matrix products (and "
        "convolutions) are computed in. Only where that is fewer bits can they get faster; weights alone in fewer "
        "bits save memory, and are widened in front of each product. Where *products* says as before, the precision is "
        "that of the recipe: fp16 or bf16 on a GPU. Why and at what cost is told with each technique "
        "([techniques](techniques.md)); what stands in for TensorRT's int8 convolutions, in a "
        "[decision](adr/0005-no-tensorrt.md).\n",
        f"| recipe | weights | products | {' | '.join(MACHINES)} |",
        "| --- | --- | --- |" + " :-: |" * len(MACHINES),
    ]
    everywhere, reasons = [], dict[str, int]()
    for technique in TECHNIQUES.values():
        columns = [
            {state["recipe"]: state["unsupported"] for state in states(technique, machine)}
            for machine in MACHINES.values()
        ]
        numbers = {
            state["recipe"]: Arithmetic(state["weights"], state["products"])
            for state in states(technique, MACHINES["CPU"])
        }
        told = [
            recipe
            for recipe in numbers
            if numbers[recipe] != Arithmetic() or any(column[recipe] for column in columns)
        ]
        rest = [recipe for recipe in numbers if recipe not in told]
        everywhere += rest if told else [technique.name]
        for recipe in told:
            cells = [_cell(column[recipe], reasons) for column in columns]
            weights, products = numbers[recipe].weights, numbers[recipe].products
            lines.append(f"| `{recipe}` | {weights} | {products} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    lines += [
        "",
        "Everywhere, and with numbers stored and multiplied as before: "
        + ", ".join(f"`{recipe}`" for recipe in everywhere)
        + ".",
    ]
    return "\n".join(lines) + "\n"


def _cell(reason: str | None, reasons: dict[str, int]) -> str:
    """A tick, or the number of the reason, which gets one if it is new."""
    if reason is None:
        return "✓"
    # What a column has, its heading says.
    brief = re.sub(r"[,;] the GPU has \S+$", "", reason)
    return f"[{reasons.setdefault(brief, len(reasons) + 1)}]"
