"""vivace doctor"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from vivace.cli.command import AsJson, command
from vivace.foundation.spec.settings import DeviceName, Option, Settings, Threads

if TYPE_CHECKING:
    from vivace.evidence.standing import TechniqueClaim
    from vivace.foundation.spec.ceilings import Ceilings
    from vivace.foundation.spec.environment import Environment
    from vivace.machinery.technique import Machine


class DoctorCommand(Settings):
    device: DeviceName = "auto"
    measure: Annotated[
        bool,
        Option(
            "Measure the limits of this GPU (or CPU) once: matmuls, attention, copies; takes up to --time-limit "
            "seconds."
        ),
    ] = False
    rerun: Annotated[bool, Option("With --measure: measure known limits again.")] = False
    time_limit: Annotated[
        float,
        Field(ge=1, le=3600),
        Option("With --measure: no further measurement starts after this many seconds."),
    ] = 60.0
    threads: Threads = None
    as_json: AsJson = False


@command(DoctorCommand)
def doctor(settings: DoctorCommand) -> int:
    """Show what this machine can run, the evidence for it, and which dtypes are slow here.

    For each technique it says whether it was measured here (in ./.vivace), in vivace's own records, or by others; or
    was only compiled for this GPU; or has no record; or is refused.

    With --measure it also finds the highest rates that the GPU reaches in single operations. They are kept in the cache
    folder for this GPU, driver and PyTorch (on a CPU also for the number of threads). `vivace bench` then says how far
    each row is from these limits.
    """
    import torch

    from vivace.answers.formatting import size
    from vivace.foundation.processes.system import limitations
    from vivace.machinery.compilation.compiled_code import code_folder
    from vivace.measure.machine import choose_device, probe_dtypes, slow_dtypes, this_machine
    from vivace.measure.measured_ceilings import MEASURED
    from vivace.measure.this_environment import conditions, environment

    if settings.rerun and not settings.measure:
        raise click.UsageError("--rerun goes with --measure.")
    chosen = choose_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    machine = this_machine(chosen)
    facts = environment(chosen)
    probed = probe_dtypes(chosen)
    slow = slow_dtypes(probed)
    fails = {name: ms for name, ms in probed.items() if isinstance(ms, str)}
    here, advice = _claims(machine, facts.device_name)
    now = conditions()
    limits = _limits(facts, settings.measure, settings.rerun, settings.time_limit)
    advice += [
        f"{name} takes {factor:.1f} times as long as fp32 here; recipes with {name} will be slow"
        for name, factor in slow.items()
    ]
    if len(fails) == len(probed):
        advice.append(
            f"nothing runs on this device: PyTorch sees it, and says '{next(iter(fails.values()))}'; check the driver "
            "and that PyTorch was built for it, or use --device cpu"
        )
    else:
        advice += [
            f"{name} does not run here: {why}; leave recipes with {name} out" for name, why in fails.items()
        ]
    load = float(now["load_1min"])
    if chosen == "cpu" and load > 0.5 * (os.cpu_count() or 1):
        advice.append(
            f"the machine is busy (load {load:.1f} on {os.cpu_count()} cores); timings will be noisy"
        )
    if chosen == "cpu" and machine.compiler is None:
        advice.append("no C++ compiler, which compile needs; install g++ or clang++")
    if limits is None and chosen in MEASURED:
        kind = f"CPU with {facts.num_threads} threads" if facts.device == "cpu" else "GPU"
        advice.append(f"how far a recipe is from the limits of this {kind} is not known; {_how(facts)}")
    if settings.as_json:
        report = {
            "environment": facts.model_dump(mode="json"),
            "conditions": now,
            "compiler": machine.compiler,
            "compiled_code": str(code_folder()),
            "dtype_ms": {name: None if name in fails else ms for name, ms in probed.items()},
            "processes": limitations(),
            "limits": None if limits is None else limits.model_dump(mode="json"),
            "techniques": [
                {**claim.state, "rests_on": claim.standing.value, "records_of": claim.devices}
                for claim in here
            ],
            "advice": advice,
        }
        click.echo(json.dumps(report, indent=2))
        return 0
    click.echo(f"device       {facts.device}: {facts.device_name}")
    if facts.driver:
        click.echo(f"driver       {facts.driver}, compute capability {facts.device_capability}")
    click.echo(f"cpu          {facts.cpu}, {facts.num_cores} cores, {size(facts.memory_bytes)} of memory")
    click.echo("libraries    " + ", ".join(f"{k} {v}" for k, v in facts.libraries.items()))
    click.echo(f"compiler     {machine.compiler or 'none found'}; compiled code is kept in {code_folder()}")
    click.echo(
        "dtypes       "
        + ", ".join(
            f"{k} does not run" if isinstance(v, str) else f"{k} {v:.2f} ms" for k, v in probed.items()
        )
        + " (the same small computation in each)"
    )
    for line in limitations():
        click.echo(f"processes    {line}")
    for line in [] if limits is None else _limits_in_words(limits):
        click.echo(f"limits       {line}")
    for line in advice:
        click.echo(f"advice       {line}")
    for line in _claims_in_words(here):
        click.echo(line)
    return 0


def _claims(machine: Machine, device_name: str) -> tuple[list[TechniqueClaim], list[str]]:
    from vivace.errors import StoreError
    from vivace.evidence.committed import committed_tables, community_tables
    from vivace.evidence.measured import tables_of_store
    from vivace.evidence.standing import claims, has_records
    from vivace.foundation.spec.settings import DEFAULT_STORE

    own, problems = [], []
    folder = Path(DEFAULT_STORE)
    if (folder / "records.sqlite").is_file():
        try:
            own = tables_of_store(folder)
        except StoreError as error:
            problems.append(f"measurements on this machine are not known: {error}")
    tables = [*own, *committed_tables(), *community_tables()]
    if machine.is_gpu and not has_records(device_name, tables):
        problems.append(
            f"no record is of {device_name} or its generation; `vivace bench` measures, and `vivace contribute` makes "
            "it known to others"
        )
    return claims(machine, device_name, tables), problems


def _claims_in_words(here: Sequence[TechniqueClaim]) -> list[str]:
    """Return lines: the techniques that run, by their evidence, and those that do not, by the reason."""
    from vivace.evidence.standing import ClaimBasis

    groups: dict[tuple[ClaimBasis, str], list[str]] = {}
    for claim in here:
        groups.setdefault((claim.standing, claim.why), []).append(claim.recipe)
    lines = []
    for (standing, why), recipes in sorted(
        groups.items(), key=lambda group: list(ClaimBasis).index(group[0][0])
    ):
        if standing is ClaimBasis.REFUSED:
            lines.append(f"cannot       {_wrapped(recipes)}: {why}")
        else:
            devices = f" ({why})" if why else ""
            lines.append(f"runs here    {standing}{devices}:\n             {_wrapped(recipes)}")
    return lines


def _limits(facts: Environment, measure: bool, rerun: bool, time_limit_s: float) -> Ceilings | None:
    """Return the device's limits: recorded ones, or measured now on request; None without either."""
    from vivace.errors import Unsupported
    from vivace.measure.measured_ceilings import MEASURED, keep, known_ceilings, measure_ceilings

    if measure and facts.device not in MEASURED:
        raise Unsupported(
            f"--measure: vivace does not measure the highest rates of {facts.device_name}, only those of CPUs "
            "and of NVIDIA's and AMD's GPUs; leave it out"
        )
    ceilings = known_ceilings(facts)
    if not measure or (ceilings is not None and not rerun):
        return ceilings
    click.echo(f"measuring the limits of {facts.device_name}; this takes up to {time_limit_s:g} s", err=True)
    measured = measure_ceilings(facts, time_limit_s)
    click.echo(f"kept in {keep(measured)}", err=True)
    return measured


def _limits_in_words(limits: Ceilings) -> list[str]:
    """Return a line for each operation with its rates, one for what is missing, and one for when it was measured."""
    best: dict[str, dict[str, float]] = {}
    for ceiling in limits.ceilings:
        rates = best.setdefault(ceiling.operation, {})
        rates[ceiling.precision] = max(rates.get(ceiling.precision, 0.0), ceiling.per_s)
    lines = []
    for operation, rates in best.items():
        unit = "TB/s" if operation in ("copy", "host_to_device") else "TFLOP/s"
        text = ", ".join(f"{precision} {rate / 1e12:.3g}".strip() for precision, rate in rates.items())
        lines.append(f"{operation.replace('_', ' ')} {text} {unit}")
    lines += [f"{name} was not measured: {why}" for name, why in limits.missing.items()]
    threads = "" if limits.threads is None else f", {limits.threads} threads"
    return [*lines, f"measured {limits.measured_at} in {limits.seconds:g} s{threads}"]


def _how(facts: Environment) -> str:
    threads = f" --threads {facts.num_threads}" if facts.device == "cpu" else ""
    return f"`vivace doctor --device {facts.device}{threads} --measure` measures them once"


def _wrapped(recipes: list[str]) -> str:
    """Return recipes as an indented list whose lines break between recipes, not within."""
    listed = ", ".join(recipe.replace(" ", "\0") for recipe in recipes)
    wrapped = textwrap.fill(listed, 87, break_on_hyphens=False).replace("\0", " ")
    return wrapped.replace("\n", "\n" + " " * 13)
