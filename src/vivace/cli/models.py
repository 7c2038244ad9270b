"""vivace models"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from vivace.cli.command import AsJson, command
from vivace.foundation.spec.settings import Option, Settings

if TYPE_CHECKING:
    from vivace.architectures.entry import Entry


class ModelsCommand(Settings):
    export: Annotated[
        tuple[str, Path] | None,
        Option(
            "Write an embedded model as a folder for plain diffusers; DIR must be new or empty.",
            metavar="NAME DIR",
        ),
    ] = None
    as_json: AsJson = False


@command(ModelsCommand)
def models(settings: ModelsCommand) -> int:
    """List the models that vivace knows by name, or export an embedded one.

    \b
        vivace models --export tiny-sd my-model
    """
    if settings.export is not None:
        return _export(*settings.export, settings.as_json)

    from vivace.architectures import CATALOGUE
    from vivace.models.find import SYNTHETIC, synthetic_names

    sizes = {entry.name: _num_bytes(entry) for entry in CATALOGUE.values()}
    if settings.as_json:
        names = synthetic_names()
        rows = [
            entry.model_dump(mode="json")
            | {
                "bytes": sizes[entry.name],
                "synthetic": SYNTHETIC + entry.name if entry.name in names else None,
            }
            for entry in CATALOGUE.values()
        ]
        click.echo(json.dumps(rows, indent=2))
        return 0
    for entry in CATALOGUE.values():
        steps = "1 step" if entry.num_inference_steps == 1 else f"{entry.num_inference_steps} steps"
        guidance = f"guidance {entry.guidance_scale:g}" if entry.guidance_scale > 1 else "no guidance"
        if (scale := entry.arguments.get("true_cfg_scale")) is not None:
            guidance = f"guidance {scale:g} in a second call"
        click.echo(f"{entry.name}  {entry.summary}")
        click.echo(f"    {entry.width}x{entry.height}, {steps}, {guidance}; {entry.licence}")
        click.echo(f"    {_where(entry, sizes[entry.name])}")
        if entry.few_steps:
            click.echo(f"    with a LoRA: {', '.join(_few_steps(entry))}")
    click.echo(
        "\nOther models: --model org/repo or org/repo@revision on the Hugging Face hub, a folder with a "
        "model_index.json,\nor a .safetensors or .gguf file of a model or its denoiser"
    )
    click.echo(
        f"\nWithout a download: --model {SYNTHETIC}NAME builds NAME's architecture with random weights, to "
        f"measure time and memory;\nits images show nothing. NAME: {', '.join(synthetic_names())}"
    )
    return 0


def _few_steps(entry: Entry) -> list[str]:
    """Return the recipes with their steps: ["distilled(lcm) in 4 steps (or 2, 3, 5, ...)"]."""
    by_kind: dict[str, list[int]] = {}
    for weights in entry.few_steps:
        by_kind.setdefault(weights.kind, []).extend(weights.steps)
    return [
        f"distilled({kind}) in {usual} steps"
        + (f" (or {', '.join(map(str, sorted(others)))})" if others else "")
        for kind, (usual, *others) in by_kind.items()
    ]


def _num_bytes(entry: Entry) -> int | None:
    """Return the size of an embedded model's files or of the download; None if it is unknown."""
    from vivace.architectures.entry import Hub
    from vivace.models.find import find_model
    from vivace.models.model_files import num_bytes

    if isinstance(entry.origin, Hub):
        return entry.origin.download_bytes
    return num_bytes(find_model(entry.name).files)


def _where(entry: Entry, num_bytes: int | None) -> str:
    """Return where the weights come from, and their size."""
    from vivace.answers.formatting import size
    from vivace.architectures.entry import Hub

    how_large = "" if num_bytes is None else f"{size(num_bytes)} "
    if isinstance(entry.origin, Hub):
        others = [*entry.origin.parts.values(), *([entry.origin.lora] if entry.origin.lora else [])]
        repositories = " and ".join([entry.origin.repo, *(part.repo for part in others)])
        gated = ", gated: request access there first" if entry.gated else ""
        return f"{how_large}from {repositories}{gated}"
    shared = f", shared in part with {entry.origin.base}" if entry.origin.base is not None else ""
    return f"{how_large}shipped with vivace{shared}"


def _export(name: str, destination: Path, as_json: bool) -> int:
    from vivace.answers.formatting import size
    from vivace.models.export_embedded import export

    done = export(name, destination)
    code = ["from diffusers import DiffusionPipeline", *done.python]
    if as_json:
        facts = {
            "model": done.located.model.model_dump(mode="json"),
            "folder": str(done.folder),
            "files": done.num_files,
            "bytes": done.num_bytes,
            "python": code,
        }
        click.echo(json.dumps(facts, indent=2))
        return 0
    click.echo(
        f"wrote {done.folder}: {done.located.model.name}, {done.num_files} files, {size(done.num_bytes)}"
    )
    click.echo("\nWith diffusers alone:\n")
    click.echo("\n".join(f"    {line}" for line in code))
    return 0
