"""Measure the joules of a product and of attention on one GPU, by what their operands' bits do.

    python -m benchmarks.energy                 two minutes; into results/energy-CARD.json, docs/performance/energy.md
    python -m benchmarks.energy --device cpu --shrink 48 --seconds 0.05      tries the script; a CPU counts no joules

Each case is a loop of calls that keeps the GPU busy. The driver's counter of joules moves some ten times a second, so
power is read between two of its moves; a call's joules are power by time. All cases are measured once in order, once
in reverse. The same command goes on where an earlier one ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.command import MEASURED_IN_PART, locked, run
from benchmarks.energy_cases import CASES, Call, Case, call_of
from benchmarks.record_files import write_text
from benchmarks.technique_cases import RESULTS
from vivace.errors import StoreError, Unsupported
from vivace.measure.nvml import NvmlGpu, opened_gpu
from vivace.measure.this_environment import environment

REPEATS = 2
_CHUNK_S = 0.008
"""Seconds of calls between two looks at the counter."""
_IN_FLIGHT = 2
"""Chunks that are launched ahead, so that the GPU never waits for the host."""
_IDLE_WARMUP_S = 1.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """What a loop runs on.

    Attributes:
        mark: marks what was launched so far; calling its result waits for that.
        read_j: joules since some time; None if nothing counts them.
        read_clock: in MHz, and degrees.
        clock: seconds.
    """

    mark: Callable[[], Callable[[], object]]
    read_j: Callable[[], float | None]
    read_clock: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
    clock: Callable[[], float] = time.perf_counter


@click.command("energy")
@click.option(
    "--record", type=click.Path(path_type=Path, dir_okay=False), help="Default: results/energy-CARD.json."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(min=0.01), default=1.3, show_default=True, help="Of each loop."
)
@click.option(
    "--warmup-s", type=click.FloatRange(min=0), default=0.25, show_default=True, help="Before each loop."
)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option("--shrink", type=click.IntRange(1, 96), default=1, show_default=True, help="Divides the sizes.")
@click.option("--only", multiple=True, help="Cases whose name contains this. Default: all.")
def energy(
    record: Path | None,
    device: str,
    seconds: float,
    warmup_s: float,
    limit_s: float | None,
    shrink: int,
    only: tuple[str, ...],
) -> int:
    """Measure the joules of FLUX.1's products and attention on one GPU."""
    import torch

    started = time.monotonic()
    if device == "cuda":
        if not torch.cuda.is_available():
            raise Unsupported("PyTorch sees no GPU; --device cpu tries the script without one")
        torch.cuda.init()
    where = environment(device).model_dump(mode="json")
    path = record or record_of(where["device_name"] if device == "cuda" else "cpu")
    cases = [case for case in CASES if not only or any(part in case.name for part in only)]
    rows = read_rows(path, where["device_name"], shrink)
    num_failed = 0
    with torch.inference_mode(), _opened(device) as loop_device:
        for case, repeat in _visits(cases):
            key = (case.name, repeat)
            if key in rows and "reason" not in rows[key]:
                click.echo(f"{line(rows[key])} (in the record already)")
                continue
            if limit_s is not None and time.monotonic() - started >= limit_s:
                click.echo(f"{limit_s:g} s are over; the same command goes on with {case.name}", err=True)
                return MEASURED_IN_PART
            row = {"case": case.name, "repeat": repeat} | _measured(
                case, loop_device, device, shrink, seconds, warmup_s
            )
            rows[key] = row
            num_failed += "reason" in row
            click.echo(line(row))
            _write(path, where, shrink, rows.values())
    return MEASURED_IN_PART if num_failed else 0


def _visits(cases: Sequence[Case]) -> Iterator[tuple[Case, int]]:
    """Yield every case once in order, once in reverse, and so on."""
    for repeat in range(REPEATS):
        yield from ((case, repeat) for case in (reversed(cases) if repeat % 2 else cases))


def _measured(case: Case, on: Device, device: str, shrink: int, seconds: float, warmup_s: float) -> Row:
    try:
        call = call_of(case, device, shrink)
        return loop(
            call, on, seconds, max(warmup_s, _IDLE_WARMUP_S if case.way == "idle" and warmup_s else 0)
        )
    except (Unsupported, RuntimeError) as error:
        return {"reason": str(error).splitlines()[0]}


def loop(call: Call, on: Device, seconds: float, warmup_s: float) -> Row:
    """Call without a pause, and return microseconds, joules, watts, clock and temperature.

    Args:
        seconds: of the loop that is measured.
    """
    per_call_s = _first_calls(call, on)
    in_chunk = max(1, round(min(_CHUNK_S, seconds / 5) / per_call_s))
    waiting: deque[Callable[[], object]] = deque()
    num_calls = 0
    began = on.clock()
    looks: list[tuple[float, float | None]] = []
    clocks: list[tuple[float | None, float | None]] = []
    while not looks or looks[-1][0] - looks[0][0] < seconds:
        for _ in range(in_chunk):
            call(num_calls)
            num_calls += 1
        waiting.append(on.mark())
        if len(waiting) <= _IN_FLIGHT:
            continue
        waiting.popleft()()
        if on.clock() - began < warmup_s:
            continue
        looks.append((on.clock(), on.read_j()))
        if len(looks) % 8 == 1:
            clocks.append(on.read_clock())
    while waiting:
        waiting.popleft()()
    call_s = (looks[-1][0] - looks[0][0]) / (len(looks) - 1) / in_chunk
    watts = power(looks)
    return {
        "us": _rounded(call_s * 1e6),
        "j": None if watts is None else _rounded(watts * call_s),
        "w": None if watts is None else _rounded(watts),
        "mhz": _median([mhz for mhz, _ in clocks]),
        "degrees": _median([degrees for _, degrees in clocks]),
        "calls": in_chunk * (len(looks) - 1),
    }


def _first_calls(call: Call, on: Device) -> float:
    """Return about how long a call takes, in seconds. The first ones choose algorithms."""
    for turn in range(3):
        call(turn)
    on.mark()()
    began = on.clock()
    for turn in range(5):
        call(turn)
    on.mark()()
    return max((on.clock() - began) / 5, 1e-6)


def power(looks: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the watts between the first move of a counter of joules and its last; None with fewer than three.

    Args:
        looks: seconds and joules.
    """
    moves = [
        (after_s, after)
        for (_, before), (after_s, after) in itertools.pairwise(looks)
        if before is not None and after is not None and after != before
    ]
    if len(moves) < 3:
        return None
    (first_s, first), (last_s, last) = moves[0], moves[-1]
    return (last - first) / (last_s - first_s)


@contextlib.contextmanager
def _opened(device: str) -> Iterator[Device]:
    """Yield what a loop needs; NVML is open meanwhile."""
    import torch

    if device == "cpu":
        yield Device(mark=lambda: lambda: None, read_j=lambda: None)
        return
    with opened_gpu() as gpu:
        if not isinstance(gpu, NvmlGpu):
            raise Unsupported(f"the GPU's energy cannot be read: {gpu}")

        def mark() -> Callable[[], object]:
            event = torch.cuda.Event()
            event.record()
            return partial(event.synchronize)

        def read_clock() -> tuple[float | None, float | None]:
            reading = gpu.read()
            return reading.sm_clock_mhz, reading.temperature_c

        yield Device(mark, gpu.energy_j, read_clock)


def record_of(card: str) -> Path:
    """Return the record of a card, or of "cpu"."""
    name = re.sub(r"[^a-z0-9]+", "-", card.removeprefix("NVIDIA ").lower()).strip("-")
    return RESULTS / f"energy-{name}.json"


def read_rows(path: Path, card: str | None = None, shrink: int | None = None) -> dict[tuple[str, int], Row]:
    """Return a record's rows by case and repeat; none if there is no such file.

    Args:
        card, shrink: what the rows must be of; None for anything.

    Raises:
        StoreError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_of = (content["environment"]["device_name"], content["shrink"])
        rows = {(row["case"], row["repeat"]): row for row in content["rows"]}
        for row in rows.values():
            line(row)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path} is not a record of this script ({error}); give --record another file"
        ) from error
    if (card is not None and card != is_of[0]) or (shrink is not None and shrink != is_of[1]):
        raise StoreError(f"{path} is of {is_of[0]} with --shrink {is_of[1]}; give --record another file")
    return rows


def _write(path: Path, where: Row, shrink: int, rows: Any) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'"environment": {json.dumps(where)},\n"shrink": {shrink}'
    with locked(path):
        write_text(path, f'{{{head},\n"rows": [\n{lines}\n]}}\n')


def line(row: Row) -> str:
    """Return a row as it is printed."""
    start = f"{row['case']}, {row['repeat'] + 1} of {REPEATS}"
    if "reason" in row:
        return f"{start}: {row['reason']}"
    joules = "joules not counted" if row["j"] is None else f"{row['j']:.4g} J, {row['w']:.0f} W"
    clock = "" if row["mhz"] is None else f", {row['mhz']:.0f} MHz, {row['degrees']:.0f} degrees"
    return f"{start}: {row['us']:.4g} us, {joules}{clock}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _median(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


if __name__ == "__main__":
    raise SystemExit(run(energy))
