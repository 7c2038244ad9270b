"""One matmul for query, key and value instead of three; in cross-attention one for key and value.

Why: a wider matmul uses the GPU better, reads its input once instead of three times, and is a single launch. It helps
    most where matmuls are small: low resolution, batch 1, weights that are dequantised in each call.
Costs: wider matmuls sum in another order, so the last bits differ. The separate weights are deleted, so LoRAs must be
    loaded before. While a UNet is being fused, its attention weights exist twice.
Needs: diffusers attention layers (SD, SDXL, FLUX, their VAEs); a tiny VAE has none.
Source: diffusers, `fuse_qkv_projections`; Megatron-LM, arXiv 1909.08053 (one fused projection per layer).

diffusers keeps the separate weights as well, so that fusing can be undone: a quarter more memory for a UNet, and
quantisation would quantise both. Here they are deleted.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.architectures import family_of
from vivace.errors import NoEffect
from vivace.machinery.quantization.layers import is_quantised
from vivace.machinery.technique import (
    Arithmetic,
    Effect,
    Facts,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
)
from vivace.machinery.technique.pipeline_code import replaces_processors
from vivace.machinery.technique.script import Script

_REPLACED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
# Processors with an equivalent fused form. diffusers would replace any other processor with that form, too.
_PLAIN = {"AttnProcessor", "AttnProcessor2_0", "JointAttnProcessor2_0"}


class FuseQkv(Technique):
    name: ClassVar[str] = "fuse_qkv"
    summary: ClassVar[str] = "one matmul for query, key and value"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.FUSE,
        owns="attention projections",
        same_picture=True,
        targetable=("denoiser", "vae"),
        default_targets=("denoiser", "vae"),
        arithmetic=Arithmetic(
            weights="as before, three fused into one", products="as before, one instead of three"
        ),
        provides=frozenset({Trait.PROJECTIONS_FUSED}),
        is_stored=True,
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        if "denoiser" in self.targets and replaces_processors(target.pipe):
            return (
                f"{type(target.pipe).__name__} replaces attention processors of the denoiser in each call, by ones "
                "that need separate projections; leave fuse_qkv out, or aim it at the VAE alone: fuse_qkv@vae"
            )
        for component, module in target.modules(self.targets).items():
            family = family_of(module)
            asks_apart = family is not None and family.projects_apart
            for attention in _attentions(module):
                if _is_fused(attention):
                    continue
                kind = type(attention.processor).__name__
                has_fused_form = hasattr(attention, "_supports_qkv_fusion") or kind in _PLAIN
                if not has_fused_form or asks_apart:
                    advice = "remove adapters first" if "Adapter" in kind else "leave fuse_qkv out"
                    return (
                        f"the {component}'s attention is computed by {kind}, which has no fused form in diffusers; "
                        f"{advice}, or target another component with @"
                    )
                if kind == "JointAttnProcessor2_0" and attention.norm_q is not None:
                    return (
                        f"diffusers' fused attention leaves out the norms of query and key that this {component} has, "
                        "and would draw another image; target another component with @"
                    )
                if any(is_quantised(layer) for layer in _separate(attention)):
                    return (
                        f"the {component}'s projections are quantised, and quantised weights cannot be fused"
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
                module.fuse_qkv_projections()  # also replaces the processors
            for attention in separate:
                # One by one, so that only one layer's weights exist twice.
                if hasattr(type(attention), "_supports_qkv_fusion"):
                    attention.fuse_projections()
                _drop_replaced(attention)
            num = sum(1 for attention in separate if _is_fused(attention))
            if num:
                changed[f"{component}.fused_attentions"] = num
        if not changed:
            if num_fused_before:
                raise NoEffect("the projections are fused already", already_so=True)
            raise NoEffect(f"no attention that diffusers can fuse in {', '.join(self.targets)}")
        return Effect(changed=changed)

    def rebuild(self, target: Target, changed: Facts) -> None:
        self.apply(target)

    def script(self, target: Target) -> Script:
        separate = [
            component
            for component, module in target.modules(self.targets).items()
            if any(not _is_fused(attention) for attention in _attentions(module))
        ]
        return Script(
            lines=(
                "# diffusers keeps the separate weights as well; vivace deletes them to save memory.",
                *(f"{target.path(component)}.fuse_qkv_projections()" for component in separate),
            )
        )


def _attentions(module: Any) -> list[Any]:
    """Return the module's attention layers that diffusers can fuse."""
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


def _drop_replaced(attention: Any) -> None:
    for fused, replaced in _REPLACED.items():
        if hasattr(attention, fused):
            for name in replaced:
                if getattr(attention, name, None) is not None:
                    delattr(attention, name)
