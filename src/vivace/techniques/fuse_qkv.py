"""One matrix product for query, key and value instead of three; in cross-attention one for key and value.

Why: a wider product fills the GPU better, reads its input once instead of three times, and is one launch. It helps
    most where products are small: low resolution, batch 1, weights that are quantised when they are used.
Costs: wider products are summed in another order, so the last bits differ. The separate weights are given up, so a LoRA
    that is loaded later finds no place: load it before. While a UNet is fused, its attention weights exist twice.
Needs: attention as diffusers builds it (SD, SDXL, FLUX, their VAEs); a tiny VAE has none.
Source: diffusers, `fuse_qkv_projections`; Megatron-LM, arXiv 1909.08053 (one fused projection per layer).

diffusers keeps the separate weights beside the fused ones, to be able to undo it: a quarter more memory for a UNet,
and whatever quantises later would quantise both. Here they are dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.contract import Arithmetic, Component, Effect, Stage, Target, Technique
from vivace.contract.script import Script
from vivace.errors import NoEffect
from vivace.quantization.layers import is_quantised

_REPLACED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
# Processors that have a fused form which computes the same. diffusers would put that form in any other's place, too.
_PLAIN = {"AttnProcessor", "AttnProcessor2_0", "JointAttnProcessor2_0"}


class FuseQkv(Technique):
    name: ClassVar[str] = "fuse_qkv"
    summary: ClassVar[str] = "one product for query, key and value"
    stage: ClassVar[Stage] = Stage.FUSE
    owns: ClassVar[str] = "attention projections"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser", "vae")
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser", "vae")

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(weights="as before, three in one", products="as before, one for three")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        for component, module in target.modules(self.targets).items():
            for attention in _attentions(module):
                if _is_fused(attention):
                    continue
                kind = type(attention.processor).__name__
                if not hasattr(attention, "_supports_qkv_fusion") and kind not in _PLAIN:
                    return (
                        f"the {component}'s attention is computed by {kind}, which has no fused form in diffusers; "
                        "take adapters off first, or aim it elsewhere with @"
                    )
                if any(is_quantised(layer) for layer in _separate(attention)):
                    return (
                        f"the {component}'s projections are quantised, and quantised weights cannot be merged"
                    )
        return None

    def apply(self, target: Target) -> Effect:
        changed: dict[str, int | float | str] = {}
        num_fused_before = 0
        for component, module in target.modules(self.targets).items():
            attentions = _attentions(module)
            separate = [attention for attention in attentions if not _is_fused(attention)]
            num_fused_before += len(attentions) - len(separate)
            if separate and not hasattr(type(separate[0]), "_supports_qkv_fusion"):
                module.fuse_qkv_projections()  # also exchanges the processors
            for attention in separate:
                # One after the other, so that only one attention's weights are there twice.
                if hasattr(type(attention), "_supports_qkv_fusion"):
                    attention.fuse_projections()
                _drop_replaced(attention)
            num = sum(1 for attention in separate if _is_fused(attention))
            if num:
                changed[f"{component}.fused_attentions"] = num
        if not changed:
            if num_fused_before:
                raise NoEffect("the projections are fused already", already_so=True)
            raise NoEffect(f"no attention with separate projections in {', '.join(self.targets)}")
        return Effect(changed=changed)

    def script(self, target: Target) -> Script:
        separate = [
            component
            for component, module in target.modules(self.targets).items()
            if any(not _is_fused(attention) for attention in _attentions(module))
        ]
        return Script(
            lines=(
                "# The separate weights stay beside the fused ones; vivace drops them to save their memory.",
                *(f"{target.path(component)}.fuse_qkv_projections()" for component in separate),
            )
        )


def _attentions(module: Any) -> list[Any]:
    """The module's attentions that diffusers can fuse."""
    if not hasattr(module, "fuse_qkv_projections"):
        return []
    return [
        part
        for part in module.modules()
        if hasattr(part, "fuse_projections") and getattr(part, "_supports_qkv_fusion", True)
    ]


def _is_fused(attention: Any) -> bool:
    return any(hasattr(attention, fused) for fused in _REPLACED)


def _separate(attention: Any) -> list[Any]:
    names = {name for replaced in _REPLACED.values() for name in replaced}
    return [layer for name in names if (layer := getattr(attention, name, None)) is not None]


def _is_quantised(layer: Any) -> bool:
    return hasattr(layer.weight, "__tensor_flatten__")


def _drop_replaced(attention: Any) -> None:
    for fused, replaced in _REPLACED.items():
        if hasattr(attention, fused):
            for name in replaced:
                if getattr(attention, name, None) is not None:
                    delattr(attention, name)
