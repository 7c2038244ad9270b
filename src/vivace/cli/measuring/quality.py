"""vivace quality"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from vivace.cli.command import AsJson, command
from vivace.errors import UsageError
from vivace.foundation.spec.limits import MinQuality
from vivace.foundation.spec.settings import (
    Option,
    Positional,
    Settings,
    TaskName,
    Texts,
    Witness,
    read_prompts,
)

if TYPE_CHECKING:
    from vivace.foundation.spec.workload import Task
    from vivace.measure.folders import SourceOf

COMPARISON_FAILED = 1


class QualityCommand(Settings):
    dir_a: Annotated[Path, Positional()]
    dir_b: Annotated[Path, Positional()]
    prompts: Annotated[
        Path | None,
        Option(
            "Text file: line k is the prompt of image k, in the order of their names: image_2 before image_10."
        ),
    ] = None
    scorer: Annotated[
        str | None,
        Option(
            "CLIP model for the CLIP metrics: tiny-clip, a folder, or org/name on the hub, downloaded if necessary; or "
            "module:function, which takes images and prompts and returns a score for each.",
            metavar="NAME",
        ),
    ] = None
    witness: Witness = None
    same_picture: Annotated[bool, Option("Require B to show the same images as A.")] = False
    task: TaskName = None
    images: Annotated[
        Texts,
        Option(
            "Source image: for image-to-image, for inpainting (with --mask), or for models that edit. Repeat to give "
            "each pair, in the order of their names, its own.",
            "--image",
            metavar="FILE",
        ),
    ] = ()
    masks: Annotated[
        Texts,
        Option(
            "Mask for --image, of the same size: white is repainted, black stays. Repeat to give each pair, in the "
            "order of their names, its own.",
            "--mask",
            metavar="FILE",
        ),
    ] = ()
    limits: MinQuality = None
    lpips: Annotated[bool, Option("Also compute LPIPS; needs AlexNet's weights on this machine.")] = False
    as_json: AsJson = False


@command(QualityCommand)
def quality(settings: QualityCommand) -> int:
    """Compare two folders of images from any source.

    DIR_A is the reference. Images are paired by name; differences have a 95 % interval over the prompts. With the
    images' prompts, or with --same-picture, the quality gate gives its verdict on DIR_B. The exit code is 1 if it
    fails; an image that is black, flat or noise while its pair in DIR_A is not also fails. Images that were made from
    source images are also compared with those: outside of --mask, and with --task edit by their likeness to --image.

    \b
        vivace generate "a red circle" --num-images 8 --out a
        vivace generate "a red circle" --num-images 8 --out b --recipe steps:8
        vivace quality a b --same-picture
        vivace quality a b --image old.png --mask hole.png
    """
    from vivace.cli.watched.guarded import guarded_scorers
    from vivace.foundation.spec.limits import DEFAULT_LIMITS
    from vivace.foundation.stats import Gate
    from vivace.measure.folders import compare, pair
    from vivace.measure.scorer import ClipScorer, FunctionScorer, Witness
    from vivace.models.quiet import quiet
    from vivace.models.scorers import find_scorer, find_witness

    if settings.prompts is not None and settings.scorer is None:
        raise UsageError("--prompts needs a CLIP model to score the images; add --scorer NAME")
    if settings.witness is not None and settings.prompts is None:
        raise UsageError("--witness needs the images' prompts; add --prompts FILE")
    names, alone_in = pair(settings.dir_a, settings.dir_b)
    lines = read_prompts(settings.prompts) if settings.prompts is not None else None
    if lines is not None and len(lines) != len(names):
        raise UsageError(
            f"--prompts {settings.prompts}: {len(lines)} prompts for {len(names)} pairs of images; give one prompt per "
            "pair"
        )
    if lines is not None:
        click.echo(f"prompts: {names[0]} is {lines[0][:60]!r}, {names[-1]} is {lines[-1][:60]!r}", err=True)
    task, source_of = _sources(settings, len(names))
    if task == "edit" and settings.scorer is None:
        raise UsageError("--task edit: likeness to the source needs a CLIP model; add --scorer NAME")
    first = find_scorer(settings.scorer) if settings.scorer is not None else None
    second = find_witness(settings.witness) if settings.witness is not None else None
    used = (settings.limits or DEFAULT_LIMITS).for_scorer(first.id if first is not None else None)

    def judge(is_read: Callable[[], None]) -> int:
        scorer: ClipScorer | FunctionScorer | None = None
        with quiet():
            if first is not None:
                scorer = (
                    FunctionScorer(first.name, first.folder)
                    if first.is_function
                    else ClipScorer(first.folder)
                )
            witness = Witness(second.folder) if second is not None else None
        is_read()
        comparison = compare(
            settings.dir_a, settings.dir_b, names, lines, scorer, settings.lpips, witness, source_of
        )
        judgement, close = comparison.judge(used, same_picture=settings.same_picture, task=task)
        compared = comparison.to_dict()
        compared["quality"] = {
            "verdict": judgement.gate.value,
            "reason": judgement.reason,
            "limits": used.model_dump(mode="json"),
        }
        compared["fidelity"] = None if close is None else close.to_json()
        compared["unpaired"] = alone_in
        if settings.as_json:
            click.echo(json.dumps(compared, indent=2))
        else:
            _print(compared, settings.dir_a, settings.dir_b)
        return COMPARISON_FAILED if judgement.gate is Gate.FAILED else 0

    return guarded_scorers([judge_ for judge_ in (first, second) if judge_ is not None], judge)


def _sources(settings: QualityCommand, num_pairs: int) -> tuple[Task, SourceOf | None]:
    """Return the task of two folders, and the images that their images were made from."""
    from vivace.models.sources import Files, check_files, fit, opened

    files = Files(tuple(settings.images), tuple(settings.masks))
    task = check_files(settings.task, files, None)
    if task == "text":
        return task, None
    if not files:
        raise UsageError(
            f"--task {task}: give what the images were made from, --image FILE"
            + (" and --mask FILE" if task == "inpaint" else "")
            if task != "control"
            else "--task control: images are not compared with a control; leave it out"
        )
    for flag, paths in (("--image", files.images), ("--mask", files.masks)):
        if paths and len(paths) not in (1, num_pairs):
            raise UsageError(
                f"{flag}: {len(paths)} files for {num_pairs} pairs of images; give one, or one for each pair"
            )
    images, masks = opened(files)

    def source_of(number: int, height: int, width: int) -> tuple[Any, Any]:
        mask = fit(masks[number % len(masks)], height, width) if masks else None
        return fit(images[number % len(images)], height, width), mask

    return task, source_of


def _print(compared: dict[str, Any], dir_a: Path, dir_b: Path) -> None:
    from vivace.measure.folders import AGAINST, ALONE

    click.echo(f"{len(compared['pairs'])} pairs; A = {dir_a} (the reference), B = {dir_b}\n")
    click.echo(f"{'metric':16}{'A':>10}{'B':>10}   B - A [95 % interval]")
    for metric in ALONE:
        if metric in compared["summary"]:
            row = compared["summary"][metric]
            click.echo(
                f"{metric:16}{row['a']:10.4g}{row['b']:10.4g}   {_format_interval(row['difference'], signed=True)}"
            )
    for metric in AGAINST:
        if metric in compared["summary"]:
            row = compared["summary"][metric]
            value = (
                "all identical"
                if row["mean"] is None
                else f"{_format_interval(row['mean'])}, worst {row['worst']:.4g}"
            )
            same = f" ({row['identical']} identical)" if row["identical"] and row["mean"] else ""
            click.echo(f"{metric:16}{'':20}   {value}{same}")
    for p in compared["pairs"]:
        for side in ("a", "b"):
            if p[f"faults_{side}"]:
                click.echo(f"{side.upper()} {p['name']}: {', '.join(p[f'faults_{side}'])}")
        if "reason" in p:
            click.echo(f"{p['name']}: {p['reason']}")
    click.echo(f"\nquality {compared['quality']['verdict']}: {compared['quality']['reason']}")
    for note in compared["notes"]:
        click.echo(f"note: {note}", err=True)
    if compared["unpaired"]:
        click.echo(
            f"left out {len(compared['unpaired'])} images that are in only one of the folders", err=True
        )


def _format_interval(interval: dict[str, Any], *, signed: bool = False) -> str:
    text = f"{interval['mean']:{'+' if signed else ''}.4g}"
    return text + (f" [{interval['ci95'][0]:.4g}, {interval['ci95'][1]:.4g}]" if interval["ci95"] else "")
