"""Generate the tables and the plot of docs/tinyworld.md from the records.

python -m tinyworld.table            writes them
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyworld import plot

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results/tinyworld-sd.json"
FLUX_RECORD = ROOT / "results/tinyworld-flux.json"
LCM_RECORD = ROOT / "results/tinyworld-lcm.json"
PAGE = ROOT / "docs/tinyworld.md"
CACHE_PLOT = ROOT / "docs/images/tiny-flux-cache.svg"

_MODELS = {
    "vae": "VAE, round trips",
    "tiny_vae": "tiny VAE, round trips",
    "sd": "tiny-sd, images",
    "flux": "tiny-flux, images",
    "schnell": "tiny-flux-schnell, images",
    "clip": "tiny-clip, told from one mistake",
}
_FIGURES = {
    "where": "position and relation",
    "psnr_db": "PSNR (dB)",
    "binding": "two-object binding",
    "retrieval": "right caption among 64",
}
_COLUMNS = ("colour", "shape", "binding", "everything")
"""The records have more: size, position, count, background."""
_SWEPT_WITH = "euler_a"
"""The sampler whose guidance scales are shown; the record has those of two more."""


def _percent(figures: dict[str, Any], key: str) -> str:
    return f"{100 * figures[key]['accuracy']:.1f}" if key in figures else ""


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gates(record: dict[str, Any]) -> str:
    rows = []
    for gate in record["gates"]:
        decibels = gate["figure"] == "psnr_db"
        scale, digits = (1, 1) if decibels else (100, 1)
        name = _FIGURES.get(gate["figure"], gate["figure"]) + ("" if decibels else " (%)")
        least, measured = (f"{scale * gate[key]:.{digits}f}" for key in ("least", "measured"))
        rows.append(
            [_MODELS[gate["model"]], name, f">= {least}", measured, "yes" if gate["passed"] else "NO"]
        )
    return _markdown(["what", "figure", "gate", "measured", "held"], rows)


def pictures(record: dict[str, Any]) -> str:
    rows: dict[tuple[Any, ...], list[str]] = {}
    names = [name for name in record["default"] if name != "accuracies"]
    default = record["default"]
    for row in (default, *record["variations"]):
        if (
            row["scheduler"] != _SWEPT_WITH
            and row["steps"] == default["steps"]
            and row["guidance"] != default["guidance"]
        ):
            continue
        key = tuple(row[name] for name in names)
        rows[key] = [*map(str, key), *(_percent(row["accuracies"], column) for column in _COLUMNS)]
    header = ["decoder" if name == "vae" else name for name in names]
    return _markdown([*header, *_COLUMNS], list(rows.values()))


def lcm(record: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            str(row["steps"]),
            f"{row['guidance']:g}",
            str(row["denoiser_calls"]),
            *(_percent(row["accuracies"], column) for column in _COLUMNS[:-1]),
            _with_interval(row["accuracies"]["everything"]),
        ]
        for row in record["rows"]
    ]
    return _markdown(
        ["sampler", "steps", "guidance", "UNet's rows", *_COLUMNS[:-1], "everything [95 % interval]"], rows
    )


def lcm_training(record: dict[str, Any]) -> str:
    facts = record["training"]
    names = (
        "steps",
        "seconds",
        "batch",
        "rank",
        "skip",
        "rate",
        "guidance",
        "device",
        "finished",
        "scaled_by",
    )
    return _markdown(list(names), [[str(facts.get(name, "-")) for name in names]])


def _with_interval(figure: dict[str, Any]) -> str:
    low, high = wilson_interval(figure["right"], figure["asked"])
    return f"{100 * figure['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson interval of a share, z standard errors to each side. Source: Wilson, JASA 22 (1927)."""
    share, weight = right / total, z**2 / total
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / total / 4)
    return middle - half, middle + half


def _run_name(run: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    alike = [other for other in runs if other["name"] == run["name"]]
    return f"{run['name']}, run {alike.index(run) + 1}" if len(alike) > 1 else run["name"]


def training(record: dict[str, Any]) -> str:
    rows = [
        [
            _run_name(run, record["training"]),
            f"{run['steps']:,}",
            f"{run['seconds']:.0f}",
            f"{run['planned_s']:.0f}",
        ]
        for run in record["training"]
    ]
    return _markdown(["training", "steps", "seconds", "seconds its schedule was made for"], rows)


TABLES = {"gates": gates, "pictures": pictures, "training": training}
LCM_TABLES = {"lcm": lcm, "lcm_training": lcm_training}
FLUX_TABLES = {f"flux_{name}": TABLES[name] for name in ("gates",)}


def filled(page: str, record: dict[str, Any], tables: dict[str, Callable[..., str]] = TABLES) -> str:
    """Fill each `<!-- table NAME -->` ... `<!-- end -->` of the page from the record."""
    for name, make in tables.items():
        mark = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(page):
            raise ValueError(f"the page has no place for the table {name!r}")
        text = make(record)
        page = mark.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
    return page


def main() -> None:
    for path, tables in ((RECORD, TABLES), (LCM_RECORD, LCM_TABLES), (FLUX_RECORD, FLUX_TABLES)):
        PAGE.write_text(
            filled(PAGE.read_text(encoding="utf-8"), json.loads(path.read_text(encoding="utf-8")), tables),
            encoding="utf-8",
        )
    CACHE_PLOT.write_text(
        plot.cache_plot(json.loads(FLUX_RECORD.read_text(encoding="utf-8"))), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
