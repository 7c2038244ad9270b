"""vivace quality"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vivace.cli import options
from vivace.errors import UsageError

COMPARISON_FAILED = 1


@click.command()
@click.argument("dir_a", type=click.Path(path_type=Path))
@click.argument("dir_b", type=click.Path(path_type=Path))
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Text file: line k is picture k's prompt, by name."
)
@click.option(
    "--scorer",
    metavar="NAME",
    help="CLIP model for CLIP's figures: embedded, a folder, or org/name on the hub, fetched if need be.",
)
@click.option("--lpips", is_flag=True, help="Also compute LPIPS; AlexNet's weights must be there.")
@options.as_json
def quality(
    dir_a: Path, dir_b: Path, prompts: Path | None, scorer: str | None, lpips: bool, as_json: bool
) -> int:
    """Compare two folders of pictures, made by anything; DIR_A is the reference.

    Pictures are paired by their names. Differences carry a 95 % interval over the pairs. Exit code 1 if DIR_B holds
    pictures that are black, flat or noise while DIR_A's are not.

    \b
        vivace generate "a red circle" --num-images 8 --out a
        vivace generate "a red circle" --num-images 8 --out b --recipe steps:8
        vivace quality a b
    """
    from vivace.measure.folders import compare, pair
    from vivace.models.scorers import find_scorer

    if prompts is not None and scorer is None:
        raise UsageError("--prompts is for the CLIP score; name a CLIP model with --scorer NAME")
    names, alone_in = pair(dir_a, dir_b)
    lines = options.read_prompts(prompts) if prompts is not None else None
    if lines is not None and len(lines) != len(names):
        raise UsageError(f"--prompts {prompts}: {len(lines)} prompts for {len(names)} pairs of pictures")
    folder = find_scorer(scorer).folder if scorer is not None else None
    found = compare(dir_a, dir_b, names, lines, folder, lpips)
    found["unpaired"] = alone_in
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found, dir_a, dir_b)
    ruined = [p["name"] for p in found["pairs"] if p["faults_b"] and not p["faults_a"]]
    return COMPARISON_FAILED if ruined else 0


def _print(found: dict[str, Any], dir_a: Path, dir_b: Path) -> None:
    from vivace.measure.folders import AGAINST, ALONE

    click.echo(f"{len(found['pairs'])} pairs; A = {dir_a} (the reference), B = {dir_b}\n")
    click.echo(f"{'metric':16}{'A':>10}{'B':>10}   B - A [95 % interval]")
    for metric in ALONE:
        if metric in found["summary"]:
            row = found["summary"][metric]
            click.echo(
                f"{metric:16}{row['a']:10.4g}{row['b']:10.4g}   {_words(row['difference'], signed=True)}"
            )
    for metric in AGAINST:
        if metric in found["summary"]:
            row = found["summary"][metric]
            value = (
                "all identical" if row["mean"] is None else f"{_words(row['mean'])}, worst {row['worst']:.4g}"
            )
            same = f" ({row['identical']} identical)" if row["identical"] and row["mean"] else ""
            click.echo(f"{metric:16}{'':20}   {value}{same}")
    for p in found["pairs"]:
        for side in ("a", "b"):
            if p[f"faults_{side}"]:
                click.echo(f"{side.upper()} {p['name']}: {', '.join(p[f'faults_{side}'])}")
        if "reason" in p:
            click.echo(f"{p['name']}: {p['reason']}")
    if found["unpaired"]:
        click.echo(f"{len(found['unpaired'])} pictures are in one folder only and were left out", err=True)


def _words(interval: dict[str, Any], *, signed: bool = False) -> str:
    text = f"{interval['mean']:{'+' if signed else ''}.4g}"
    return text + (f" [{interval['ci95'][0]:.4g}, {interval['ci95'][1]:.4g}]" if interval["ci95"] else "")
