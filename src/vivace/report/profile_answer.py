"""Profiles as an answer: operators, shares, gaps, synchronisations and memory; and two profiles side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vivace.answers.answer import Answer, Cell, Section, Table
from vivace.answers.formatting import seconds, size
from vivace.foundation.spec.profiling import HostWait, MemoryTimeline, Profile, Share

TOP = 20
_NAME_WIDTH = 56  # characters
_BARS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 60
_SHOWN_CHANGE = 0.005
"""Changes of less than this share of the call are left out of the text."""


@dataclass(frozen=True)
class ProfileChange:
    """How an operator's self time differs between two profiles: on the GPU, else on the CPU.

    Attributes:
        kind: "gone", "new", "shrank", "grew", or "same": the ranges over the profiled calls overlap.
    """

    name: str
    family: str
    kind: str
    before_s: float
    after_s: float
    before_calls: int
    after_calls: int

    @property
    def difference_s(self) -> float:
        return self.after_s - self.before_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference_s": self.difference_s}


def changes(before: Profile, after: Profile) -> list[ProfileChange]:
    """Return the change of each operator's self time from one profile to another, the largest first."""
    is_gpu = before.gpu_busy_s is not None and after.gpu_busy_s is not None
    old, new = ({row.name: row for row in profile.operators} for profile in (before, after))
    changes = []
    for name, row in {**old, **new}.items():
        b, a = old.get(name), new.get(name)
        b_s, a_s = (0.0 if of is None else of.self_cuda_s if is_gpu else of.self_cpu_s for of in (b, a))
        b_calls, a_calls = (0 if of is None else of.num_calls for of in (b, a))
        kind = "gone" if a is None else "new"
        if a is not None and b is not None:
            kind = "shrank" if a.most_s < b.least_s else "grew" if a.least_s > b.most_s else "same"
        changes.append(ProfileChange(name, row.family, kind, b_s, a_s, b_calls, a_calls))
    return sorted(changes, key=lambda change: (-abs(change.difference_s), change.name))


def table_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the operator table as flat data: seconds, and percentages of all self times."""
    cpu, cuda = profile.self_cpu_s, profile.self_cuda_s
    return [
        {
            "name": row.name,
            "family": row.family,
            "self_cpu_percent": _percent(row.self_cpu_s, cpu),
            "self_cpu_s": row.self_cpu_s,
            "cpu_total_percent": _percent(row.cpu_s, cpu),
            "cpu_total_s": row.cpu_s,
            "cpu_time_avg_s": row.cpu_s / row.num_calls,
            "self_cuda_s": row.self_cuda_s,
            "self_cuda_percent": _percent(row.self_cuda_s, cuda),
            "cuda_total_s": row.cuda_s,
            "cuda_time_avg_s": row.cuda_s / row.num_calls,
            "num_calls": row.num_calls,
            "least_s": row.least_s,
            "most_s": row.most_s,
        }
        for row in profile.operators
    ]


def answer_of(profile: Profile, before: Profile | None = None, top: int = TOP) -> Answer:
    """Return the answer of a profile, or of two side by side."""
    if before is None:
        return _alone(profile, top)
    differences = changes(before, profile)
    times = f"{seconds(profile.plain_s)} instead of {seconds(before.plain_s)}"
    return Answer(
        command="profile",
        headline=f"{profile.trial.title} against {before.trial.title}: {times}",
        data={
            "profile": _json(profile),
            "against": _json(before),
            "changes": [change.to_dict() for change in differences],
        },
        table=[change.to_dict() for change in differences],
        parts=(_alone(before, top), _alone(profile, top)),
        sections=tuple(Section("", (table,)) for table in _side_by_side(before, profile, top)),
    )


def _alone(profile: Profile, top: int) -> Answer:
    trial, workload = profile.trial, profile.trial.workload
    batch = f", batch {workload.batch}" if workload.batch > 1 else ""
    task = "" if workload.task == "text" else f"{workload.task_in_words}, "
    calls = "one call" if profile.num_calls == 1 else f"the median of {profile.num_calls} calls"
    cost = 100 * (profile.traced_s / profile.plain_s - 1)
    paragraphs = []
    if profile.gpu_busy_s is not None and profile.gpu_idle_s is not None and profile.host_late_s is not None:
        paragraphs.append(
            f"GPU busy {seconds(profile.gpu_busy_s)}, idle {seconds(profile.gpu_idle_s)}, of which the host was late "
            f"{seconds(profile.host_late_s)}"
        )
    if profile.num_discarded:
        paragraphs.append(
            f"{profile.num_discarded} calls discarded, in which something was compiled or tuned"
        )
    return Answer(
        command="profile",
        headline=f"{calls} after {len(profile.warmup_s)} warm-up calls: "
        f"{seconds(profile.traced_s)} under the profiler, {seconds(profile.plain_s)} without ({cost:+.0f} %)",
        data={"profile": _json(profile)},
        table=table_rows(profile),
        about=(
            f"{trial.model.name}, {task}{trial.title}, {workload.width}x{workload.height}, "
            f"{profile.num_denoiser_calls} denoiser calls{batch}, on {profile.environment.device_name}",
        ),
        paragraphs=tuple(paragraphs),
        sections=tuple(Section("", (table,)) for table in tables_of(profile, top)),
        notes=tuple(profile.warnings),
    )


def _json(profile: Profile) -> dict[str, Any]:
    return profile.model_dump(mode="json") | {"operators": table_rows(profile)}


def tables_of(profile: Profile, top: int = TOP) -> Iterator[Table]:
    yield _operators(profile, top)
    is_gpu = profile.gpu_busy_s is not None
    yield _shares("Time by kernel family", "family", profile.families, is_gpu)
    yield _shares("Time by component", "component", profile.components, is_gpu)
    if profile.gaps:
        rows = [
            (gap.component, gap.before, str(gap.count), seconds(gap.idle_s), seconds(gap.host_late_s))
            for gap in profile.gaps[:top]
        ]
        headings = ("component", "before", "gaps", "idle", "of it host late")
        yield Table.of(headings, rows, title="GPU idle, by what ended it", texts=("before",))
    if profile.waits:
        yield _waits(profile.waits, top, is_gpu)
    if profile.memory is not None:
        yield _memory(profile.memory, profile.traced_s)


_OPERATOR_COLUMNS = {
    "Self CPU %": "self_cpu_percent",
    "Self CPU": "self_cpu_s",
    "CPU total %": "cpu_total_percent",
    "CPU total": "cpu_total_s",
    "CPU time avg": "cpu_time_avg_s",
    "Self CUDA": "self_cuda_s",
    "Self CUDA %": "self_cuda_percent",
    "CUDA total": "cuda_total_s",
    "CUDA time avg": "cuda_time_avg_s",
}


def _operators(profile: Profile, top: int) -> Table:
    is_gpu, operators = profile.gpu_busy_s is not None, table_rows(profile)
    columns = {heading: key for heading, key in _OPERATOR_COLUMNS.items() if is_gpu or "cuda" not in key}
    rows: list[tuple[str | Cell, ...]] = [
        (_name(row["name"]), *(_figure(key, row[key]) for key in columns.values()), str(row["num_calls"]))
        for row in operators[:top]
    ]
    note = f"Self CPU time total: {seconds(profile.self_cpu_s)}"
    note += f"; self CUDA time total: {seconds(profile.self_cuda_s)}" if is_gpu else ""
    if (rest := len(operators) - top) > 0:
        note += f"; {rest} more rows with --top {len(operators)}"
    return Table.of(("Name", *columns, "# of Calls"), rows, title="Operators", note=note)


def _shares(title: str, what: str, shares: Sequence[Share], is_gpu: bool) -> Table:
    cpu, cuda = sum(share.cpu_s for share in shares), sum(share.cuda_s for share in shares)
    rows = []
    for share in shares:
        cells = [share.name, seconds(share.cpu_s), f"{_percent(share.cpu_s, cpu):.2f}%"]
        if is_gpu:
            cells += [seconds(share.cuda_s), f"{_percent(share.cuda_s, cuda):.2f}%"]
        rows.append(tuple(cells))
    headings = (what, "Self CPU", "Self CPU %", *(("Self CUDA", "Self CUDA %") * is_gpu))
    return Table.of(headings, rows, title=title)


def _waits(waits: Sequence[HostWait], top: int, is_gpu: bool) -> Table:
    rows = [
        (wait.kind, wait.what, place(wait), wait.component, str(wait.count), seconds(wait.seconds),
         size(wait.num_bytes) if wait.num_bytes else "-")
        for wait in waits[:top]
    ]  # fmt: skip
    title = "The host waits for the GPU" if is_gpu else "Values read: on a GPU, the host would wait here"
    headings = ("kind", "what", "where", "component", "count", "time", "bytes")
    return Table.of(headings, rows, title=title, texts=headings[:4])


def place(wait: HostWait) -> str:
    """Return e.g. "diffusers/schedulers/x.py:358 in step"; "from" marks a function's first line, not the call's."""
    return f"{wait.file}:{'' if wait.is_exact else 'from '}{wait.line} in {wait.function}"


def _memory(memory: MemoryTimeline, length_s: float) -> Table:
    at_peak, peaks = memory.at_peak_bytes, memory.peak_by_component_bytes
    names = sorted({**peaks, **at_peak}, key=lambda name: -at_peak.get(name, 0))
    rows = [(name, size(at_peak.get(name, 0)), size(peaks[name]) if name in peaks else "-") for name in names]
    what = f"{memory.kind}, {size(memory.before_bytes)} at the start" if memory.before_bytes else memory.kind
    note = f"peak {size(memory.peak_bytes)} ({what})\n{sparkline(memory, length_s)}"
    headings = ("allocated by", "held at the peak", "most held meanwhile")
    return Table.of(headings, rows, title="Memory", note=note)


def sparkline(memory: MemoryTimeline, length_s: float, width: int = _BAR_WIDTH) -> str:
    """Return the memory over the call as one line of bars: from the smallest to the largest amount held."""
    most = [0] * width
    held = memory.before_bytes
    reached = 0
    for at, value in memory.points:
        index = min(width - 1, int(at / length_s * width)) if length_s else 0
        for k in range(reached, index + 1):
            most[k] = max(most[k], held)
        most[index] = max(most[index], value)
        reached, held = index, value
    for k in range(reached + 1, width):
        most[k] = held
    low, high = min(most), max(most)
    span = max(1, high - low)
    return "".join(_BARS[1 + round((value - low) / span * (len(_BARS) - 2))] for value in most)


def _side_by_side(before: Profile, after: Profile, top: int) -> Iterator[Table]:
    names = (before.trial.title, after.trial.title)
    is_gpu = before.gpu_busy_s is not None and after.gpu_busy_s is not None
    rows = [("call, without the profiler", *_pair(before.plain_s, after.plain_s))]
    if before.gpu_busy_s is not None and after.gpu_busy_s is not None:
        rows.append(("GPU busy", *_pair(before.gpu_busy_s, after.gpu_busy_s)))
        rows.append(("GPU idle, host late", *_pair(before.host_late_s or 0, after.host_late_s or 0)))
    headings = ("", *names, "difference")
    yield Table.of(headings, rows, title="Before and after")
    for title, old, new in (
        ("Self time by kernel family", before.families, after.families),
        ("Self time by component", before.components, after.components),
    ):
        b, a = (
            {share.name: share.cuda_s if is_gpu else share.cpu_s for share in shares} for shares in (old, new)
        )
        order = sorted({**b, **a}, key=lambda name: -max(b.get(name, 0), a.get(name, 0)))
        shares_s = [(name, *_pair(b.get(name, 0), a.get(name, 0))) for name in order]
        yield Table.of(headings, shares_s, title=title)
    least = _SHOWN_CHANGE * max(before.plain_s, after.plain_s)
    shown = [c for c in changes(before, after) if abs(c.difference_s) >= least and c.kind != "same"]
    operators = [
        (
            _name(change.name),
            change.kind,
            seconds(change.before_s) if change.before_calls else "-",
            seconds(change.after_s) if change.after_calls else "-",
            _signed(change.difference_s),
            f"{change.before_calls} / {change.after_calls}",
        )
        for change in shown[:top]
    ]
    yield Table.of(
        ("Name", "change", *names, "difference", "# of Calls"),
        operators,
        title="Operators that went, shrank, grew or appeared",
        note=f"self time on the {'GPU' if is_gpu else 'CPU'}; changes within the range of the profiled calls, "
        f"or under {100 * _SHOWN_CHANGE:g} % of the call, are left out",
    )


def _pair(before: float, after: float) -> tuple[str, str, str]:
    return seconds(before), seconds(after), _signed(after - before)


def _signed(value: float) -> str:
    return ("-" if value < 0 else "+") + seconds(abs(value))


def _name(name: str) -> Cell:
    return Cell(name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…", main=name)


def _figure(key: str, value: float) -> str:
    """Format a percentage, or a time as torch.profiler does, in s, ms or us."""
    if key.endswith("percent"):
        return f"{value:.2f}%"
    if value >= 1:
        return f"{value:.3f}s"
    return f"{value * 1e3:.3f}ms" if value >= 1e-3 else f"{value * 1e6:.3f}us"


def _percent(value: float, total: float) -> float:
    return 100 * value / total if total else 0.0
