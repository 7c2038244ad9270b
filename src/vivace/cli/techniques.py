"""vivace techniques"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Annotated, Any

import click

from vivace.cli.command import AsJson, command
from vivace.errors import UsageError
from vivace.foundation.spec.settings import DeviceName, Positional, Settings


class TechniquesCommand(Settings):
    name: Annotated[str | None, Positional()] = None
    device: DeviceName = "auto"
    as_json: AsJson = False


@command(TechniquesCommand)
def techniques(settings: TechniquesCommand) -> int:
    """List the techniques and what this machine can run, or explain one."""
    from vivace.measure.machine import choose_device, this_machine
    from vivace.plugins import ORIGINS
    from vivace.recipes.describe import describe
    from vivace.techniques import ALIASES, TECHNIQUES, missing

    if settings.name is not None:
        name_ = (
            ALIASES[settings.name.lower()][0] if settings.name.lower() in ALIASES else settings.name.lower()
        )
        if name_ not in TECHNIQUES:
            raise UsageError(missing(settings.name))
        chosen = [TECHNIQUES[name_]]
    else:
        chosen = list(TECHNIQUES.values())
    machine = this_machine(choose_device(settings.device))
    described = [describe(technique, machine) for technique in chosen]
    for each in described:
        each["origin"] = ORIGINS.get(each["name"], "vivace")
    if settings.as_json:
        click.echo(json.dumps(described, indent=2))
    elif settings.name is not None:
        _explain(described[0], inspect.getdoc(sys.modules[chosen[0].__module__]) or "")
    else:
        _list(described)
    return 0


def _list(described: list[dict[str, Any]]) -> None:
    for technique in described:
        image = "same image" if technique["same_picture"] else "changes the image"
        click.echo(f"{technique['usage']}\n    {technique['summary']} ({image})")
        if technique["origin"] != "vivace":
            click.echo(f"    from the package {technique['origin']}")
        runs = [state["recipe"] for state in technique["here"] if state["unsupported"] is None]
        if runs:
            click.echo(f"    runs here: {', '.join(runs)}")
        for state in technique["here"]:
            if state["unsupported"] is not None:
                click.echo(f"    not here: {state['recipe']}: {state['unsupported']}")
    click.echo("\n`vivace techniques NAME` explains one: why it helps, what it costs, what it needs.")


def _explain(technique: dict[str, Any], docstring: str) -> None:
    from vivace.machinery.technique import Arithmetic

    click.echo(f"{technique['usage']}\n\n{docstring}\n")
    for knob in technique["knobs"]:
        default = "required" if knob["required"] else f"default {knob['default']}"
        click.echo(f"  {knob['name']}: {knob['about']} ({default}{knob['limits']})")
    if technique["targets"]:
        click.echo(
            f"  targets: {', '.join(technique['targets'])} (default {', '.join(technique['default_targets'])})"
        )
    if technique["aliases"]:
        click.echo(f"  short names: {', '.join(technique['aliases'])}")
    click.echo("")
    for state in technique["here"]:
        numbers = [
            f"{what} {state[what]}"
            for what in ("weights", "products")
            if state[what] != getattr(Arithmetic(), what)
        ]
        numbers_ = f" ({'; '.join(numbers)})" if numbers else ""
        click.echo(f"  {state['recipe']}{numbers_}: {state['unsupported'] or 'runs here'}")
