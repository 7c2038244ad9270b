"""A second witness beside CLIP: a model that reads image and prompt together.

CLIP turns image and prompt into one vector each, without seeing the other; much of an image is lost on the way (which
object has which colour, what is left of what). BLIP's matching head (Li et al. 2022, arXiv 2201.12086) lets every word
of the prompt attend to the image's patches and answers one question: do they belong together? It was trained on other
data than OpenAI's CLIP, so the two rarely err alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.errors import UnknownModel


class Witness:
    """Any BLIP model for image-text matching in a local folder (transformers' format, safetensors only)."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, BlipForImageTextRetrieval

        try:
            model, loading = BlipForImageTextRetrieval.from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            images = AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, backend="pil", trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            lines = str(error).strip().splitlines()
            raise UnknownModel(
                f"{folder} does not load as a BLIP model: {lines[0] if lines else error!r}; give a folder with "
                "config.json, model.safetensors, preprocessor_config.json and the tokenizer's files"
            ) from error
        # A BLIP for captions or questions has no such head; transformers would make up a random one.
        if missing := sorted(name for name in loading["missing_keys"] if name.startswith("itm_head")):
            raise UnknownModel(
                f"{folder} is a BLIP model without a head for image-text matching (no {missing[0]}); give one such as "
                "Salesforce/blip-itm-base-coco"
            )
        self._model = model.eval().requires_grad_(False).to(device)
        self._images, self._tokenizer, self._device = images, tokenizer, device

    def scores(self, image: Any, prompts: Sequence[str]) -> list[float]:
        """Return the probability, in percent, that an image (PIL) and each prompt belong together."""
        import torch

        longest = self._model.config.text_config.max_position_embeddings
        pixels = self._images(images=[image.convert("RGB")], return_tensors="pt").to(self._device)
        text = self._tokenizer(
            list(prompts), return_tensors="pt", padding=True, truncation=True, max_length=longest
        ).to(self._device)
        with torch.inference_mode():
            hidden_states = self._model.vision_model(pixel_values=pixels["pixel_values"]).last_hidden_state
            read = self._model.text_encoder(
                input_ids=text["input_ids"],
                attention_mask=text["attention_mask"],
                encoder_hidden_states=hidden_states.expand(len(prompts), -1, -1),
            ).last_hidden_state
            matches = self._model.itm_head(read[:, 0]).softmax(dim=-1)[:, 1]
        return [100 * float(match) for match in matches]
