"""Requirements of each attention kernel: GPU, packages, and the component's dtype and head sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.technique import Arithmetic, Backend, Component, Machine


@dataclass(frozen=True)
class Kernel:
    """The requirements of a kernel.

    on_cpu: PyTorch has it for CPUs, where neither dtype nor head size is limited.
    elsewhere: other makers' GPUs for which PyTorch has it.
    least: the lowest compute capability; majors: the only supported major versions, if not all from there on.
    half: supports only fp16 and bf16.
    max_head, heads: the largest head size on a GPU, or the supported head sizes.
    package, install: the required package, and how to install it. alternative: another one that serves as well.
    products: the precision of attention's matmuls, if not the component's own.
    square: supports only as many keys as queries. fixed_scale: the softmax's scale cannot be chosen.
    """

    on_cpu: bool = False
    elsewhere: tuple[Backend, ...] = ()
    least: tuple[int, int] | None = None
    majors: tuple[int, ...] = ()
    half: bool = False
    max_head: int | None = None
    heads: tuple[int, ...] = ()
    package: str | None = None
    alternative: str | None = None
    install: str = ""
    products: str = Arithmetic.products
    square: bool = False
    fixed_scale: bool = False

    def takes_head(self, size: int) -> bool:
        if self.heads:
            return size in self.heads
        return self.max_head is None or size <= self.max_head

    @property
    def supported_heads(self) -> str:
        return " or ".join(map(str, self.heads)) if self.heads else f"up to {self.max_head}"


_FLASH3: dict[str, Any] = {
    "majors": (9,),
    "half": True,
    "package": "fa3_fwd_interface",
    "alternative": "flash_attn_interface",
    "install": "pip install fa3-fwd, or build the folder `hopper` of github.com/Dao-AILab/flash-attention",
}
KERNELS: dict[str, Kernel] = {
    "math": Kernel(on_cpu=True, elsewhere=("rocm", "xpu", "mps")),
    "efficient": Kernel(elsewhere=("rocm",)),
    "flash": Kernel(on_cpu=True, elsewhere=("rocm",), least=(8, 0), half=True, max_head=256),
    "cudnn": Kernel(least=(8, 0), half=True, max_head=256),
    "flex": Kernel(on_cpu=True, elsewhere=("rocm",), least=(7, 5), max_head=256),
    "flash3": Kernel(**_FLASH3, max_head=256),
    # FLUX's heads; no other size has been measured.
    "flash3_fp8": Kernel(**_FLASH3, heads=(128,), products="attention's in fp8 (e4m3)"),
    "cudnn_fp8": Kernel(
        majors=(9,),
        half=True,
        heads=(128,),
        package="cudnn",
        install=f"pip install --no-deps {cudnn_fp8.PACKAGE}",
        products="attention's in fp8 (e4m3)",
        square=True,
        fixed_scale=True,
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
    "xformers": Kernel(package="xformers", install="pip install xformers, in the version for this PyTorch"),
}
OF_PYTORCH = {
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""Backends of `torch.nn.attention.sdpa_kernel`, and their members of SDPBackend. Calls are redirected to all others."""
CACHE_TAG = "attention="
"""Prefix of a kernel's name in the keys of the compiler's cache."""


def unsupported_on(backend: str, machine: Machine, needs_package: bool = True) -> str | None:
    """Return why the machine or its packages do not support a kernel, or None."""
    kernel = KERNELS[backend]
    if machine.is_gpu and not machine.is_cuda:
        if machine.backend in kernel.elsewhere:
            return None
        others = [name for name, other in KERNELS.items() if machine.backend in other.elsewhere]
        return (
            f"{backend} attention is not known to run on {machine.maker}'s GPUs; take {' or '.join(others)}, or leave "
            "attention to PyTorch"
        )
    if not machine.is_cuda:
        if not kernel.on_cpu:
            return f"there is no {backend} attention kernel for CPUs; use flash, math or flex"
        if backend == "flex" and machine.compiler is None:
            return (
                "flex attention must be compiled, and no C++ compiler was found (install g++ or clang++); uncompiled "
                "it writes the whole score matrix, as math attention does"
            )
        return None
    have = machine.capability
    if have is not None and kernel.majors and have[0] not in kernel.majors:
        only = " or ".join(f"{major}.x" for major in kernel.majors)
        has = f"{machine.device_name} has {_version(have)}"
        return f"{backend} attention runs only on compute capability {only}, {has}"
    if have is not None and kernel.least is not None and have < kernel.least:
        least = _version(kernel.least)
        return f"{backend} attention needs compute capability {least}, {machine.device_name} has {_version(have)}"
    packages = [package for package in (kernel.package, kernel.alternative) if package is not None]
    if needs_package and packages and not any(map(machine.has_package, packages)):
        return f"{backend} attention needs the package {' or '.join(packages)} ({kernel.install})"
    return None


def unsupported_for(backend: str, component: Component, module: Any, machine: Machine) -> str | None:
    """Return why a kernel does not support a component, by its precision or head sizes, or None."""
    if not machine.is_cuda:
        return None
    kernel = KERNELS[backend]
    dtype = str(module.dtype).removeprefix("torch.")
    if kernel.half and dtype not in {"float16", "bfloat16"}:
        return f"{backend} attention needs fp16 or bf16, the {component} is {dtype}; add bf16 or fp16"
    sizes = head_sizes(module)
    # PyTorch's kernels are selected for all of a component's calls; of others one supported size is enough.
    fitting = {size for size in sizes if kernel.takes_head(size)}
    if sizes and (not fitting or (backend in OF_PYTORCH and fitting != sizes)):
        listed = ", ".join(map(str, sorted(sizes)))
        return f"{backend} attention supports {kernel.supported_heads} channels per head, the {component} has {listed}"
    return None


def refused_by_pytorch(backend: str, component: Component, module: Any, device: Any) -> str | None:
    """Return why PyTorch refuses a kernel for the component's dtype and head sizes, by a small call on the device."""
    import warnings

    import torch
    from torch.nn.attention import sdpa_kernel

    for size in sorted(head_sizes(module)):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=device)
        with warnings.catch_warnings(), torch.inference_mode(), sdpa_kernel(sdp_backend(backend)):
            warnings.simplefilter("ignore")  # the dispatcher explains a refusal in several warnings
            try:
                torch.nn.functional.scaled_dot_product_attention(query, query, query)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "o available kernel" not in str(error):
                    raise
                dtype = str(module.dtype).removeprefix("torch.")
                return f"PyTorch's {backend} attention refuses the {component}'s heads of {size} in {dtype} on this GPU"
    return None


@contextmanager
def selected(backend: str) -> Iterator[None]:
    """Select one of PyTorch's kernels; its name becomes part of the compiler's cache keys, which know nothing of it."""
    from torch.compiler import config
    from torch.nn.attention import sdpa_kernel

    before = config.cache_key_tag
    config.cache_key_tag = f"{before} {CACHE_TAG}{backend}".strip()
    try:
        with sdpa_kernel(sdp_backend(backend)):
            yield
    finally:
        config.cache_key_tag = before


def sdp_backend(name: str) -> Any:
    from torch.nn.attention import SDPBackend

    return getattr(SDPBackend, OF_PYTORCH[name])


def chosen_by_pytorch(module: Any, device: Any) -> set[str]:
    """Return the kernels that PyTorch picks by default on a device for the component's dtype and head sizes."""
    import torch

    names = {int(sdp_backend(name)): name for name in OF_PYTORCH}
    chosen = set()
    for size in head_sizes(module):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=device)
        with torch.inference_mode():
            # The dispatcher's function has no public name; torch.nn.functional uses it in the same way.
            choice = int(torch._fused_sdp_choice(query, query, query))
        chosen.add(names.get(choice, f"backend {choice}"))
    return chosen


def head_sizes(module: Any) -> set[int]:
    layers = attention_layers(module)
    return {int(getattr(layer, "head_dim", None) or layer.inner_dim // layer.heads) for layer in layers}


def attention_layers(module: Any) -> list[Any]:
    return [
        part
        for part in module.modules()
        if hasattr(part, "processor") and (hasattr(part, "heads") or hasattr(part, "num_heads"))
    ]


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
