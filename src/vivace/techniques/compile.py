"""torch.compile: kernels generated for this model and shape, launches fused.

Why: fusion of the many small memory-bound operations between matmuls, and fewer launches.
    `reduce-overhead` also captures CUDA graphs, which matters most for small models.
Costs: the first call takes 20 to 340 s on full-size models, 10 to 50 s a graph on a CPU; a new size compiles again
    unless `sizes` says otherwise. Reports say after how many images that is paid back.
Needs: on CPUs a C++ compiler; on GPUs Triton, which needs compute capability 7.5.
Source: Ansel et al., PyTorch 2, ASPLOS 2024; PyTorch, "Reducing torch.compile cold start compilation time with
    regional compilation".

`blocks=repeated` compiles one of each kind of block that the model repeats, and uses that code for all of them: a
fraction of the compile time for most of the gain, where nearly all work is in such blocks, as in FLUX. Of a UNet only
the transformer blocks are repeated, and its ResNets stay eager. VAEs and text encoders name no such blocks. Where
diffusers names no repeated blocks of a transformer (SD 3, Sana), vivace takes those that it knows of the architecture.
Without `sizes` each process compiles for its first size; at the next size it compiles again, for any width or height
that has changed, which may happen a second time. `sizes=[512x512, 768x512]` (width x height) announces a few: each gets
code of its own, compiled when the session is warmed up (`vivace warm`, `session.warm_up()`), and a size that was not
announced is compiled when it comes, until PyTorch's limit of graphs would be reached, where it is refused.
`sizes=any`, which is `dynamic=True`, compiles once for every size. Batches of one compile apart from larger ones. Of a
UNet and a VAE only height and width are dynamic, since more symbols make tracing take minutes; a second batch size or
length of text compiles once more. The sizes that a UNet's levels cannot halve evenly (for SD 1.5, those that are not
multiples of 64 pixels) share other code, compiled once.

Compiled code is kept between processes in a folder that survives a reboot, so that a second process finds it:
`TORCHINDUCTOR_CACHE_DIR` if set, else `inductor` in $VIVACE_CACHE or `~/.cache/vivace`. It may be deleted. The record
counts the graphs that were found there. Tracing is not saved, and neither are the CUDA graphs of `reduce-overhead`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from vivace.architectures import family_of
from vivace.errors import NoEffect, Unsupported
from vivace.foundation.spec.sizes import in_order
from vivace.machinery.compilation.compiled_code import (
    counting_graphs,
    graph_limit,
    keep_compiled_code,
    limited,
    num_kinds,
)
from vivace.machinery.technique import (
    COMPONENTS,
    CallContext,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
    working_part,
)
from vivace.machinery.technique.script import Script, literal, written_call
from vivace.machinery.technique.traits import give

if TYPE_CHECKING:
    import torch


def takes_a_sample(part: torch.nn.Module) -> bool:
    """Whether the first input is named `sample`, (batch, channels, height, width), as in diffusers' UNets and VAEs."""
    return next(iter(inspect.signature(part.forward).parameters), None) == "sample"


def compiled_by_units(part: torch.nn.Module, *, any_size: bool, **options: Any) -> Callable[..., Any]:
    """Return the compiled forward of a UNet or a part of a VAE, which passes `sample` to torch.compile in units.

    A UNet halves its size at each level. With height and width as symbols its shapes are nested divisions, which sympy
    simplifies again and again: inductor takes three times as long as for one size. So the symbols count units of
    2^levels: half of 8 k is 4 k. Sizes that are no multiple of the unit have code of their own, traced the long way; a
    UNet interpolates at such sizes.

    Args:
        any_size: make height and width symbols from the first size on, and nothing else. Otherwise the first size has
            code of its own, and torch.compile makes symbols of changing sizes.
        options: of torch.compile, without `dynamic`.
    """
    import torch

    # By the attribute: a UNet can have one size on several levels. A VAE has none, and its decoder only enlarges.
    unit = 2 ** getattr(part, "num_upsamplers", 0)
    eager = part.forward
    of_any_size = torch.compile(eager, **options)

    def from_units(units: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """units: (batch, channels, height / unit, unit, width / unit, unit)."""
        return eager(units.flatten(4, 5).flatten(2, 3), *args, **kwargs)

    of_whole_units = torch.compile(from_units, **options)

    @functools.wraps(eager)
    def forward(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if unit > 1 and sample.ndim == 4 and not any(size % unit for size in sample.shape[2:]):
            units = sample.unflatten(3, (-1, unit)).unflatten(2, (-1, unit))
            if any_size:
                _mark_dynamic(units, (2, 4))
            return of_whole_units(units, *args, **kwargs)
        if any_size:
            _mark_dynamic(sample, range(2, sample.ndim))
        return of_any_size(sample, *args, **kwargs)

    return forward


def _mark_dynamic(tensor: torch.Tensor, dims: tuple[int, ...] | range) -> None:
    import torch

    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


_MIN_CAPABILITY = (7, 5)  # of Triton
_ANY = "any"
_MOST_SIZES = 32


class Compile(Technique):
    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "kernels generated for this model and shape (torch.compile)"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.COMPILE,
        owns="compilation",
        same_picture=True,
        targetable=COMPONENTS,
        default_targets=("denoiser",),
        fallback=("compile(blocks=repeated)",),
    )

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = knob(
        "default", tune=["default", "reduce-overhead"], about="torch.compile's mode"
    )
    backend: Literal["inductor", "aot_eager", "eager"] = knob(
        "inductor", about="eager and aot_eager only trace: to find graph breaks, not for speed"
    )
    blocks: Literal["whole", "repeated"] = knob(
        "whole",
        tune=["whole", "repeated"],
        about="compile the component whole, or each kind of block that it repeats",
    )
    dynamic: bool = knob(False, tune=[False], about="compile once for any size")
    sizes: tuple[str, ...] = knob(
        (), new=True, about="sizes that get code of their own, e.g. [512x512, 768x512], or any: dynamic=True"
    )

    coordinate_descent: bool = knob(
        True,
        new=True,
        about="with max-autotune: also search around each kernel's configuration, one kernel after the other; False "
        "leaves out this search, which takes most of the time on a UNet",
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_in_order(cls, knobs: Any) -> Any:
        """Put sizes into their one order, and `any` into `dynamic`."""
        announced = knobs.get("sizes") if isinstance(knobs, dict) else None
        if not announced:
            return knobs
        texts = [announced] if isinstance(announced, str) else announced
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"sizes is a list of WIDTHxHEIGHT, e.g. [512x512, 768x512], or any; got {announced!r}"
            )
        if _ANY in (text.lower() for text in texts):
            if len(texts) > 1:
                raise ValueError("sizes=any stands for every size; leave out the others, or leave out any")
            return {**knobs, "sizes": (), "dynamic": True}
        if knobs.get("dynamic") is True:
            raise ValueError("dynamic=True compiles once for any size; leave it out, or leave out sizes")
        sizes = in_order(texts)
        if len(sizes) > _MOST_SIZES:
            raise ValueError(
                f"at most {_MOST_SIZES} sizes get code of their own, got {len(sizes)}; take sizes=any"
            )
        return {**knobs, "sizes": tuple(map(str, sizes))}

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            announced_sizes=in_order(self.sizes),
            provides=frozenset(
                {Trait.COMPILED}
                | ({Trait.COMPILED_WHOLE} if self.blocks == "whole" else set())
                | ({Trait.CAPTURED, Trait.CAPTURED_BY_COMPILER} if self._captures_graphs else set())
            ),
        )

    @property
    def _captures_graphs(self) -> bool:
        return self.mode in {"reduce-overhead", "max-autotune"}

    def unsupported(self, target: Target) -> str | None:
        machine = target.machine
        if self.backend != "inductor" and self.mode != "default":
            return f"mode {self.mode} belongs to the inductor backend, not to {self.backend}"
        if not self.coordinate_descent and "autotune" not in self.mode:
            return (
                f"mode {self.mode} has no coordinate descent to leave out; give mode max-autotune or "
                "max-autotune-no-cudagraphs, or leave out coordinate_descent=False"
            )
        if self.backend == "inductor":
            if not machine.is_gpu and machine.compiler is None:
                return "compiling for a CPU needs a C++ compiler, and none was found (install g++ or clang++)"
            if not machine.captures_graphs and self.mode == "reduce-overhead":
                return "reduce-overhead captures CUDA graphs, and there is no NVIDIA or AMD GPU"
            if machine.is_cuda and machine.capability is not None and machine.capability < _MIN_CAPABILITY:
                return (
                    f"compiling needs Triton, which needs compute capability {_MIN_CAPABILITY[0]}."
                    f"{_MIN_CAPABILITY[1]}; {machine.device_name} has {machine.capability[0]}.{machine.capability[1]}"
                )
        if "denoiser" in self.targets and target.pipe is not None:
            reason = self._denoiser_unsupported(target.module("denoiser"), machine.captures_graphs)
            if reason is not None:
                return reason
        if self.blocks == "repeated":
            if self._captures_graphs and machine.captures_graphs:
                return (
                    f"{self.mode} would capture a CUDA graph for every single block; compile whole, or take mode "
                    "default or max-autotune-no-cudagraphs with repeated blocks"
                )
            for component, module in target.modules(self.targets).items():
                if not _names_blocks(module) and not _chains(module):
                    return (
                        f"the {component} ({type(module).__name__}) names no repeated blocks; compile it whole, or "
                        "aim this at the denoiser"
                    )
        return None

    def _denoiser_unsupported(self, denoiser: torch.nn.Module, captures_graphs: bool) -> str | None:
        family = family_of(denoiser)
        if family is None:
            return None
        if self._captures_graphs and captures_graphs and (reason := family.not_captured(denoiser)):
            return (
                f"{reason}, and {self.mode} would capture a CUDA graph of that; take mode default or "
                "max-autotune-no-cudagraphs"
            )
        if self.sizes and (family.text_of_any_length or family.rows_in_lists):
            return (
                f"{family.name} takes prompts at their own lengths, and code of fixed shapes would be compiled for "
                "each length; compile once for any with sizes=any"
            )
        return None

    def apply(self, target: Target) -> Effect:
        changed = self._changed(target)
        options: dict[str, Any] = {"backend": self.backend}
        if self.backend == "inductor":
            keep_compiled_code()
            options |= self._how(target.machine.is_cuda)
        # By default torch.compile makes code for any size once a second one comes.
        options |= {"dynamic": self.dynamic} if self.dynamic or self.sizes else {}
        captures_graphs = self._captures_graphs and target.machine.captures_graphs
        for component, module in target.modules(self.targets).items():
            if self.blocks == "repeated":
                for block in _repeated(module):
                    block.compile(**options)
            else:
                _compile_whole(working_part(component, module), options, captures_graphs)
        return Effect(
            changed=changed,
            contexts={
                component: surrounding
                for component, module in target.modules(self.targets).items()
                if (surrounding := self._surrounding(module)) is not None
            },
            evidence=counting_graphs(),
        )

    def _how(self, on_gpu: bool) -> dict[str, Any]:
        """Return the mode as torch.compile takes it: by its name, or as inductor's options, which replace a mode.

        With `max-autotune` inductor compiles the candidates in worker processes, and on GPUs then does not find them:
        the process that times them compiles each of them again, one after the other. With one compile thread threads
        of that process compile them, once.
        """
        if "autotune" not in self.mode:
            return {} if self.mode == "default" else {"mode": self.mode}
        from torch._inductor import list_mode_options

        changed = {} if self.coordinate_descent else {"coordinate_descent_tuning": False}
        threads = {"compile_threads": 1} if on_gpu else {}
        return {"options": {**list_mode_options(self.mode), **changed, **threads}}

    def _surrounding(self, module: torch.nn.Module) -> CallContext | None:
        """Return the settings that a component's forward needs, if any."""
        kinds = num_kinds(_repeated(module)) if self.blocks == "repeated" else 1
        limits = limited(len(self.sizes), kinds) if self.sizes or kinds > 1 else None
        if limits is None or not self.dynamic:
            return _distinct_sizes if self.dynamic else limits

        @contextmanager
        def both() -> Iterator[None]:
            with _distinct_sizes(), limits():
                yield

        return both

    def predict(self, target: Target) -> Effect:
        """Predict with the eager code instead of compiled code; mark the blocks that would be compiled."""
        changed = self._changed(target)
        if self.blocks == "repeated":
            for module in target.modules(self.targets).values():
                for block in _repeated(module):
                    give(block, frozenset({Trait.COMPILED, Trait.COMPILED_WHOLE}))
        return Effect(changed=changed)

    def _changed(self, target: Target) -> dict[str, int | float | str]:
        """Return the compiled parts, and how they are compiled.

        Raises:
            NoEffect: the pipeline has none of the components.
        """
        mode = self.mode if self.backend == "inductor" and self.mode != "default" else None
        how = [self.backend, *([mode] if mode else []), *(["dynamic"] if self.dynamic else [])]
        how += [] if self.coordinate_descent else ["without coordinate descent"]
        changed: dict[str, int | float | str] = {}
        for component, module in target.modules(self.targets).items():
            if self.blocks == "repeated":
                changed[f"{component}.compiled_blocks"] = len(_repeated(module))
            changed[f"{component}.compiled"] = ", ".join(how)
            if self.sizes:
                changed[f"{component}.sizes"] = ", ".join(self.sizes)
        if not changed:
            raise NoEffect(f"this pipeline has none of {', '.join(self.targets)}")
        return changed

    def script(self, target: Target) -> Script | None:
        graphs = self._captures_graphs and target.machine.captures_graphs
        if graphs and self.targets != ("denoiser",):
            return None  # others do not return a plain tuple of tensors
        if self.dynamic:
            return None  # code traced with a square image would serve squares only: see `_distinct_sizes`
        arguments = {} if self.backend == "inductor" else {"backend": literal(self.backend)}
        arguments |= {name: literal(value) for name, value in self._how(target.machine.is_cuda).items()}
        lines: list[str] = []
        if self.sizes:
            arguments["dynamic"] = "False"
            lines += [
                f"# Each size has code of its own: {', '.join(self.sizes)}.",
                f"torch._dynamo.config.recompile_limit = {graph_limit(len(self.sizes))}",
            ]
        for component, module in target.modules(self.targets).items():
            if self.blocks == "repeated":
                lines += _script_of_blocks(target.path(component), module, arguments)
                continue
            # A pipeline calls vae.decode, never vae.forward.
            path = f"{target.working_path(component)}.forward"
            if graphs:
                lines += written_call("compiled = torch.compile", path, **arguments).splitlines()
                lines += [*_CLONES, f"{path} = forward_with_own_outputs"]
            else:
                lines += written_call(f"{path} = torch.compile", path, **arguments).splitlines()
        return Script(imports=("torch",), lines=tuple(lines))


def _distinct_sizes() -> AbstractContextManager[object]:
    """Keep height and width apart: otherwise code traced with a square image takes them for one number, and serves
    squares only."""
    from torch.fx.experimental import _config

    context: AbstractContextManager[object] = _config.patch(use_duck_shape=False)
    return context


def _compile_whole(part: torch.nn.Module, options: dict[str, Any], captures_graphs: bool) -> None:
    import torch

    if options.get("dynamic") is not False and takes_a_sample(part):
        others = {name: value for name, value in options.items() if name != "dynamic"}
        compiled = compiled_by_units(part, any_size=bool(options.get("dynamic")), **others)
    else:
        compiled = torch.compile(part.forward, **options)
    part.forward = _with_copied_outputs(compiled) if captures_graphs else compiled


def _names_blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the classes of blocks that diffusers says the model repeats."""
    return tuple(getattr(module, "_repeated_blocks", None) or ())


def _chains(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the lists of blocks that vivace knows of the architecture; diffusers names none for SD 3 and Sana."""
    family = family_of(module)
    return family.blocks.chains if family is not None and family.blocks is not None else ()


def _repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that the model repeats."""
    if not (kinds := _names_blocks(module)):
        return [block for chain in _chains(module) for block in module.get_submodule(chain).children()]
    repeated = [part for part in module.modules() if type(part).__name__ in kinds]
    if not repeated:
        raise Unsupported(f"compile: none of the repeated blocks ({', '.join(kinds)}) is in this model")
    return repeated


def _script_of_blocks(path: str, module: torch.nn.Module, options: dict[str, str]) -> list[str]:
    if _names_blocks(module):
        return written_call(f"{path}.compile_repeated_blocks", **options).splitlines()
    lines = []
    for chain in _chains(module):
        call = written_call("block.compile", **options).splitlines()
        lines += [f"for block in {path}.{chain}:", *(f"    {line}" for line in call)]
    return lines


# Like `_with_copied_outputs`, for denoisers: pipelines ask them for a tuple.
_CLONES = (
    "# A CUDA graph writes its outputs to the same memory at each replay, and some schedulers keep",
    "# earlier ones.",
    "def forward_with_own_outputs(*args, **kwargs):",
    "    torch.compiler.cudagraph_mark_step_begin()",
    "    return tuple(output.clone() for output in compiled(*args, **kwargs))",
)


def _with_copied_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a compiled function's outputs: a CUDA graph overwrites them at each replay, and some schedulers keep earlier
    outputs (PNDM, without guidance)."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map_only

        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

    return forward
