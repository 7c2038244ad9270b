"""The processor of a language model that sees, without vocabulary files: hashed text, and real patches of images.

Replaces Qwen2VLProcessor in pipelines with random weights. An image becomes patches as it does when published, so that
the vision tower and the language model get as many tokens: 5,476 patches and 1,369 tokens of a megapixel.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from vivace.models.hashed_chat_tokenizer import IMAGE_MARK, Encoded, HashedChatTokenizer, Message, text_of
from vivace.models.quiet import quiet

_MIN_PIXELS, _MAX_PIXELS = 3136, 12_845_056
"""Limits of the preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen-Image-Edit."""


@dataclass
class HashedProcessor:
    """Replaces Qwen2VLProcessor or Qwen3VLProcessor in a pipeline.

    Attributes:
        tokenizer: of the same model.
        images: makes patches of images, as transformers does.
        place: the id of an image's token, whose embedding the vision tower replaces.
        merged: patches that make one token.
    """

    tokenizer: HashedChatTokenizer
    images: Any
    place: int
    merged: int

    def __call__(self, *, text: list[str], images: Any = None, padding: bool = False, **_: Any) -> Encoded:
        """Return the ids and mask of texts (texts, tokens), and of images the patches and their grids.

        Each `<|image_pad|>` of a text becomes the tokens of the next image.
        """
        import torch

        processed = {} if images is None else dict(self.images(images=images, return_tensors="pt"))
        counts = iter([int(grid.prod()) // self.merged for grid in processed.get("image_grid_thw", ())])
        rows = [self._ids(line, counts) for line in text]
        width = max(len(row) for row in rows) if padding else 0
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        rows = [row + [self.tokenizer.padding] * (width - len(row)) for row in rows]
        return Encoded(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), **processed)

    def apply_chat_template(
        self, messages: list[Message], *, tokenize: bool = True, return_dict: bool = True, **_: Any
    ) -> list[list[int]]:
        """Return the ids of a conversation that still awaits its reply, as the only one of a list.

        Qwen-Image 2.1 asks for the length of its first turn.
        """
        assert tokenize
        assert not return_dict
        turns = "".join(f"<|im_start|>{m['role']}\n{text_of(m)}<|im_end|>\n" for m in messages)
        return [self.tokenizer.encode(turns)]

    def _ids(self, text: str, counts: Any) -> list[int]:
        words = self.tokenizer.tokenize(text)
        ids = self.tokenizer.encode(text)
        return [
            token
            for word, id_ in zip(words, ids, strict=True)
            for token in ([self.place] * next(counts) if word == IMAGE_MARK else [id_])
        ]


def with_processor(pipeline: type, parts: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline's components with the processor that it takes, if it takes one.

    Args:
        pipeline: its class.
        parts: has the text encoder and its tokenizer.
    """
    accepted = inspect.signature(pipeline.__init__).parameters  # type: ignore[misc]
    if "processor" not in accepted:
        return parts
    with quiet():
        import transformers

    # Without torchvision the usual name is that of the other one, with a warning.
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    config = parts["text_encoder"].config
    vision = config.vision_config
    images = kind(
        min_pixels=_MIN_PIXELS,
        max_pixels=_MAX_PIXELS,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
    )
    processor = HashedProcessor(
        parts["tokenizer"], images, config.image_token_id, vision.spatial_merge_size**2
    )
    # Qwen-Image 2.1 takes the tokenizer in its processor alone.
    return {name: part for name, part in parts.items() if name in accepted} | {"processor": processor}
