"""The results of `vivace profile`: one whole call of a pipeline, taken apart."""

from __future__ import annotations

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.trial import Trial

CALL = "call"
"""The row of the operator table for the host's time outside operators: Python and the frameworks."""


class OperatorTime(Spec):
    """One row of the operator table; times in seconds.

    Each moment of a thread belongs to the self time of one row, and so does each kernel. Totals include the operators
    that an operator calls; a call inside another call of the same name counts once.

    Attributes:
        name: of an operator, of a CUDA call, of a kernel that no operator launched, or CALL.
        self_cuda_s, cuda_s: of the kernels, copies and memsets that it launched; those of several streams add up.
        least_s, most_s: self time (on the GPU if there is one) in all profiled calls.
    """

    name: str
    family: str
    self_cpu_s: float
    cpu_s: float
    self_cuda_s: float
    cuda_s: float
    num_calls: int
    least_s: float
    most_s: float


class KernelTime(Spec):
    """All kernels of one name on the GPU."""

    name: str
    family: str
    cuda_s: float
    num_calls: int


class Share(Spec):
    """Self time of a kernel family or of a component: of the host, and of the kernels that it launched."""

    name: str
    cpu_s: float
    cuda_s: float


class Gap(Spec):
    """Time in which the GPU was idle before kernels of one operator in one component.

    Attributes:
        before: the operator, or CUDA call, whose kernels ended the idle time; "the end of the call" for the last one.
        host_late_s: the part of it before the host launched the next kernel, in which it did not wait for the GPU.
    """

    component: str
    before: str
    count: int
    idle_s: float
    host_late_s: float


class HostWait(Spec):
    """A place in the Python code at which the host waits for the GPU, or copies from it.

    Attributes:
        kind: "synchronisation"; "copy" from the device to the host; "read" on a CPU: reading a tensor's value, which
            would wait if the tensor were on a GPU.
        file, line, function: the caller, outside of PyTorch where there is one.
        is_exact: whether `line` is that of the call; else it is the function's first line.
        seconds: how long the host took, with Python's calls traced as well.
    """

    kind: str
    what: str
    component: str
    file: str
    line: int
    function: str
    is_exact: bool
    count: int
    seconds: float
    num_bytes: int = 0


class MemoryTimeline(Spec):
    """Allocated bytes over the call.

    Attributes:
        kind: "CUDA tensors" (absolute), or "CPU tensors" (relative to the start of the call).
        points: (seconds since the start of the call, bytes), thinned out so that no maximum is lost.
        at_peak_bytes: who allocated what was held at the peak, by component; "before the call" for what it did not.
        peak_by_component_bytes: the most held while a component ran.
    """

    kind: str
    points: tuple[tuple[float, int], ...]
    before_bytes: int
    peak_bytes: int
    at_peak_bytes: dict[str, int]
    peak_by_component_bytes: dict[str, int]


class Profile(Spec):
    """One whole call of a trial under torch.profiler, after the warm-up, in a process of its own.

    Several calls are profiled; the figures are those of the call of median length.

    Attributes:
        warmup_s: seconds of each call before the profiled one.
        steady: whether the warm-up ended because the times were steady.
        plain_s: a call without the profiler before them; the difference to `traced_s` is what the profiler costs.
        traced_s: the profiled call, from its start until the GPU has finished.
        gpu_busy_s: time in which the GPU worked; None on a CPU. Work that overlaps counts once.
        host_late_s: the part of the idle time before the host launched what came next; None on a CPU.
        num_discarded: calls that were profiled and discarded, because something was compiled or tuned in them.
        operators: by self time on the GPU, else on the CPU, the largest first.
        waits: of one more call, in which Python's calls were traced too.
    """

    trial: Trial
    environment: Environment
    warmup_s: tuple[float, ...]
    steady: bool | None
    plain_s: float
    traced_s: float
    gpu_busy_s: float | None
    gpu_idle_s: float | None
    host_late_s: float | None
    num_calls: int
    num_discarded: int
    num_denoiser_calls: int
    operators: tuple[OperatorTime, ...]
    kernels: tuple[KernelTime, ...]
    families: tuple[Share, ...]
    components: tuple[Share, ...]
    gaps: tuple[Gap, ...]
    waits: tuple[HostWait, ...]
    memory: MemoryTimeline | None
    warnings: tuple[str, ...] = ()

    @property
    def self_cpu_s(self) -> float:
        """Seconds of the host's threads in the trace: the whole that percentages of the CPU refer to."""
        return sum(row.self_cpu_s for row in self.operators)

    @property
    def self_cuda_s(self) -> float:
        """Seconds of all kernels, copies and memsets: the whole that percentages of the GPU refer to."""
        return sum(row.self_cuda_s for row in self.operators)
