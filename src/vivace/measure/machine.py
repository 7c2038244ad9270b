"""Choose the device, and describe it for techniques."""

from __future__ import annotations

import shutil

from vivace.errors import Unsupported, UsageError, nearest
from vivace.foundation.hardware.this_machine import gpu_index
from vivace.foundation.spec.environment import Place
from vivace.foundation.spec.task_names import DEVICES
from vivace.foundation.untrusted.files import is_out_of_memory, reason
from vivace.machinery.technique import Machine
from vivace.measure.accelerator import GPUS, available_gpu, is_available


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
    """Return the GPUs that this process may use, numbered as NVML and nvidia-smi do, if NVML is there.

    Without NVML the number is PyTorch's, which CUDA_VISIBLE_DEVICES changes. UUIDs are the same everywhere.
    """
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
