"""Tables of docs/loras.md and docs/compiling.md, one for each device that has a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lora, sizes
from benchmarks.command import record_on
from vivace.answers.formatting import seconds
from vivace.answers.markdown import markdown_lines
from vivace.foundation.stats import median_interval

END = "<!-- end -->"
_CLOCKS = {
    "process_time": "CPU time",
    "cpu_time": "CPU time, the C++ compiler included",
    "perf_counter": "time",
}
_EXCHANGES = ("exchange of a file", "new scale", "new graphs")


def loras(page: str) -> str:
    """Return docs/loras.md with the table of what a LoRA costs."""
    return _filled(page, "<!-- lora -->", lora.RECORD, lora.read_cases, _lora_table)


def compiling(page: str) -> str:
    """Return docs/compiling.md with the table of what a new size costs."""
    return _filled(page, "<!-- sizes -->", sizes.RECORD, sizes.read_cases, _sizes_table)


def _filled(
    page: str,
    start: str,
    record: Path,
    read: Callable[[Path], dict[Any, dict[str, Any]]],
    table: Callable[[Sequence[dict[str, Any]]], list[str]],
) -> str:
    before, rest = page.split(start, 1)
    _, after = rest.split(END, 1)
    lines = []
    for path in (record, record_on(record, "cuda")):
        if cases := list(read(path).values()):
            lines += ["", *table(cases), "", f"[Record](../results/{path.name})."]
        else:
            lines += ["", "No GPU has been measured yet."]
    text = "\n".join(lines).strip()
    return f"{before}{start}\n\n{text}\n\n{END}{after}"


def _where(cases: Sequence[dict[str, Any]]) -> str:
    environment = cases[0]["environment"]
    device = "One core of a CPU" if environment["device"] == "cpu" else environment["device_name"]
    return f"{device}, torch {environment['libraries']['torch']}, {_CLOCKS[cases[0]['clock']]}"


def _lora_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"{_where(cases)}; steps of {_several(cases, lambda case: len(case['step_s']['plain']))} calls of "
        f"{_several(cases, lambda case: case['num_inference_steps'])} steps each:",
        "",
    ]
    rows = []
    for case in cases:
        sides = (_ratio(lora.ratios(case, side)) for side in lora.SIDES[1:])
        made = sum(case["graphs_after"].values()) - sum(case["graphs_before"].values())
        rows.append(
            [
                case["model"].removeprefix("synthetic:"),
                str(case["layers"]),
                f"`{case['recipe']}`",
                seconds(_middle(case["step_s"]["plain"])),
                *sides,
                seconds(_middle(case["exchange_s"])),
                seconds(_middle(case["rescaling_s"])),
                str(made),
            ]
        )
    headings = ("model", "layers", "recipe", "a step without", "merged", "hot", *_EXCHANGES)
    return lines + markdown_lines(headings, rows)


def _sizes_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"{_where(cases)}; {_several(cases, lambda case: case['num_inference_steps'])} steps a call; announced: "
        f"{_sizes_of(cases, unannounced=False)}, *another size*: {_sizes_of(cases, unannounced=True)}:",
        "",
    ]
    rows = []
    for case in cases:
        warm = sum(entry["first_s"] for entry in case["warmed"])
        warmed = f"{len(case['warmed'])} size{'' if len(case['warmed']) == 1 else 's'}"
        later = [_slowest(case, unannounced=unannounced) for unannounced in (False, True)]
        steps = ", ".join(
            f"{median_interval([sizes.ratios(case, size)]).point:.2f}" for size in case["step_s"]
        )
        way = case["way"].replace("{announced}", "[...]")
        model = case["model"].removeprefix("synthetic:")
        rows.append([model, f"`{way}`", f"{seconds(warm)}, {warmed}", *later, steps])
    sizes_headings = ("the announced sizes again", "another size", "a step, of the uncompiled")
    return lines + markdown_lines(("model", "way", "warm-up", *sizes_headings), rows)


def _sizes_of(cases: Sequence[dict[str, Any]], *, unannounced: bool) -> str:
    values = [
        entry["size"]
        for case in cases
        for entry in case["new"]
        if (entry["size"] in case["unannounced"]) == unannounced
    ]
    return " and ".join(dict.fromkeys(values))


def _slowest(case: dict[str, Any], *, unannounced: bool) -> str:
    """Say how long the slowest first call took, and how many graphs were compiled."""
    times = [
        entry["first_s"] for entry in case["new"] if (entry["size"] in case["unannounced"]) == unannounced
    ]
    graphs = sizes.recompiled(case, unannounced=unannounced)
    return f"{seconds(max(times))}, {graphs} graph{'' if graphs == 1 else 's'}"


def _ratio(values: Sequence[float]) -> str:
    interval = median_interval([list(values)])
    return f"{interval.point:.3f}" + (
        "" if interval.low is None else f" ({interval.low:.3f} to {interval.high:.3f})"
    )


def _several(cases: Sequence[dict[str, Any]], number: Callable[[dict[str, Any]], int]) -> str:
    return " or ".join(map(str, sorted({number(case) for case in cases})))


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
