"""Qwen-Image 2.1's transformer over fused weights: see `vivace.machinery.fused.qwen_image21_blocks`.

diffusers' forward waits for the GPU five times to learn where the image's tokens are, and writes the position of each
token on the host. A step after the first needs none of that: its tokens are the image's, and their positions and mask
are kept with the keys and values. So it goes from the embedder to the blocks at once, and can be captured as a CUDA
graph, which the first step cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from vivace.machinery.fused.casts import cast_last
from vivace.machinery.fused.causal_prefix import Prefix, Tables
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.operations import Places
from vivace.machinery.fused.qwen_image21_blocks import CausalChain


class QwenImage21Forward:
    """Replaces a transformer's forward; arguments and result are those of diffusers'.

    Args:
        chain: its blocks.

    Attributes:
        later_step: computes a step after the first, see `_later_step`; what captures it may take its place.
    """

    def __init__(self, transformer: Any, chain: CausalChain) -> None:
        self._transformer, self._chain = transformer, chain
        self.later_step: Callable[..., torch.Tensor] = self._later_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transformer = self._transformer
        cache = kwargs.get("kv_cache")
        prefix = None if cache is None else cache.get_layer(0).k
        # Step caches learn of the image's tokens from the module of positions, which diffusers' forward calls.
        is_watched = bool(transformer.pos_embed._forward_pre_hooks)
        if args or is_watched or kwargs.get("kv_cache_mode") != "cached" or prefix is None:
            return type(transformer).forward(transformer, *args, **kwargs)
        latents = kwargs["hidden_states"][:, -math.prod(kwargs["img_shapes"][0][-1]) :]
        kept = prefix.length, prefix.rope, prefix.mask, prefix.keys, prefix.values
        image = self.later_step(latents, kwargs["timestep"], *kept)
        return Transformer2DModelOutput(sample=image) if kwargs.get("return_dict", True) else (image,)

    def _later_step(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        length: int,
        rope: Tables,
        mask: torch.Tensor | None,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return what a step predicts of the image, (batch, tokens, channels).

        Args:
            latents: (batch, tokens, channels), of the image alone.
            length, rope, mask, keys, values: see `Prefix`.
        """
        transformer = self._transformer
        image = transformer.img_in(latents)
        times = timestep.to(image.dtype)
        embedding = transformer.time_text_embed(torch.cat([times, times.new_zeros(1)]), image)
        prefix = Prefix(length, None, rope, mask, keys=keys, values=values)
        image = self._chain.compute(image, transformer.modulation(embedding), prefix, is_still=True)
        made: torch.Tensor = transformer.proj_out(transformer.norm_out(image, embedding[:-1]))
        return made


def fuse_qwen_image21(
    transformer: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> CausalChain:
    """Replace a transformer's blocks by a chain, the only element of their list, and its forward.

    Args:
        quantize: store weights in e4m3, with one scale for each; else in bf16.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.
        places: where the model computes, and where its weights are kept.
    """
    name_layers(transformer)
    for layer in (transformer.img_in, transformer.txt_in):
        layer.register_forward_pre_hook(cast_last)
    num_heads = transformer.config.num_attention_heads
    chain = CausalChain([*transformer.transformer_blocks], num_heads, quantize, bounded, places)
    transformer.transformer_blocks = nn.ModuleList([chain.eval().requires_grad_(False)])
    transformer.forward = QwenImage21Forward(transformer, chain)
    return chain
