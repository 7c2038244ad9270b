"""vivace doctor"""

from __future__ import annotations

import json
import os
import textwrap

import click

from vivace.cli import options


@click.command()
@options.device
@options.as_json
def doctor(device: str, as_json: bool) -> int:
    """Show what this machine can run, and which dtypes are slow on it."""
    from vivace.compilation.compiled_code import code_folder
    from vivace.measure.dtypes import probe_dtypes, slow_dtypes
    from vivace.measure.environment import conditions, environment
    from vivace.measure.machine import choose_device, this_machine
    from vivace.recipes.describe import states
    from vivace.report.summary import size
    from vivace.techniques import TECHNIQUES

    chosen = choose_device(device)
    machine = this_machine(chosen)
    facts = environment(chosen)
    times = probe_dtypes(chosen)
    slow = slow_dtypes(times)
    here = [state for technique in TECHNIQUES.values() for state in states(technique, machine)]
    now = conditions()
    advice = [
        f"{name} takes {factor:.1f} times as long as fp32 here; recipes with {name} will be slow"
        for name, factor in slow.items()
    ]
    load = float(now["load_1min"])
    if chosen == "cpu" and load > 0.5 * (os.cpu_count() or 1):
        advice.append(
            f"the machine is busy (load {load:.1f} on {os.cpu_count()} cores); timings will be noisy"
        )
    if chosen == "cpu" and machine.compiler is None:
        advice.append("no C++ compiler, which compile needs; install g++ or clang++")
    if as_json:
        found = {
            "environment": facts.model_dump(mode="json"),
            "conditions": now,
            "compiler": machine.compiler,
            "compiled_code": str(code_folder()),
            "dtype_ms": times,
            "techniques": here,
            "advice": advice,
        }
        click.echo(json.dumps(found, indent=2))
        return 0
    click.echo(f"device       {facts.device}: {facts.device_name}")
    if facts.driver:
        click.echo(f"driver       {facts.driver}, compute capability {facts.device_capability}")
    click.echo(f"cpu          {facts.cpu}, {facts.num_cores} cores, {size(facts.memory_bytes)} of memory")
    click.echo("libraries    " + ", ".join(f"{k} {v}" for k, v in facts.libraries.items()))
    click.echo(f"compiler     {machine.compiler or 'none found'}; compiled code is kept in {code_folder()}")
    click.echo(
        "dtypes       "
        + ", ".join(f"{k} {v:.2f} ms" for k, v in times.items())
        + " (the same small computation in each)"
    )
    for line in advice:
        click.echo(f"advice       {line}")
    runs = [s["recipe"] for s in here if s["unsupported"] is None]
    click.echo("runs here    " + _wrapped(runs))
    reasons: dict[str, list[str]] = {}
    for state in here:
        if state["unsupported"] is not None:
            reasons.setdefault(state["unsupported"], []).append(state["recipe"])
    for reason, recipes in reasons.items():
        click.echo(f"cannot       {_wrapped(recipes)}: {reason}")
    return 0


def _wrapped(recipes: list[str]) -> str:
    """Return recipes as an indented list whose lines break between recipes, not within."""
    listed = ", ".join(recipe.replace(" ", "\0") for recipe in recipes)
    wrapped = textwrap.fill(listed, 87, break_on_hyphens=False).replace("\0", " ")
    return wrapped.replace("\n", "\n" + " " * 13)
