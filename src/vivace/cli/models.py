"""vivace models"""

from __future__ import annotations

import json

import click

from vivace.cli import options


@click.command()
@options.as_json
def models(as_json: bool) -> int:
    """List the models that vivace knows by name."""
    from vivace.models.catalogue import CATALOGUE
    from vivace.models.find import WEIGHTS
    from vivace.report.summary import size

    def bytes_of(folder: str) -> int:
        return sum(p.stat().st_size for p in (WEIGHTS / folder).rglob("*") if p.is_file())

    if as_json:
        rows = [
            entry.model_dump(mode="json") | {"bytes": bytes_of(entry.folder)} for entry in CATALOGUE.values()
        ]
        click.echo(json.dumps(rows, indent=2))
        return 0
    for entry in CATALOGUE.values():
        click.echo(f"{entry.name}  {entry.summary}")
        click.echo(
            f"    {entry.width}x{entry.height}, {entry.num_inference_steps} steps, guidance {entry.guidance_scale:g}, "
            f"{size(bytes_of(entry.folder))}, {entry.licence}, shipped with vivace"
        )
    click.echo("\nAny folder with a model_index.json works too: --model path/to/folder")
    return 0
