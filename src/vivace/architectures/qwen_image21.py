"""Qwen-Image 2.1: one stream of text and image, the image last, in blocks that share one modulation.

Attention is causal over the text and whole over the image, and the text is modulated by a timestep of 0. So the text's
keys and values are the same in each step: the pipeline keeps those of the first one, whose blocks get text and image,
and gives later ones the image alone. The tokens of this family are therefore the image's, and a step cache leaves the
text's to the first step. Guidance, if any, is a second call with a negative prompt.
Source: diffusers, QwenImage21Transformer2DModel, QwenImage21Pipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, Handle, Handles, Note


def _modulated(block: Any, tokens: Any, call: Arguments) -> Any:
    kwargs = call[1]
    first, _ = kwargs["modulation"].chunk(2, dim=-1)
    return block._modulate(block.img_norm1(tokens), first, kwargs["target_token_mask"])[0]


def _image_starts_at(call: Arguments) -> int:
    """Return where the image starts: behind the tokens whose keys and values the first step keeps."""
    kept = call[1]["cache_write_slice"]
    return 0 if kept is None else int(kept.stop)


def _grid(_: Any, call: Arguments) -> tuple[int, int]:
    """Return the grid; images to be edited come before the generated one."""
    _, rows, columns = call[1]["img_shapes"][0][-1]
    return rows, columns


class _Image:
    """Counts the image's tokens, which come last."""

    def __init__(self, transformer: Any) -> None:
        self.count = 0
        self.hook = transformer.pos_embed.register_forward_pre_hook(self._note)

    def _note(self, _: Any, args: tuple[Any, ...]) -> None:
        self.count = math.prod(args[0][-1])


def _entering(transformer: Any, note: Note) -> Handle:
    embedded: list[Any] = []
    hook = transformer.img_in.register_forward_hook(lambda _, __, output: embedded.append(output))

    def enters(_: Any, args: tuple[Any, ...]) -> None:
        note(embedded.pop()[:, -math.prod(args[0][-1]) :])

    return Handles((hook, transformer.pos_embed.register_forward_pre_hook(enters)))


def _leaving(transformer: Any, note: Note) -> Handle:
    image = _Image(transformer)
    hook = transformer.norm_out.register_forward_pre_hook(lambda _, args: note(args[0][:, -image.count :]))
    return Handles((image.hook, hook))


def _not_captured(transformer: Any) -> str:
    """Return why no graph is captured: only a fused forward computes later steps apart, which read nothing back."""
    if hasattr(transformer.forward, "later_step"):
        return ""
    return "its transformer reads back from the GPU where the image's tokens are"


QWEN_IMAGE21 = Family(
    name="Qwen-Image 2.1",
    denoiser="QwenImage21Transformer2DModel",
    pipelines=("QwenImage21Pipeline",),
    embeddings={"QwenImage21Pipeline": ("prompt_embeds", "prompt_embeds_mask", None)},
    not_by_diffusers="it does not know what they return",
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=_entering,
        leaving=_leaving,
        modulated=_modulated,
        grid=_grid,
        text=None,
        image_starts_at=_image_starts_at,
    ),
    text_in_first_step_alone=True,
    text_of_any_length=True,
    not_captured=_not_captured,
    last_text_state={"QwenImage21Pipeline": -1},
    cells=lambda _: 1,
    side_in_tokens=2,
)
