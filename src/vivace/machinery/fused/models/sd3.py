"""Stable Diffusion 3.5's transformer over fused weights: double blocks alone, without a rotary embedding.

Positions are learned, and added where the image is cut into patches. Of Medium some blocks have a second attention,
over the image alone. In the last block the text is attended to, and goes no further. Guidance is a part of the batch.
Source: diffusers, SD3Transformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from vivace.errors import Unsupported
from vivace.machinery.fused.block_weights import BlockLayers, FusedArchitecture, projections
from vivace.machinery.fused.calls import cast_inputs, cast_last, refuse_controlnet, refuse_extras
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstBlock, FirstNorm, HoistedBlocks, HoistedForward

_GUIDED = 2
"""Rows of a batch for one image, with guidance."""


def _double(block: Any) -> BlockLayers:
    attn = block.attn
    streams = [(attn.to_out[0], block.ff.net)]
    if not block.context_pre_only:
        streams.insert(0, (attn.to_add_out, block.ff_context.net))
    return BlockLayers(
        qkv=[projections(attn, "text"), projections(attn, "image")],
        out=[[out] for out, _ in streams],
        up=[[mlp[0].proj] for _, mlp in streams],
        down=[[mlp[2]] for _, mlp in streams],
        norms=[(attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)],
    )


def _second(block: Any) -> BlockLayers | None:
    attn = block.attn2
    if attn is None:
        return None
    return BlockLayers(
        qkv=[projections(attn, "image")],
        out=[[attn.to_out[0]]],
        up=None,
        down=None,
        norms=[(attn.norm_q, attn.norm_k)],
    )


def _modulations(block: Any) -> list[Any]:
    return [block.norm1.linear, block.norm1_context.linear]


def _order(block: Any) -> list[int | None]:
    """The image's six vectors, those of its second attention, then the text's; of the last block scale and shift."""
    own = [*range(6)]
    second = [*range(6, 9)] if block.use_dual_attention else []
    text = len(own) + len(second)
    of_text: list[int | None] = [*range(text, text + 6)]
    if block.context_pre_only:
        of_text = [text + 1, text, None, None, None, None]
    return [*own, *of_text, *second]


SD3 = FusedArchitecture("gelu", double=_double, modulations=_modulations, second=_second, order=_order)


class Sd3Forward(HoistedForward):
    """Replaces a transformer's forward; patches and positions, the embedders, the last norm and projection stay
    diffusers'."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        timestep: torch.Tensor,
        block_controlnet_hidden_states: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        skip_layers: Sequence[int] | None = None,
    ) -> Any:
        refuse_controlnet(block_controlnet_hidden_states)
        if skip_layers:
            raise Unsupported(
                "fused: every fused block is computed, and this call skips some (skip_guidance_layers); "
                "leave fused out, or call without skip-layer guidance"
            )
        refuse_extras(joint_attention_kwargs)
        transformer, dtype = self._transformer, hidden_states.dtype
        image = transformer.pos_embed(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        conditions, embedding = self.inputs_of(timestep, None, pooled_projections, dtype)
        modulations = self._modulations(conditions, embedding)
        image = self._blocks(text, image, self._no_rope(text, image), modulations)
        image = self._predicted(image, embedding, dtype)
        image = self._unpatched(image, *hidden_states.shape[-2:])
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self, timestep: torch.Tensor, _: None, pooled: torch.Tensor, __: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the modulations' table is searched for (batch, inputs), and the embeddings (batch, channels)."""
        pooled = pooled.bfloat16()
        conditions = torch.cat([timestep[:, None].float(), pooled.float()], dim=1)
        return conditions, self._transformer.time_text_embed(timestep, pooled)

    def _no_rope(self, text: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (text.shape[1] + image.shape[1], self._transformer.config.attention_head_dim // 2)
        sines = image.new_zeros(shape, dtype=torch.float32)
        return sines + 1, sines

    def _unpatched(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        side = self._transformer.config.patch_size
        parts = patches.unflatten(-1, (side, side, -1)).unflatten(1, (height // side, width // side))
        return parts.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def _unsuited(transformer: Any) -> str | None:
    if transformer.config.qk_norm != "rms_norm":
        return (
            "this transformer does not normalise its queries and keys (qk_norm), as Stable Diffusion 3's does not, and "
            "the fused kernels bound them by their norms; they are made for 3.5"
        )
    last = len(transformer.transformer_blocks) - 1
    if any(block.context_pre_only != (at == last) for at, block in enumerate(transformer.transformer_blocks)):
        return "the fused blocks end the text in the last block alone, and this transformer's do so elsewhere"
    return None


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    cast_inputs(cast_last, transformer.pos_embed, transformer.context_embedder, transformer.time_text_embed)
    num_inputs = 1 + transformer.config.pooled_projection_dim
    fused = HoistedBlocks(transformer, SD3, num_inputs, how, _GUIDED)
    transformer.transformer_blocks.append(FirstBlock(FirstNorm(fused.modulations)))
    return fused.hoist(transformer, pipe, Sd3Forward(transformer, fused), whole=1)


FORM = FusedForm(("transformer_blocks",), _fuse, _unsuited)
