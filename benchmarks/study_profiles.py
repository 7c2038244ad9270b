"""Profile the runs of study 002 at full size with random weights, each in a process of its own.

    python -m benchmarks.study_profiles --limit-s 300     profile what the record lacks, until the time limit

A line of the record is a run: its profile, in which the smaller operators are one row. The record is written after each
run, and the same command goes on. docs/studies/002.md shows it (`make docs`). Run it after `python -m
benchmarks.studies 002` on the same machine: then the code is compiled already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import ValidationError

from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.record_files import write_text
from benchmarks.study_groups import RESULTS
from vivace.answers.formatting import seconds
from vivace.benchmark import Timing, studies
from vivace.benchmark.profiles import profile
from vivace.cli.display.terminal import Phases
from vivace.errors import StoreError, Unsupported, UsageError, WorkerError
from vivace.evidence.studies.expand import ModelPart, expand
from vivace.evidence.studies.study_file import read_study
from vivace.foundation.spec.profiling import OperatorTime, Profile
from vivace.foundation.untrusted.files import read_text, reading

STUDY = "002"
RECORD = RESULTS / f"study-{STUDY}-profiles.jsonl"
NUM_OPERATORS = 150
MAX_ROWS = 30
"""Of gaps and waits."""
OTHERS = "other operators"
MAX_BYTES = 32_000_000


@click.command("study_profiles")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no run after this many seconds.")
@click.option("--only", multiple=True, metavar="ROW", help="Only this row of the study; repeat for more.")
@click.option("--calls", type=click.IntRange(1, 20), default=1, show_default=True, help="Profiled calls.")
@click.option("--warmup", type=click.IntRange(1, 100), default=2, show_default=True, help="Calls before.")
@click.option("--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tiny", is_flag=True, help="The embedded model, for a trial of this script; give --record.")
def command(
    record: Path,
    limit_s: float | None,
    only: Sequence[str],
    calls: int,
    warmup: int,
    timeout: float,
    device: str,
    tiny: bool,
) -> int:
    """Profile the runs of study 002, one line per run; resumable."""
    if tiny and record == RECORD:
        raise UsageError("--tiny: results/ holds full-size models; give --record another file")
    started = time.monotonic()
    planned = runs(tiny=tiny)
    timing = Timing(rounds=1, max_warmup=warmup, timeout_s=timeout)
    lost = 0
    with studies.start_launcher(device) as launcher:
        for case in planned.cases:
            profiles = read_profiles(record)
            if (only and case.label not in only) or any(is_of(old, case.recipe) for old in profiles):
                continue
            if limit_s is not None and time.monotonic() - started >= limit_s:
                click.echo(f"{limit_s:g} s are over; the same command goes on with {case.label}", err=True)
                return MEASURED_IN_PART
            try:
                with Phases() as phases:
                    new = profile(
                        planned.measured_on,
                        case.recipe,
                        calls=calls,
                        launcher=launcher,
                        on_event=phases.event,
                        timing=timing,
                        device=device,
                        num_inference_steps=planned.study.workload.num_inference_steps,
                    ).profile
            except (Unsupported, WorkerError) as error:
                lost += 1
                click.echo(f"{case.label}: {error}")
                continue
            write_text(record, "".join(old.model_dump_json() + "\n" for old in [*profiles, shortened(new)]))
            click.echo(
                f"{case.label}: {seconds(new.plain_s)} a call, {seconds(new.traced_s)} under the profiler "
                f"({phases.took()})"
            )
    return MEASURED_IN_PART if lost else 0


def runs(*, tiny: bool = False) -> ModelPart:
    """Return the study's seven runs."""
    (part,) = expand(read_study(STUDY), tiny=tiny, synthetic=not tiny)
    return part


def is_of(profile: Profile, recipe: str) -> bool:
    return profile.trial.recipe.text == recipe


def read_profiles(path: Path) -> list[Profile]:
    """Read a record; empty if there is no such file.

    Raises:
        StoreError: it is not a record of this script.
    """
    if not path.exists():
        return []
    advice = "give --record another file"
    with reading(path, StoreError, advice):
        lines = read_text(path, MAX_BYTES).splitlines()
    try:
        return [Profile.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise StoreError(f"{path} is not a record of this script ({error.title}); {advice}") from error


def shortened(profile: Profile) -> Profile:
    """Return a profile whose smaller operators are one row, so that shares still add up; without single kernels."""
    kept, rest = profile.operators[:NUM_OPERATORS], profile.operators[NUM_OPERATORS:]
    operators = list(kept)
    if rest:
        operators.append(
            OperatorTime(
                name=f"{OTHERS} ({len(rest)})",
                family="other",
                self_cpu_s=sum(share.self_cpu_s for share in rest),
                cpu_s=sum(share.self_cpu_s for share in rest),
                self_cuda_s=sum(share.self_cuda_s for share in rest),
                cuda_s=sum(share.self_cuda_s for share in rest),
                num_calls=sum(share.num_calls for share in rest),
                least_s=sum(share.least_s for share in rest),
                most_s=sum(share.most_s for share in rest),
            )
        )
    return profile.model_copy(
        update={
            "operators": tuple(operators),
            "kernels": (),
            "gaps": profile.gaps[:MAX_ROWS],
            "waits": profile.waits[:MAX_ROWS],
        }
    )


if __name__ == "__main__":
    raise SystemExit(run(command))
