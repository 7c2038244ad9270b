"""Weights stored in fp8, and cast layer by layer when they are used.

Why: half the memory of fp16 on any device that can cast, with or without tensor cores for fp8. It needs nothing but
    diffusers.
Costs: rounding to 3 bits of mantissa (e4m3) without scales: weights below 0.016 lose bits one by one, and those below
    0.001 become zero. int8 with a scale per row is closer to the original at the same size. Each call casts each layer
    to full precision and back, so it is slower, and `compile` gains little: its graph breaks at each layer.
Needs: Linear and convolution layers. Norms (in FLUX with their modulation, a quarter of its weights), embeddings, and
    layers that a model's authors keep in fp32 (T5's output projections) stay as they are.
Source: diffusers, `enable_layerwise_casting`; Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.quantization.layers import is_quantised, layers_of
from vivace.machinery.technique import (
    TEXT_ENCODERS,
    Arithmetic,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
)
from vivace.machinery.technique.script import Script, literal, written_call

if TYPE_CHECKING:
    import torch


class LayerwiseCasting(Technique):
    name: ClassVar[str] = "layerwise_casting"
    summary: ClassVar[str] = "weights stored in fp8, cast when they are used"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.QUANTIZE,
        owns="weights",
        same_picture=True,
        targetable=("denoiser", *TEXT_ENCODERS),
        default_targets=("denoiser",),
        arithmetic=Arithmetic(weights="in fp8 (e4m3), without scales"),
        provides=frozenset({Trait.HOOKED}),
    )

    def unsupported(self, target: Target) -> str | None:
        if target.machine.backend == "mps":
            return "PyTorch has no fp8 on Apple's GPUs; quantize(int8) stores weights in eight bits too"
        if target.pipe is None:
            return None
        for component, module in target.modules(self.targets).items():
            if any(is_quantised(layer) for layer in layers_of(module).values()):
                return f"the {component}'s weights are quantised already, and cannot be stored in fp8 as well"
        return None

    def apply(self, target: Target) -> Effect:
        import torch
        from diffusers.hooks import apply_layerwise_casting

        stored = torch.float8_e4m3fn
        changed: dict[str, int | float | str] = {}
        num_before = 0
        for component, module in target.modules(self.targets).items():
            before = _num_stored(module, stored)
            num_before += before
            if before:
                continue
            apply_layerwise_casting(
                module,
                storage_dtype=stored,
                compute_dtype=module.dtype,
                skip_modules_pattern=_skipped_patterns(module),
                # Pipelines make latents in a text encoder's dtype, which is that of its embeddings.
                skip_modules_classes=(torch.nn.Embedding,),
            )
            num = _num_stored(module, stored)
            if num:
                changed[f"{component}.parameters_in_fp8"] = num
                changed[f"{component}.parameters_left_alone"] = (
                    sum(parameter.numel() for parameter in module.parameters()) - num
                )
        if not changed:
            if num_before:
                raise NoEffect("the weights are stored in fp8 already", already_so=True)
            raise NoEffect("no Linear or convolution layer to store in fp8")
        modules = target.modules(self.targets)

        def evidence() -> dict[str, int | float | str]:
            return {
                f"{c}.parameters_in_fp8_now": _num_stored(module, stored) for c, module in modules.items()
            }

        def refuted(_: dict[str, Any]) -> str | None:
            lost = [
                component
                for component, module in modules.items()
                if f"{component}.parameters_in_fp8" in changed and not _num_stored(module, stored)
            ]
            return f"nothing of {', '.join(lost)} is stored in fp8 any more" if lost else None

        return Effect(changed=changed, evidence=evidence, refuted=refuted)

    def script(self, target: Target) -> Script:
        import torch

        lines = ["# Embeddings stay as they are: pipelines make latents in a text encoder's dtype."]
        for component, module in target.modules(self.targets).items():
            if not _num_stored(module, torch.float8_e4m3fn):
                lines += written_call(
                    "apply_layerwise_casting",
                    target.path(component),
                    storage_dtype="torch.float8_e4m3fn",
                    compute_dtype=str(module.dtype),
                    skip_modules_pattern=literal(tuple(dict.fromkeys(_skipped_patterns(module)))),
                    skip_modules_classes="(torch.nn.Embedding,)",
                ).splitlines()
        return Script(imports=("torch", "diffusers.hooks:apply_layerwise_casting"), lines=tuple(lines))


def _skipped_patterns(module: torch.nn.Module) -> tuple[str, ...]:
    """Return patterns of layers that keep their precision: diffusers' own, and those that the model's authors name.

    T5 casts the inputs of its output projections to the dtype of their weights.
    """
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    own = [
        getattr(module, name, None) or ()
        for name in ("_keep_in_fp32_modules", "_skip_layerwise_casting_patterns")
    ]
    return (*DEFAULT_SKIP_MODULES_PATTERN, *own[0], *own[1])


def _num_stored(module: torch.nn.Module, dtype: torch.dtype) -> int:
    """Return the number of parameters of this dtype."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dtype == dtype)
