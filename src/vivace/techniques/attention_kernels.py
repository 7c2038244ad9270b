"""What each attention kernel needs, and how calls are led to those that PyTorch does not choose from by itself.

diffusers' UNets and VAEs call `torch.nn.functional.scaled_dot_product_attention`, as its transformers do in the end, so
that function is what is exchanged while a component's forward runs, and put back behind it: adapters, fused
projections and processors of any kind stay as they are. torch.compile guards the function, and traces into ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vivace.spec.technique import Component, Machine

Function = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """Where a kernel runs and what it takes.

    on_cpu: PyTorch has it for CPUs, where neither dtypes nor sizes limit it.
    least: the lowest compute capability; majors: the only major ones, if not all from there on.
    half: it takes fp16 and bf16 alone.
    max_head, heads: the largest size of an attention head on a GPU, or the sizes that it takes.
    package, install: what must be importable, and the command that makes it so.
    """

    on_cpu: bool = False
    least: tuple[int, int] | None = None
    majors: tuple[int, ...] = ()
    half: bool = False
    max_head: int | None = None
    heads: tuple[int, ...] = ()
    package: str | None = None
    install: str = ""

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
    ),
    "xformers": Kernel(
        package="xformers", install="pip install xformers, in the version made for this PyTorch"
    ),
}
OF_PYTORCH = ("math", "efficient", "flash", "cudnn")
"""What `torch.nn.attention.sdpa_kernel` chooses from; the others are led to."""


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


def refused_by_pytorch(backend: str, component: Component, module: Any) -> str | None:
    """Why PyTorch's dispatcher does not run one of its own kernels for the component's dtype and heads, or None.

    Asked of the device with a small call, since the rules differ between its versions and cuDNN's.
    """
    import warnings

    import torch
    from torch.nn.attention import sdpa_kernel

    for size in sorted(head_sizes(module)):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=module.device)
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


def sdp_backend(backend: str) -> Any:
    from torch.nn.attention import SDPBackend

    return {
        "math": SDPBackend.MATH,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[backend]


def chosen_by_pytorch(module: Any) -> set[str]:
    """Which kernels PyTorch would choose by itself for the component's dtype, device and sizes of heads."""
    import torch

    names = {int(sdp_backend(name)): name for name in OF_PYTORCH}
    found = set()
    for size in head_sizes(module):
        query = torch.zeros(1, 2, 256, size, dtype=module.dtype, device=module.device)
        with torch.inference_mode():
            # The dispatcher's own question; it has no public name (torch.nn.functional asks it the same way).
            choice = int(torch._fused_sdp_choice(query, query, query))
        found.add(names.get(choice, f"backend {choice}"))
    return found


def head_sizes(module: Any) -> set[int]:
    """Channels of an attention head, of all attentions that diffusers built into the module."""
    attentions = [m for m in module.modules() if hasattr(m, "heads") and hasattr(m, "processor")]
    return {int(getattr(m, "head_dim", None) or m.inner_dim // m.heads) for m in attentions}


class Led:
    """Calls of one component that are led to a kernel, counted.

    num_led: calls that the kernel computed. num_compiled: places in graphs of torch.compile that hold it; their calls
    pass here no more. left: calls that stayed PyTorch's, by the reason.
    """

    def __init__(self, backend: str) -> None:
        import torch

        self._fp32 = torch.float32
        self.num_led = 0
        self.num_compiled = 0
        self.left: dict[str, int] = {}
        self._kernel = KERNELS[backend]
        self._attention = self._function(backend)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Lead calls while the context lasts."""
        import torch.nn.functional as functional
        from torch._dynamo import config

        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention
        try:
            # UNets have more shapes of attention than dynamo's usual eight. Beyond the limit flex would give up.
            with config.patch(recompile_limit=64):
                yield
        finally:
            functional.scaled_dot_product_attention = before

    def _function(self, backend: str) -> Function:
        """A stand-in for scaled_dot_product_attention."""
        import torch

        plain = torch.nn.functional.scaled_dot_product_attention
        eager, traced = _FUNCTIONS[backend]()
        label = f"vivace::{backend}_attention"

        # Runs while a graph is traced, once a place; the graph itself holds nothing of it.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_compiled() -> int:
            self.num_compiled += 1
            return self.num_compiled

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_left(reason: str) -> int:
            self.left[reason] = self.left.get(reason, 0) + 1
            return 0

        def attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            reason = self._misfit(query, attn_mask, dropout_p, is_causal, enable_gqa)
            if reason is not None:
                count_left(reason)
                return plain(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if torch.compiler.is_compiling():
                count_compiled()
                return traced(query, key, value, scale)
            self.num_led += 1
            if torch.autograd._profiler_enabled():  # so that a trace names it
                with torch.profiler.record_function(label):
                    return eager(query, key, value, scale)
            return eager(query, key, value, scale)

        return attention

    def _misfit(
        self, query: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool
    ) -> str | None:
        """Why a call is left to PyTorch."""
        if mask is not None:
            return "masked"
        if dropout_p or is_causal or enable_gqa:
            return "causal, grouped or with dropout"
        if query.is_cuda and not self._kernel.takes_head(query.shape[-1]):
            return f"heads of {query.shape[-1]}"
        if self._kernel.half and query.dtype == self._fp32:
            return "fp32"
        return None


def _flex() -> tuple[Function, Function]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # A graph for each shape: kernels for symbolic shapes are slower. Whole, or else it would silently not be compiled.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return compiled(query, key, value, scale=scale)

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return flex_attention(query, key, value, scale=scale)

    return eager, traced


def _flash3() -> tuple[Function, Function]:
    from flash_attn_interface import flash_attn_func

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _first(flash_attn_func(query, key, value, softmax_scale=scale))

    return _opaque("flash3", call)


def _flash4() -> tuple[Function, Function]:
    from flash_attn.cute import flash_attn_func

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _first(flash_attn_func(query, key, value, softmax_scale=scale))

    return _opaque("flash4", call)


def _sage() -> tuple[Function, Function]:
    from sageattention import sageattn

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        # It would subtract the mean from the caller's own key, in place (1.0.6). Softmax does not see the difference.
        key = key - key.mean(dim=1, keepdim=True)
        return sageattn(query, key, value, tensor_layout="NHD", sm_scale=scale, smooth_k=False)

    return _opaque("sage", call)


def _xformers() -> tuple[Function, Function]:
    from xformers.ops import memory_efficient_attention

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return memory_efficient_attention(query, key, value, scale=scale)

    return _opaque("xformers", call)


_FUNCTIONS: dict[str, Callable[[], tuple[Function, Function]]] = {
    "flex": _flex,
    "flash3": _flash3,
    "flash4": _flash4,
    "sage": _sage,
    "xformers": _xformers,
}
_OPERATORS: dict[str, Any] = {}  # registered once a process


def _opaque(name: str, call: Function) -> tuple[Function, Function]:
    """A package's kernel, called as it is, and as an operator that torch.compile leaves whole.

    `call` takes and gives (batch, tokens, heads, channels), as these packages do; scaled_dot_product_attention has
    heads before tokens.
    """
    import torch

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return call(*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    if name not in _OPERATORS:

        def operator(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
        ) -> torch.Tensor:
            return call(query, key, value, scale).contiguous()

        # Read by the registration, which does not understand postponed annotations.
        operator.__annotations__ = {
            **dict.fromkeys(("query", "key", "value"), torch.Tensor),
            "scale": float | None,
            "return": torch.Tensor,
        }
        made = torch.library.custom_op(f"vivace::{name}_attention", operator, mutates_args=())
        made.register_fake(lambda query, key, value, scale: query.new_empty(query.shape))
        _OPERATORS[name] = made

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _OPERATORS[name](*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    return eager, traced


def _first(result: Any) -> Any:
    """The output alone: some versions also return the logarithms of the sums."""
    return result[0] if isinstance(result, tuple) else result


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
