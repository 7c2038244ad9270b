"""Measure the ceilings of this GPU into results/ceilings.json, for the pages that say how far a row is from them.

    python -m benchmarks.ceilings     once for each GPU, driver and PyTorch; up to a minute

It runs `vivace doctor --measure`, so what is in the cache folder already is not measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.command import locked, run
from benchmarks.study_groups import RESULTS
from vivace.errors import WorkerError
from vivace.foundation.spec.ceilings import Ceilings, identity_of
from vivace.foundation.spec.environment import Environment

RECORD = RESULTS / "ceilings.json"


@click.command("ceilings")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
def command(record: Path, device: str) -> int:
    """Measure this GPU's ceilings, and keep them with those of other GPUs."""
    ended = subprocess.run(
        [sys.executable, "-m", "vivace", "doctor", "--device", device, "--measure", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    if ended.returncode:
        raise WorkerError(f"`vivace doctor --measure` ended with exit code {ended.returncode}; see above")
    new = Ceilings.model_validate(json.loads(ended.stdout)["limits"])
    with locked(record):
        others = [ceiling for ceiling in read_ceilings(record) if ceiling.identity != new.identity]
        rows = [ceiling.model_dump(mode="json") for ceiling in (*others, new)]
        record.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    click.echo(f"{new.device_name}: {len(new.ceilings)} ceilings in {record}")
    return 0


def read_ceilings(record: Path = RECORD) -> list[Ceilings]:
    """Return the ceilings of a record; none if there is no such file."""
    if not record.exists():
        return []
    return [Ceilings.model_validate(fields) for fields in json.loads(record.read_text(encoding="utf-8"))]


def ceilings_of(environment: Environment, record: Path = RECORD) -> Ceilings | None:
    """Return the ceilings of an environment's device, driver and PyTorch; None if they are not in the record."""
    return next(
        (ceiling for ceiling in read_ceilings(record) if ceiling.identity == identity_of(environment)), None
    )


if __name__ == "__main__":
    raise SystemExit(run(command))
