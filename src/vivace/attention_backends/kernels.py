"""What each attention kernel needs: of the machine, of what is installed, of a component."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vivace.contract import Arithmetic, Component, Machine


@dataclass(frozen=True)
class Kernel:
    """Where a kernel runs and what it takes.

    on_cpu: PyTorch has it for CPUs, where neither dtypes nor sizes limit it.
    least: the lowest compute capability; majors: the only major ones, if not all from there on.
    half: it takes fp16 and bf16 alone.
    max_head, heads: the largest size of an attention head on a GPU, or the sizes that it takes.
    package, install: what must be importable, and the command that makes it so.
    products: what attention multiplies, if not numbers of the component's own precision.
    """

    on_cpu: bool = False
    least: tuple[int, int] | None = None
    majors: tuple[int, ...] = ()
    half: bool = False
    max_head: int | None = None
    heads: tuple[int, ...] = ()
    package: str | None = None
    install: str = ""
    products: str = Arithmetic.products

    def takes_head(self, size: int) -> bool:
        if self.heads:
            return size in self.heads
        return self.max_head is None or size <= self.max_head

    @property
    def head_words(self) -> str:
        return " or ".join(map(str, self.heads)) if self.heads else f"up to {self.max_head}"


KERNELS: dict[str, Kernel] = {
    "math": Kernel(on_cpu=True),
    "efficient": Kernel(),
    "flash": Kernel(on_cpu=True, least=(8, 0), half=True, max_head=256),
    "cudnn": Kernel(least=(8, 0), half=True, max_head=256),
    "flex": Kernel(on_cpu=True, least=(7, 5), max_head=256),
    "flash3": Kernel(
        majors=(9,),
        half=True,
        max_head=256,
        package="flash_attn_interface",
        install="it has no wheel on PyPI: build the folder `hopper` of github.com/Dao-AILab/flash-attention",
    ),
    "flash4": Kernel(
        least=(8, 0),
        half=True,
        max_head=128,
        package="flash_attn.cute",
        install="pip install --pre flash-attn-4",
    ),
    "sage": Kernel(
        least=(8, 0),
        half=True,
        heads=(64, 96, 128),
        package="sageattention",
        install="pip install sageattention",
        products="attention's: queries by keys in int8, by values in fp16 or fp8",
    ),
    "xformers": Kernel(
        package="xformers", install="pip install xformers, in the version made for this PyTorch"
    ),
}
OF_PYTORCH = {
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""What `torch.nn.attention.sdpa_kernel` chooses from, and its member of SDPBackend; the others are led to."""


def unsupported_on(backend: str, machine: Machine) -> str | None:
    """Why the machine or what is installed on it cannot, in words."""
    kernel = KERNELS[backend]
    if not machine.is_cuda:
        if not kernel.on_cpu:
            return f"there is no {backend} attention kernel for CPUs; flash, math and flex run here"
        if backend == "flex" and machine.compiler is None:
            return (
                "flex attention is a kernel only once it is compiled, and no C++ compiler was found (install g++ or "
                "clang++); uncompiled it writes the whole score matrix, which is math attention"
            )
        return None
    have = machine.capability
    if have is not None and kernel.majors and have[0] not in kernel.majors:
        only = " or ".join(f"{major}.x" for major in kernel.majors)
        has = f"{machine.device_name} has {_version(have)}"
        return f"{backend} attention runs on compute capability {only} alone, {has}"
    if have is not None and kernel.least is not None and have < kernel.least:
        least = _version(kernel.least)
        return f"{backend} attention needs compute capability {least}, {machine.device_name} has {_version(have)}"
    if kernel.package is not None and not machine.has_package(kernel.package):
        return f"{backend} attention needs the package {kernel.package} ({kernel.install})"
    return None


def unsupported_for(backend: str, component: Component, module: Any, machine: Machine) -> str | None:
    """Why a component cannot be computed with the kernel: its precision, or the sizes of its heads.

    PyTorch's own kernels are chosen for all of a component's calls, so all its heads must fit; others need one that
    does.
    """
    if not machine.is_cuda:
        return None
    kernel = KERNELS[backend]
    dtype = str(module.dtype).removeprefix("torch.")
    if kernel.half and dtype not in {"float16", "bfloat16"}:
        return f"{backend} attention needs fp16 or bf16, the {component} is {dtype}; add bf16 or fp16"
    sizes = head_sizes(module)
    fitting = {size for size in sizes if kernel.takes_head(size)}
    if sizes and (not fitting or (backend in OF_PYTORCH and fitting != sizes)):
        listed = ", ".join(map(str, sorted(sizes)))
        return f"{backend} attention takes {kernel.head_words} channels a head, those of the {component} are {listed}"
    return None


def refused_by_pytorch(backend: str, component: Component, module: Any, device: Any) -> str | None:
    """Why PyTorch's dispatcher does not run one of its own kernels for the component's dtype and heads, or None.

    Asked of the device with a small call, since the rules differ between its versions and cuDNN's.
    """
    import warnings

    import torch
    from torch.nn.attention import sdpa_kernel

    for size in sorted(head_sizes(module)):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=device)
        with warnings.catch_warnings(), torch.inference_mode(), sdpa_kernel(sdp_backend(backend)):
            warnings.simplefilter("ignore")  # the dispatcher explains itself in several
            try:
                torch.nn.functional.scaled_dot_product_attention(query, query, query)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "o available kernel" not in str(error):
                    raise
                dtype = str(module.dtype).removeprefix("torch.")
                return f"PyTorch's {backend} attention refuses the {component}'s heads of {size} in {dtype} on this GPU"
    return None


def sdp_backend(name: str) -> Any:
    from torch.nn.attention import SDPBackend

    return getattr(SDPBackend, OF_PYTORCH[name])


def chosen_by_pytorch(module: Any, device: Any) -> set[str]:
    """Which kernels PyTorch would choose by itself on a device for the component's dtype and sizes of heads."""
    import torch

    names = {int(sdp_backend(name)): name for name in OF_PYTORCH}
    found = set()
    for size in head_sizes(module):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=device)
        with torch.inference_mode():
            # The dispatcher's own question; it has no public name (torch.nn.functional asks it the same way).
            choice = int(torch._fused_sdp_choice(query, query, query))
        found.add(names.get(choice, f"backend {choice}"))
    return found


def head_sizes(module: Any) -> set[int]:
    """Channels of an attention head, of all attentions that diffusers built into the module."""
    attentions = [m for m in module.modules() if hasattr(m, "heads") and hasattr(m, "processor")]
    return {int(getattr(m, "head_dim", None) or m.inner_dim // m.heads) for m in attentions}


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
