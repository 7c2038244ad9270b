"""CLIP scores: how well an image fits its prompt, and how similar two images are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.errors import UnknownModel
from vivace.foundation.untrusted.files import reading

_MOST_ZOOMS, _FARTHEST = 9, 0.1


class ClipScorer:
    """Any CLIP model in a local folder (transformers' format, safetensors only).

    Scores are cosines of CLIP embeddings times 100, as usual. Text against image usually lies between 15 and 35 for
    openai/clip-vit-large-patch14; only differences between recipes are meaningful.

    A model may ask for several views of each image, whose embeddings are averaged: `zooms` in its config.json, e.g.
    [0.98, 1.0, 1.02]. Without it, an image is scored once, as it is.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        with (
            _without_bars(),
            reading(
                folder,
                UnknownModel,
                "give a folder with config.json, model.safetensors, preprocessor_config.json and the tokenizer's files",
                problem="does not load as a CLIP model",
            ),
        ):
            model = CLIPModel.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
            # Without an explicit trust_remote_code=False, transformers asks on the terminal and waits.
            # PIL, whether or not torchvision is installed: they resize differently, and scores must be comparable.
            images = AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, backend="pil", trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            zooms = _checked(getattr(model.config, "zooms", [1.0]))
        self._zooms = zooms
        self._model = model.eval().requires_grad_(False).to(device)
        self._images = images
        self._tokenizer = tokenizer
        self._device = device
        self._folder = folder

    def scores(self, images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
        """Return 100 x the cosine of each image (PIL) with its prompt."""
        return _rowwise(_once(self.embed_images, images), self.embed_prompts(prompts))

    def similarities(self, images: Sequence[Any], references: Sequence[Any]) -> list[float]:
        """Return 100 x the cosine of each image with its reference."""
        return _rowwise(_once(self.embed_images, images), self.embed_images(references))

    def embed_prompts(self, prompts: Sequence[str]) -> NDArray[np.float64]:
        """Return unit vectors (N, width). Prompts are truncated to the model's maximum length, as usual with CLIP."""
        with self._explained():
            longest = self._model.config.text_config.max_position_embeddings
            text = self._tokenizer(
                list(prompts), return_tensors="pt", padding=True, truncation=True, max_length=longest
            )
            return self._unit(self._model.get_text_features, text)

    def embed_images(self, pictures: Sequence[Any]) -> NDArray[np.float64]:
        """Return unit vectors (N, width) of PIL images: the mean over the model's zooms."""
        images = [image.convert("RGB") for image in pictures]
        if getattr(self._images, "do_center_crop", False) and "shortest_edge" in dict(
            self._images.size or {}
        ):
            images = [middle(image) for image in images]
        with self._explained():
            views = [self._image_vectors([zoomed(image, zoom) for image in images]) for zoom in self._zooms]
        if len(views) == 1:
            return views[0]
        mean = np.mean(views, axis=0)
        return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))

    def _image_vectors(self, images: Sequence[Any]) -> NDArray[np.float64]:
        return self._unit(self._model.get_image_features, self._images(images=images, return_tensors="pt"))

    def _explained(self) -> AbstractContextManager[None]:
        """Turn the libraries' failures into UnknownModel: a configuration may load, and fail in its first call."""
        return reading(self._folder, UnknownModel, problem="does not work as a CLIP model")

    def _unit(self, embed: Callable[..., Any], inputs: Any) -> NDArray[np.float64]:
        import torch

        with torch.inference_mode():
            vectors = _vector(embed(**inputs.to(self._device))).double().cpu().numpy()
        return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def middle(image: Any) -> Any:
    """Crop a PIL image with sides of more than 4 to 1 towards the part that the processor keeps.

    The processor resizes first: an image of 1 x 5000 pixels would become one of 128 x 640,000.
    """
    width, height = image.size
    short, long = min(width, height), max(width, height)
    if long <= 4 * short:
        return image
    cut = (long - 3 * short) // 2
    box = (cut, 0, width - cut, height) if width > height else (0, cut, width, height - cut)
    return image.crop(box)


def zoomed(image: Any, zoom: float) -> Any:
    """Return a PIL image of the same size, enlarged around the centre; below 1 reduced, with its edges repeated."""
    from PIL import Image

    if zoom == 1:
        return image
    width, height = image.size
    if zoom < 1:
        margin = math.ceil(max(width, height) * (1 / zoom - 1) / 2)
        array = np.pad(np.asarray(image), ((margin, margin), (margin, margin), (0, 0)), mode="edge")
        image = Image.fromarray(array)
    middle_x, middle_y = image.size[0] / 2, image.size[1] / 2
    reach_x, reach_y = width / zoom / 2, height / zoom / 2
    box = (middle_x - reach_x, middle_y - reach_y, middle_x + reach_x, middle_y + reach_y)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def _checked(zooms: object) -> list[float]:
    if (
        not isinstance(zooms, list)
        or not 1 <= len(zooms) <= _MOST_ZOOMS
        or not all(type(zoom) in (int, float) and 1 - _FARTHEST <= zoom <= 1 + _FARTHEST for zoom in zooms)
    ):
        raise ValueError(f"config.json: zooms must be 1 to {_MOST_ZOOMS} numbers from 0.9 to 1.1")
    return [float(zoom) for zoom in zooms]


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the bars of transformers, which would disturb vivace's own progress display."""
    from transformers.utils import logging

    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            logging.enable_progress_bar()


def _vector(features: Any) -> Any:
    """Return the embedding: depending on its version, transformers 5 returns a tensor or an output object."""
    return features if hasattr(features, "norm") else features.pooler_output


def _once(
    embed: Callable[[Sequence[Any]], NDArray[np.float64]], images: Sequence[Any]
) -> NDArray[np.float64]:
    """Embed an image once that is compared with many others."""
    distinct = {id(image): image for image in images}
    rows = {key: row for row, key in enumerate(distinct)}
    return embed([*distinct.values()])[[rows[id(image)] for image in images]]


def _rowwise(a: NDArray[np.float64], b: NDArray[np.float64]) -> list[float]:
    return [100 * float(x) for x in (a * b).sum(axis=-1)]
