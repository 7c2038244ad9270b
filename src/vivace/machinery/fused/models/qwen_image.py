"""Qwen-Image's transformer over fused weights: double blocks alone, each with modulations of its own, MLPs have GELU.

Its modulations depend on the timestep alone, and hold 6.8 of its 20.4 billion weights. With attention in fp8 a text is
padded to one of a few lengths, so that new prompts need no new plans and graphs: it comes behind the image, and
attention leaves its last tokens out. In a batch, attention gets the pipeline's mask and is computed in bf16. Tokens of
images to be edited come after the image's own; in Qwen-Image-Edit-2511 they are modulated by a timestep of 0.
Source: diffusers, QwenImageTransformer2DModel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from vivace.errors import Unsupported
from vivace.machinery.attention_backends.cudnn_fp8 import takes_padding
from vivace.machinery.compilation.prompt_lengths import padded_length
from vivace.machinery.fused.block_weights import BlockLayers, FusedArchitecture, projections
from vivace.machinery.fused.calls import cast_inputs, cast_last, refuse_controlnet, refuse_extras
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstModulation, HoistedBlocks, HoistedForward
from vivace.machinery.fused.modulations import OF_DOUBLE, Modulations


# The image is the first stream, the text the second.
def _double(block: Any) -> BlockLayers:
    attn, text, image = block.attn, block.txt_mlp.net, block.img_mlp.net
    return BlockLayers(
        qkv=[projections(attn, "image"), projections(attn, "text")],
        out=[[attn.to_out[0]], [attn.to_add_out]],
        up=[[image[0].proj], [text[0].proj]],
        down=[[image[2]], [text[2]]],
        norms=[(attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)],
    )


def _modulations(block: Any) -> list[Any]:
    return [block.txt_mod[1], block.img_mod[1]]


QWEN_IMAGE = FusedArchitecture("gelu", _double, modulations=_modulations, text_last=True)


class QwenImageFirstBlock(nn.Module):
    """Replaces the first block: its norm, by whose output step caches decide, and nothing else."""

    def __init__(self, modulations: Modulations, norm: nn.Module) -> None:
        super().__init__()
        self.img_mod = FirstModulation(modulations, OF_DOUBLE // 2, layer=1)  # the text's is the first
        self.img_norm1 = norm

    def _modulate(
        self, normed: torch.Tensor, vectors: torch.Tensor, index: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = vectors[:, None]
        if index is not None:
            moving, still = vectors.chunk(2)
            vectors = torch.where(index[..., None] == 0, moving, still)
        shift, scale, gate = vectors.chunk(3, dim=-1)
        return normed * (1 + scale) + shift, gate


class QwenImageForward(HoistedForward):
    """Replaces a transformer's forward; the embedders, positions, the last norm and projection stay diffusers'."""

    def __init__(self, transformer: Any, fused: HoistedBlocks, pads: bool) -> None:
        super().__init__(transformer, fused)
        self.pads = pads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **(kwargs if args else self.padded(kwargs)))

    def padded(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments with the text padded to one of a few lengths, and the number of tokens in front of
        the padding; as they are where that is not done, as in a batch with a mask of its own."""
        if not self.pads or call.get("encoder_hidden_states_mask") is not None or "num_keys" in call:
            return call
        text, num_image = call["encoder_hidden_states"], call["hidden_states"].shape[1]
        batch, length, _ = text.shape
        num_keys = torch.full((batch,), num_image + length, dtype=torch.int32, device=text.device)
        more = padded_length(length) - length
        padded = nn.functional.pad(text, (0, 0, 0, more))
        return call | {"encoder_hidden_states": padded, "num_keys": num_keys}

    def compute(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_shapes: Any = None,
        guidance: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        additional_t_cond: Any = None,
        return_dict: bool = True,
        num_keys: torch.Tensor | None = None,
    ) -> Any:
        refuse_controlnet(controlnet_block_samples)
        for name, value in (("guidance", guidance), ("additional_t_cond", additional_t_cond)):
            if value is not None:
                raise Unsupported(f"fused: Qwen-Image's fused forward takes no {name}; leave fused out")
        assert timestep is not None
        refuse_extras(attention_kwargs)
        transformer, dtype = self._transformer, hidden_states.dtype
        image = transformer.img_in(hidden_states)
        text = transformer.txt_in(transformer.txt_norm(encoder_hidden_states))
        num_still = self._num_still(img_shapes, len(image))
        times = torch.cat([timestep, timestep * 0]) if num_still else timestep
        conditions, embedding = self.inputs_of(times, None, None, dtype)
        modulations = self._modulations(conditions, embedding)
        rope = self._rope(img_shapes, text)
        mask = self._mask(encoder_hidden_states_mask, image)
        image = self._blocks(image, text, rope, modulations, mask, num_still, num_keys)
        image = self._predicted(image, embedding[: len(image)], dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self, timestep: torch.Tensor, _: None, __: None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the table of modulations (batch, 1), and the embeddings (batch, channels)."""
        timestep = timestep.to(dtype)
        like = timestep.new_empty(0, dtype=torch.bfloat16)
        return timestep[:, None].float(), self._transformer.time_text_embed(timestep, like)

    def _num_still(self, img_shapes: Any, batch: int) -> int:
        """Return the tokens of images to be edited, if they are modulated by a timestep of 0."""
        if not self._transformer.config.zero_cond_t or len(img_shapes[0]) == 1:
            return 0
        if batch > 1:
            raise Unsupported(
                "fused: the fused blocks of a transformer that modulates images to be edited by a timestep of 0 "
                "(Qwen-Image-Edit-2511's) draw one image at a time; call once for each prompt, or leave fused out"
            )
        return sum(math.prod(shape) for shape in img_shapes[0][1:])

    def _rope(self, img_shapes: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_image, of_text = self._transformer.pos_embed(
            img_shapes, max_txt_seq_len=text.shape[1], device=text.device
        )
        angles = torch.cat([of_image, of_text])
        return angles.real.contiguous(), angles.imag.contiguous()

    def _mask(self, of_text: torch.Tensor | None, image: torch.Tensor) -> torch.Tensor | None:
        if of_text is None:
            return None
        of_image = of_text.new_ones(image.shape[:2], dtype=torch.bool)
        return torch.cat([of_image, of_text.bool()], dim=1)


def _unsuited(transformer: Any) -> str | None:
    if transformer.config.use_additional_t_cond:
        return "this transformer adds a condition to the timestep (use_additional_t_cond), which fused does not know"
    return None


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    cast_inputs(cast_last, transformer.img_in, transformer.txt_norm)
    first = transformer.transformer_blocks[0].img_norm1
    fused = HoistedBlocks(transformer, QWEN_IMAGE, 1, how)
    transformer.transformer_blocks.append(QwenImageFirstBlock(fused.modulations, first))
    pads = all(how.bounded) and takes_padding()
    forward = QwenImageForward(transformer, fused, pads)
    return fused.hoist(transformer, pipe, forward, reads_text=False, with_zero=transformer.config.zero_cond_t)


FORM = FusedForm(("transformer_blocks",), _fuse, _unsuited)
