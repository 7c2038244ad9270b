"""Precision of the weights and of the arithmetic: fp32, fp16 or bf16.

Why: half the bytes to read and twice (or, on tensor cores, many times) the arithmetic rate.
Costs: rounding. fp16 has 10 bits of mantissa and overflows at 65504 (SDXL's own VAE does); bf16 has 7 bits and
    never overflows.
Needs: hardware that computes in it. A CPU without bf16 or fp16 units emulates them and is 10 to 30 times slower, or
    more: `vivace doctor` measures that.
Source: PyTorch, torch.Tensor.to; Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.

Components may differ in precision (`bf16@denoiser`): inputs are then cast where they enter a component.
As where a model is loaded in a precision, what it computes for itself stays in fp32 (frequencies of rotary and timestep
embeddings), and so do the layers that its authors name.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from vivace.errors import NoEffect
from vivace.machinery.quantization.layers import is_quantised
from vivace.machinery.technique import (
    COMPONENTS,
    Arithmetic,
    Component,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    knob,
    weights_dtype,
)
from vivace.machinery.technique.anatomy import second_denoisers
from vivace.machinery.technique.script import Script, literal

if TYPE_CHECKING:
    import torch

_NAMES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}


_OVERFLOWS = "fp16 overflows at 65504, which cannot be seen here, since quality is not judged"
"""A model trained in bf16 may overflow, and only real weights show it."""


class Dtype(Technique):
    name: ClassVar[str] = "dtype"
    summary: ClassVar[str] = "precision of weights and arithmetic"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.PRECISION,
        owns="dtype",
        same_picture=True,
        targetable=COMPONENTS,
        default_targets=COMPONENTS,
        saves_memory=("dtype(bf16)", "dtype(fp16)"),
        is_stored=True,
    )

    dtype: Literal["fp32", "fp16", "bf16"] = knob(tune=["fp16", "bf16"], about="fp32, fp16 or bf16")

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            arithmetic=Arithmetic(weights=f"in {self.dtype}", products=f"in {self.dtype}"),
            not_searched_unjudged=_OVERFLOWS if self.dtype == "fp16" else None,
        )

    def unsupported(self, target: Target) -> str | None:
        capability = target.machine.capability
        if self.dtype == "bf16" and target.machine.is_cuda and capability is not None and capability < (8, 0):
            has = f"{target.machine.device_name} has {capability[0]}.{capability[1]}"
            return f"bf16 needs an NVIDIA GPU of compute capability 8.0; {has}"
        for component, module in target.modules(self.targets).items() if target.pipe is not None else ():
            for layer in module.modules():
                if (own := _fixed_dtype(layer)) is not None and own != _NAMES[self.dtype]:
                    return (
                        f"the {component}'s weights are quantised, and computed in {own.removeprefix('torch.')}, which "
                        "a cast does not change; load or quantise them in the other precision, or aim it at other "
                        "components with @"
                    )
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        dtype = getattr(torch, _NAMES[self.dtype].removeprefix("torch."))
        changed: dict[str, int | float | str] = {}
        for component, module in target.modules(self.targets).items():
            others = second_denoisers(target.pipe) if component == "denoiser" else []
            num = sum(len(_other_weights(each, dtype)) for each in (module, *others))
            if num:
                for each in (module, *others):
                    _convert(each, dtype)
                changed[f"{component}.converted_parameters"] = num
        if not changed:
            raise NoEffect(f"every targeted component is {self.dtype} already", already_so=True)
        _cast_between_components(target)
        return Effect(changed=changed)

    def resume(self, target: Target) -> None:
        _cast_between_components(target)

    def script(self, target: Target) -> Script:
        dtype = _NAMES[self.dtype]
        before = _dtypes(target)
        modules = {c: module for c, module in target.modules(self.targets).items() if before[c] != {dtype}}
        is_whole = set(modules) == set(before)
        lines = [f"pipe.to({dtype})"] if is_whole else [f"{target.path(c)}.to({dtype})" for c in modules]
        lines.insert(0, "# diffusers may warn here of modules that should stay in fp32, and name none.")
        with_buffers = [target.path(c) for c, module in modules.items() if _computed_buffers(module)]
        if with_buffers and self.dtype != "fp32":
            lines = [line.format(modules=", ".join(with_buffers)) for line in _KEEP_COMPUTED] + lines
            lines += _RESTORE_COMPUTED
        exact: list[str] = []
        for component, module in modules.items():
            if parts := _parts_in_fp32(module, self.dtype):
                names = literal(sorted({name.rsplit(".", 1)[-1] for name, _ in parts}))
                exact += [line.format(module=target.path(component), names=names) for line in _KEEP_PARTS]
        if exact:
            lines = ["# Their authors keep them in fp32.", "exact = []", *exact, *lines, *_RESTORE_PARTS]
        after = before | {component: {dtype} for component in modules}
        if _differ(after) and not _differ(before):
            lines += [line.format(denoiser=target.path("denoiser")) for line in _CASTS]
        return Script(imports=("torch",), lines=tuple(lines))


# As `_convert`.
_KEEP_COMPUTED = (
    "# What a model computes for itself, such as frequencies, stays in fp32.",
    "computed = [",
    "    (layer, name, layer.get_buffer(name))",
    "    for module in ({modules},)",
    "    for layer in module.modules()",
    "    for name in layer._non_persistent_buffers_set",
    "    if getattr(layer, name) is not None",
    "]",
)
_KEEP_PARTS = (
    "exact += [",
    "    (weight, weight.data.float())",
    "    for name, layer in {module}.named_modules()",
    '    if name.rsplit(".", 1)[-1] in {names}',
    "    for weight in layer.parameters()",
    "]",
)
_RESTORE_PARTS = ["for weight, values in exact:", "    weight.data = values"]
_RESTORE_COMPUTED = ["for layer, name, buffer in computed:", "    setattr(layer, name, buffer)"]

# As `_cast_between_components`.
_CASTS = (
    "",
    "",
    "# Components of different precision: inputs are cast to a component's own. Timesteps, which",
    "# are scalars, stay as they are.",
    "dtype = {denoiser}.dtype",
    "",
    "",
    "def cast_inputs(module, args, kwargs):",
    "    def cast(value):",
    "        if isinstance(value, dict):",
    "            return {{key: cast(item) for key, item in value.items()}}",
    "        if isinstance(value, list | tuple):",
    "            return type(value)([cast(item) for item in value])",
    "        is_input = torch.is_tensor(value) and value.is_floating_point() and value.dim() > 1",
    "        return value.to(dtype) if is_input else value",
    "",
    "    return tuple(cast(value) for value in args), cast(kwargs)",
    "",
    "",
    "{denoiser}.register_forward_pre_hook(cast_inputs, with_kwargs=True)",
    "decode = pipe.vae.decode",
    "pipe.vae.decode = lambda z, *args, **kwargs: decode(z.to(pipe.vae.dtype), *args, **kwargs)",
)


def _fixed_dtype(layer: Any) -> str | None:
    """Return the dtype in which a quantised layer computes whatever its inputs; None if it casts to that of these.

    GGUF's layers name it, tensors of torchao and quanto have it; torch.ao's, whose weight is a method, compute in fp32.
    Inputs of those with weights of whole numbers (of bitsandbytes) are cast.
    """
    weight = getattr(layer, "weight", None)
    if hasattr(weight, "quant_shape"):
        return str(layer.compute_dtype)
    if weight is None or not is_quantised(layer):
        return None
    if not hasattr(weight, "is_floating_point"):
        return _NAMES["fp32"]
    return str(weight.dtype) if weight.is_floating_point() else None


def _dtypes(target: Target) -> dict[Component, set[str]]:
    """Return the floating-point dtypes of each component's parameters, as a script writes them."""
    modules = {component: target.module(component) for component in COMPONENTS}
    return {
        component: {str(p.dtype) for p in module.parameters() if p.is_floating_point()}
        for component, module in modules.items()
        if module is not None
    }


def _differ(dtypes: dict[Component, set[str]]) -> bool:
    """Whether components differ in precision; parts in fp32 inside a component of another one cast by themselves."""
    return len({frozenset(kinds - {"torch.float32"}) for kinds in dtypes.values()}) > 1


def _convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert what would be in this precision if the model were loaded in it.

    Not what it computes for itself: in bf16 a frequency is off by up to 0.4 %, and so is the angle of each position.
    """
    import torch

    computed = _computed_buffers(module)
    exact = [
        (weight, weight.data.float())
        for _, part in _parts_in_fp32(module, dtype)
        for weight in part.parameters()
        if weight.is_floating_point()
    ]
    # Not diffusers' own `to`, which warns of such parts even where there are none.
    torch.nn.Module.to(module, dtype)
    for weight, values in exact:  # as they were, not rounded and back
        weight.data = values
    for layer, name, buffer in computed:
        setattr(layer, name, buffer)


def _other_weights(module: torch.nn.Module, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """The weights that a conversion changes."""
    import torch

    parts = _parts_in_fp32(module, dtype)
    kept = {id(weight) for _, part in parts for weight in part.parameters() if weight.dtype == torch.float32}
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    return [weight for weight in weights if weight.dtype != dtype and id(weight) not in kept]


def _computed_buffers(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The buffers that are in no file, which keep their precision when a model is loaded."""
    buffers = [
        (layer, name, layer._buffers[name])
        for layer in module.modules()
        for name in sorted(layer._non_persistent_buffers_set)
    ]
    return [(layer, name, b) for layer, name, b in buffers if b is not None and b.is_floating_point()]


def _parts_in_fp32(module: torch.nn.Module, dtype: torch.dtype | str) -> list[tuple[str, torch.nn.Module]]:
    """The parts of a module, by name, that its authors keep in fp32 where it is loaded in this precision.

    transformers' first list is of what overflows in fp16 (T5's output projections); diffusers' is for bf16, too.
    """
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    is_of_transformers = hasattr(module, "_keep_in_fp32_modules_strict")
    is_fp16, is_fp32 = (
        str(dtype).rpartition(".")[2] in kinds for kinds in (("fp16", "float16"), ("fp32", "float32"))
    )
    if is_fp32:
        return []
    if is_fp16 or not is_of_transformers:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return [(name, part) for name, part in module.named_modules() if name.rsplit(".", 1)[-1] in names]


def _cast_between_components(target: Target) -> None:
    """Let denoiser, VAE and all modules that are no targets take inputs of any floating-point dtype.

    The others are ControlNets, safety checkers, encoders of images, ...; they keep their own precision.

    diffusers makes latents in the text encoder's dtype and passes them on unchanged, which fails where the next
    component has weights of another one. So inputs are cast on entry. The component is patched, never its class.
    """
    denoiser = target.module("denoiser")
    if denoiser is not None:
        if not hasattr(denoiser, "_vivace_casts_to"):
            denoiser.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        # Remembered, since diffusers looks at every module to tell the dtype: milliseconds of every step.
        denoiser._vivace_casts_to = denoiser.dtype
    modules = [target.module(component) for component in COMPONENTS]
    for part in getattr(target.pipe, "components", {}).values():
        dtype = weights_dtype(part)
        if dtype is None or any(part is module for module in modules) or hasattr(part, "_vivace_casts_to"):
            continue
        part.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        part._vivace_casts_to = dtype
    vae = target.module("vae")
    if vae is not None and not getattr(vae, "_vivace_casts", False):
        vae.decode = functools.partial(_cast_and_decode, vae, vae.decode)
        vae._vivace_casts = True


def _cast_and_decode(vae: Any, decode: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
    return decode(z.to(vae.dtype), *args, **kwargs)  # SDXL's pipeline changes it between calls


def _cast_inputs(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    dtype = cast("torch.dtype", module._vivace_casts_to)
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        # Timesteps are scalars; the embedding that takes them casts by itself.
        return value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [_cast(v, dtype) for v in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
