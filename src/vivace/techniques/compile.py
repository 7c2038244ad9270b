"""torch.compile: kernels generated for this model and shape, launches fused.

Why: fusion of the many small memory-bound operations between matrix products, and fewer launches (eager FLUX
    launches 3,705 kernels a step). `reduce-overhead` also records CUDA graphs, which decides for small models
    (SD 1.5 on an H200: 10.0 -> 6.2 ms a step).
Costs: the first call takes 20 to 340 s on full-size models, 10 to 50 s a graph on a CPU; a new size compiles again.
    Reports say from how many pictures on that is paid back.
Needs: on CPUs a C++ compiler; on GPUs Triton, which wants compute capability 7.5.
Source: Ansel et al., PyTorch 2, ASPLOS 2024; PyTorch, "Reducing torch.compile cold start compilation time with
    regional compilation".

`blocks=repeated` compiles one of each kind of block that the model repeats, and uses that code for all of them: a
fraction of the compile time for most of the gain, where nearly all work lies in such blocks. FLUX is so; of a UNet only
the transformer blocks are, and its ResNets stay eager. VAEs and text encoders name no such blocks.
`dynamic=True` compiles for every size at once, in code that knows none: a little slower, and compiled once. Otherwise
each process compiles for its first size, and at the second once more, for sizes in general.

Compiled code is kept between processes in a folder that outlasts the machine's next start, so that a second process
finds it: `TORCHINDUCTOR_CACHE_DIR` if set, else `inductor` in $VIVACE_CACHE or `~/.cache/vivace`. It may be deleted.
The record counts the graphs that were found there. Tracing is not saved, and neither are the CUDA graphs of
`reduce-overhead`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.compilation.compiled_code import counting_graphs, keep_compiled_code
from vivace.contract import (
    COMPONENTS,
    Component,
    Effect,
    MemoryAdvice,
    Stage,
    Target,
    Technique,
    knob,
    working_part,
)
from vivace.contract.script import Script, literal, written_call
from vivace.errors import NoEffect, Unsupported

_LEAST = (7, 5)  # compute capability that Triton generates code for


class Compile(Technique):
    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "kernels generated for this model and shape (torch.compile)"
    stage: ClassVar[Stage] = Stage.COMPILE
    owns: ClassVar[str] = "compilation"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = COMPONENTS
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)
    memory_advice: ClassVar[MemoryAdvice] = MemoryAdvice(fallback=("compile(blocks=repeated)",))

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = knob(
        "default", tune=["default", "reduce-overhead"], about="torch.compile's mode"
    )
    backend: Literal["inductor", "aot_eager", "eager"] = knob(
        "inductor", about="eager and aot_eager only trace: for finding graph breaks, not for speed"
    )
    blocks: Literal["whole", "repeated"] = knob(
        "whole",
        tune=["whole", "repeated"],
        about="the component whole, or one code for all blocks that it repeats",
    )
    dynamic: bool = knob(False, tune=[False], about="compile for any size at once")

    @property
    def _records_graphs(self) -> bool:
        return self.mode in {"reduce-overhead", "max-autotune"}

    def unsupported(self, target: Target) -> str | None:
        machine = target.machine
        if self.backend != "inductor" and self.mode != "default":
            return f"mode {self.mode} belongs to the inductor backend, not to {self.backend}"
        if self.backend == "inductor":
            if not machine.is_cuda and machine.compiler is None:
                return "compiling for a CPU needs a C++ compiler, and none was found (install g++ or clang++)"
            if not machine.is_cuda and self.mode == "reduce-overhead":
                return "reduce-overhead records CUDA graphs, and there is no CUDA device"
            if machine.is_cuda and machine.capability is not None and machine.capability < _LEAST:
                return (
                    f"compiling needs Triton, which needs compute capability {_LEAST[0]}.{_LEAST[1]}; "
                    f"{machine.device_name} has {machine.capability[0]}.{machine.capability[1]}"
                )
        if self.blocks == "repeated":
            if self._records_graphs and machine.is_cuda:
                return (
                    f"{self.mode} would record a CUDA graph for every single block; compile whole, or take mode "
                    "default or max-autotune-no-cudagraphs with repeated blocks"
                )
            for component, module in target.modules(self.targets).items():
                if not getattr(module, "_repeated_blocks", None):
                    return (
                        f"the {component} ({type(module).__name__}) names no repeated blocks; compile it whole, or "
                        "aim this at the denoiser"
                    )
        return None

    def apply(self, target: Target) -> Effect:
        options: dict[str, Any] = {"backend": self.backend}
        if self.backend == "inductor":
            keep_compiled_code()
            options |= {} if self.mode == "default" else {"mode": self.mode}
        options |= {"dynamic": True} if self.dynamic else {}
        changed: dict[str, int | float | str] = {}
        for component, module in target.modules(self.targets).items():
            if self.blocks == "repeated":
                changed[f"{component}.compiled_blocks"] = len(_repeated(module))
                if target.model.has_weights:
                    module.compile_repeated_blocks(**options)
                else:
                    for block in _repeated(module):
                        block._compiled_call_impl = _as_if_compiled(block._call_impl)
            elif target.model.has_weights:
                _compile_whole(
                    working_part(component, module), options, self._records_graphs and target.machine.is_cuda
                )
            else:
                part = working_part(component, module)
                part.forward = _as_if_compiled(part.forward)
            changed[f"{component}.compiled"] = ", ".join(
                [self.backend]
                + [word for word in (options.get("mode"), "dynamic" if self.dynamic else None) if word]
            )
        if not changed:
            raise NoEffect(f"this pipeline has none of {', '.join(self.targets)}")
        return Effect(
            changed=changed,
            contexts=dict.fromkeys(target.modules(self.targets), _sizes_apart)
            if self.dynamic and target.model.has_weights
            else {},
            evidence=counting_graphs(),
        )

    def script(self, target: Target) -> Script | None:
        graphs = self.mode in {"reduce-overhead", "max-autotune"} and target.machine.is_cuda
        if graphs and self.targets != ("denoiser",):
            return None  # what others return is no plain tuple of tensors
        if self.dynamic:
            return None  # made of a square picture, the code would serve squares only: see `_sizes_apart`
        given = {} if self.backend == "inductor" else {"backend": literal(self.backend)}
        given |= {} if self.mode == "default" else {"mode": literal(self.mode)}
        lines: list[str] = []
        for component in target.modules(self.targets):
            if self.blocks == "repeated":
                lines += written_call(
                    f"{target.path(component)}.compile_repeated_blocks", **given
                ).splitlines()
                continue
            # A pipeline calls vae.decode, never vae.forward.
            path = f"{target.working_path(component)}.forward"
            if graphs:
                lines += written_call("compiled = torch.compile", path, **given).splitlines()
                lines += [*_CLONES, f"{path} = forward_with_own_outputs"]
            else:
                lines += written_call(f"{path} = torch.compile", path, **given).splitlines()
        return Script(imports=("torch",), lines=tuple(lines))


def _sizes_apart() -> Any:
    """Code that is made of a square picture would else take height and width for one number, and serve squares only."""
    from torch.fx.experimental import _config

    return _config.patch(use_duck_shape=False)


def _compile_whole(part: Any, options: dict[str, Any], records_graphs: bool) -> None:
    import torch

    compiled = torch.compile(part.forward, **options)
    part.forward = _own_outputs(compiled) if records_graphs else compiled


def _as_if_compiled(call: Any) -> Any:
    """Without data the eager call stands for the compiled one, and is told by the same attribute."""

    def eager(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    eager._torchdynamo_orig_callable = call  # type: ignore[attr-defined]
    return eager


def _repeated(module: Any) -> list[Any]:
    """Blocks of the kinds that the model says it repeats."""
    kinds = module._repeated_blocks
    found = [part for part in module.modules() if type(part).__name__ in kinds]
    if not found:
        raise Unsupported(f"compile: none of the repeated blocks ({', '.join(kinds)}) is in this model")
    return found


# As `_own_outputs`, for denoisers, which pipelines ask for a tuple.
_CLONES = (
    "# A CUDA graph writes its outputs to the same memory at each replay, and some schedulers keep",
    "# earlier ones.",
    "def forward_with_own_outputs(*args, **kwargs):",
    "    torch.compiler.cudagraph_mark_step_begin()",
    "    return tuple(output.clone() for output in compiled(*args, **kwargs))",
)


def _own_outputs(compiled: Any) -> Any:
    """A CUDA graph writes its outputs to the same memory at each replay. Schedulers that keep earlier outputs
    (PNDM, without guidance) would find them overwritten, so the caller gets copies."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map_only

        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

    forward.replays_graphs = True  # type: ignore[attr-defined]  # for whoever would record or move it
    return forward
