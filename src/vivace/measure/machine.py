"""Choose the device, and describe it for techniques."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vivace.errors import Unsupported, UsageError, nearest
from vivace.foundation.hardware.this_machine import gpu_index, present_gpu
from vivace.foundation.spec.environment import Place
from vivace.foundation.spec.task_names import DEVICES
from vivace.foundation.untrusted.files import is_out_of_memory, reason
from vivace.machinery.technique import Machine
from vivace.measure.accelerator import GPUS, available_gpu, is_available, synchronise


def choose_device(device: str) -> str:
    """Resolve "auto" to the GPU if there is one, else "cpu"; check that another one is there."""
    if device not in DEVICES:
        raise UsageError(
            f"device {str(device)[:40]!r} is none of {', '.join(DEVICES)}; CUDA_VISIBLE_DEVICES chooses one of "
            f"several GPUs{nearest('cuda' if 'gpu' in str(device).lower() else str(device), DEVICES)}"
        )
    import torch

    if device == "auto":
        return available_gpu() or "cpu"
    if device in ("xpu", "mps") and not is_available(device):
        maker = {"xpu": "Intel", "mps": "Apple"}[device]
        raise Unsupported(
            f"--device {device}: PyTorch {torch.__version__} sees no {maker} GPU here; use --device auto"
        )
    if device == "cuda" and not torch.cuda.is_available():
        built = (
            f"PyTorch {torch.__version__} was built without CUDA"
            if torch.version.cuda is None
            else (
                "PyTorch sees no CUDA device (is the driver installed, and CUDA_VISIBLE_DEVICES not empty?)"
            )
        )
        raise Unsupported(f"--device cuda: {built}; use --device cpu")
    return device


def check_works(device: str) -> None:
    """Check that a device works before a model is loaded for it."""
    import torch

    try:
        torch.zeros(1).to(device)
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        raise Unsupported(
            f"--device {device}: PyTorch {torch.__version__} sees it, and cannot use it ({reason(error)}); check the "
            "driver and that PyTorch was built for it, or use --device cpu"
        ) from None


def this_machine(device: str) -> Machine:
    """Return the facts about the machine for techniques; `device` is torch's type of device."""
    import torch

    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if device == "cuda":
        is_rocm = torch.version.hip is not None
        return Machine(
            device=device,
            device_name=torch.cuda.get_device_name(),
            # Under ROCm these are numbers of another kind: (9, 4) is an MI300.
            capability=None if is_rocm else torch.cuda.get_device_capability(),
            compiler=compiler,
            num_gpus=torch.cuda.device_count(),
            is_rocm=is_rocm,
        )
    if device == "xpu":
        name, number = torch.xpu.get_device_name(), torch.xpu.device_count()
        return Machine(device, name, None, compiler, num_gpus=number)
    if device == "mps":
        return Machine(device, f"{cpu_name()} GPU", None, compiler, num_gpus=1)
    return Machine(device=device, device_name=cpu_name(), capability=None, compiler=compiler)


def torch_type(device: object) -> str:
    """Return the type of a torch device, or of its name: "cuda" of "cuda:1"; "cpu" for an unknown device."""
    name = str(device).partition(":")[0]
    return name if name in GPUS else "cpu"


def visible_gpus() -> list[Place]:
    """Return the GPUs that this process may use, numbered as NVML and nvidia-smi do, if NVML is there. Without NVML the
    number is PyTorch's, which CUDA_VISIBLE_DEVICES changes. UUIDs are the same everywhere."""
    import torch

    gpus = []
    for number in range(torch.cuda.device_count()):
        uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        index = gpu_index(uuid)
        gpus.append(Place(uuid=uuid, index=number if index is None else index))
    return gpus


def cpu_name() -> str:
    """Return the processor's name if the system knows it."""
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@contextmanager
def without_cuda_init() -> Iterator[None]:
    """Import libraries inside the context without initialising CUDA, which does not survive a fork. When transformers
    imports torchao, it queries the GPU's compute capability to decide which kernels to register, for which PyTorch
    would initialise CUDA. NVML gives the same answer. Does nothing without NVML."""
    import torch
    import torch.utils._triton as triton

    gpu = present_gpu()
    if gpu is None:
        yield
        return
    measured = gpu.capability
    capability, has_triton = torch.cuda.get_device_capability, triton.has_triton
    is_active = True

    # A library may keep a reference to these functions; outside the context they call PyTorch's own.
    def nvml_device_capability(device: Any = None) -> tuple[int, int]:
        return measured if is_active else capability(device)

    def nvml_has_triton() -> bool:
        return triton.has_triton_package() and measured >= (7, 0) if is_active else bool(has_triton())

    torch.cuda.get_device_capability, triton.has_triton = nvml_device_capability, nvml_has_triton
    try:
        yield
    finally:
        is_active = False
        torch.cuda.get_device_capability, triton.has_triton = capability, has_triton


_REPEATS = 7
_SLOW = 1.3  # a dtype that takes more than this many times fp32's time counts as slow


def probe_dtypes(device: str) -> dict[str, float | str]:
    """Return the median milliseconds of one convolution, linear layer and attention in fp32, bf16 and fp16. Where the
    device does not compute in a dtype it is the reason, in words. A CPU without hardware support for a dtype emulates
    it, 10 to 30 times slower or more; only a measurement shows it."""
    import torch

    threads = torch.get_num_threads()
    # Two threads on a busy two-core machine can take 40 times as long as one, which would hide the dtypes' difference.
    torch.set_num_threads(1)
    probed: dict[str, float | str] = {}
    try:
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            try:
                probed[name] = _probe(device, dtype)
            # AssertionError: PyTorch built without that device. TypeError: a dtype that it does not have there.
            except (RuntimeError, AssertionError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                probed[name] = reason(error)
    finally:
        torch.set_num_threads(threads)
    return probed


def _probe(device: str, dtype: Any) -> float:
    """Return the median milliseconds of a few runs."""
    import torch

    conv = torch.nn.Conv2d(64, 64, 3, padding=1).to(device, dtype)
    linear = torch.nn.Linear(256, 256).to(device, dtype)
    image = torch.randn(2, 64, 32, 32).to(device, dtype)
    tokens = torch.randn(2, 256, 256).to(device, dtype)
    heads = torch.randn(2, 8, 256, 32).to(device, dtype)

    def work() -> float:
        synchronise(device)
        start = time.perf_counter()
        conv(image)
        linear(tokens)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        synchronise(device)
        return 1000 * (time.perf_counter() - start)

    with torch.inference_mode():
        work()
        return statistics.median(work() for _ in range(_REPEATS))


def slow_dtypes(probed: Mapping[str, float | str]) -> dict[str, float]:
    """Return the dtypes that are clearly slower than fp32, with the factor."""
    times_ms = {name: ms for name, ms in probed.items() if not isinstance(ms, str)}
    if "fp32" not in times_ms:
        return {}
    base = times_ms["fp32"]
    return {name: ms / base for name, ms in times_ms.items() if ms > _SLOW * base}
