"""vivace models"""

from __future__ import annotations

import json
from pathlib import Path

import click

from vivace.cli import options


@click.command()
@click.option(
    "--export",
    "wanted",
    type=(str, click.Path(path_type=Path)),
    metavar="NAME DIR",
    help="Write the model as a folder that plain diffusers loads; DIR is new or empty.",
)
@options.as_json
def models(wanted: tuple[str, Path] | None, as_json: bool) -> int:
    """List the models that vivace knows by name, or export one.

    \b
        vivace models --export tiny-sd my-model
    """
    if wanted is not None:
        return _export(*wanted, as_json)

    from vivace.models.catalogue import CATALOGUE
    from vivace.models.files import num_bytes
    from vivace.models.find import find_model
    from vivace.report.summary import size

    sizes = {name: num_bytes(find_model(name).files) for name in CATALOGUE}
    if as_json:
        rows = [entry.model_dump(mode="json") | {"bytes": sizes[entry.name]} for entry in CATALOGUE.values()]
        click.echo(json.dumps(rows, indent=2))
        return 0
    for entry in CATALOGUE.values():
        shared = f", shared in part with {entry.base}" if entry.base is not None else ""
        click.echo(f"{entry.name}  {entry.summary}")
        click.echo(
            f"    {entry.width}x{entry.height}, {entry.num_inference_steps} steps, guidance {entry.guidance_scale:g}, "
            f"{size(sizes[entry.name])}{shared}, {entry.licence}, shipped with vivace"
        )
    click.echo("\nAny folder with a model_index.json works too: --model path/to/folder")
    return 0


def _export(name: str, destination: Path, as_json: bool) -> int:
    from vivace.models.export import export
    from vivace.report.summary import size

    done = export(name, destination)
    code = ["from diffusers import DiffusionPipeline", *done.python]
    if as_json:
        facts = {
            "model": done.found.model.model_dump(mode="json"),
            "folder": str(done.folder),
            "files": done.num_files,
            "bytes": done.num_bytes,
            "python": code,
        }
        click.echo(json.dumps(facts, indent=2))
        return 0
    click.echo(
        f"wrote {done.folder}: {done.found.model.name}, {done.num_files} files, {size(done.num_bytes)}"
    )
    click.echo("\nWith diffusers alone:\n")
    click.echo("\n".join(f"    {line}" for line in code))
    return 0
