"""Krea 2: one stream of text and image, the text first and padded, in blocks that share one modulation.

The states of twelve layers of a language model are fused inside the transformer, in each step. Guidance is a second
call with a negative prompt, at any scale above 0. Source: diffusers, Krea2Transformer2DModel, Krea2Pipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, input_of, output_of


def _modulated(block: Any, tokens: Any, call: Arguments) -> Any:
    shared = call[0][1]
    modulation = shared.unflatten(-1, (6, -1)) + block.scale_shift_table
    scale, shift = modulation.unbind(-2)[:2]
    return (1.0 + scale) * block.norm1(tokens) + shift


def _grid(_: Any, call: Arguments) -> tuple[int, int]:
    """Return the grid; its last token is that of the last row and column.

    Raises:
        ValueError: the positions are not those of a whole image.
    """
    kwargs = call[1]
    rows, columns = (int(place) + 1 for place in kwargs["position_ids"][-1, 1:])
    count = kwargs["hidden_states"].shape[1]
    if rows * columns != count:
        raise ValueError(f"the positions of the {count} image tokens are not those of an image, row by row")
    return rows, columns


KREA2 = Family(
    name="Krea 2",
    denoiser="Krea2Transformer2DModel",
    pipelines=("Krea2Pipeline",),
    embeddings={"Krea2Pipeline": ("prompt_embeds", "prompt_embeds_mask")},
    second_call_above=0.0,
    not_by_diffusers="it has no enable_cache",
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=output_of("img_in"),
        leaving=input_of("final_layer"),
        modulated=_modulated,
        grid=_grid,
        text=None,
        outside="the fusion of the text's states",
    ),
)
