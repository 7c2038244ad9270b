"""Models and functions that score images: CLIP, BLIP as a second witness, LPIPS, and a function of the user's own."""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.errors import UnknownModel, Unsupported
from vivace.foundation.untrusted.files import open_plain, reading, reason, user_path
from vivace.measure.image_metrics import Pixels

_MOST_ZOOMS, _FARTHEST = 9, 0.1


_NEEDED = (
    "give a folder with config.json, model.safetensors, preprocessor_config.json and the tokenizer's files"
)


def _processors(folder: Path) -> tuple[Any, Any]:
    """Return what makes tensors of images, and of texts.

    Without an explicit trust_remote_code=False, transformers asks on the terminal and waits. PIL, whether or not
    torchvision is installed: they resize differently, and scores must be comparable.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    images = AutoImageProcessor.from_pretrained(str(folder), backend="pil", **own)
    return images, AutoTokenizer.from_pretrained(str(folder), **own)


class ClipScorer:
    """Any CLIP model in a local folder (transformers' format, safetensors only).

    Scores are cosines of CLIP embeddings times 100, as usual. Text against image usually lies between 15 and 35 for
    openai/clip-vit-large-patch14; only differences between recipes are meaningful.

    A model may ask for several views of each image, whose embeddings are averaged: `zooms` in its config.json, e.g.
    [0.98, 1.0, 1.02]. Without it, an image is scored once, as it is.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        from transformers import CLIPModel

        with _without_bars(), reading(folder, UnknownModel, _NEEDED, problem="does not load as a CLIP model"):
            model = CLIPModel.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
            self._images, self._tokenizer = _processors(folder)
            self._zooms = _checked(getattr(model.config, "zooms", [1.0]))
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device
        self._folder = folder

    def scores(self, images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
        """Return 100 x the cosine of each image (PIL) with its prompt."""
        return _cosines(_once(self.embed_images, images), self.embed_prompts(prompts))

    def similarities(self, images: Sequence[Any], references: Sequence[Any]) -> list[float]:
        """Return 100 x the cosine of each image with its reference."""
        return _cosines(_once(self.embed_images, images), self.embed_images(references))

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
            views = []
            for zoom in self._zooms:
                shown = self._images(images=[zoomed(image, zoom) for image in images], return_tensors="pt")
                views.append(self._unit(self._model.get_image_features, shown))
        if len(views) == 1:
            return views[0]
        mean = np.mean(views, axis=0)
        return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))

    def _explained(self) -> AbstractContextManager[None]:
        """Turn the libraries' failures into UnknownModel: a configuration may load, and fail in its first call."""
        return reading(self._folder, UnknownModel, problem="does not work as a CLIP model")

    def _unit(self, embed: Callable[..., Any], inputs: Any) -> NDArray[np.float64]:
        import torch

        with torch.inference_mode():
            features = embed(**inputs.to(self._device))
            # Depending on its version, transformers 5 returns a tensor or an output object.
            features = features if hasattr(features, "norm") else features.pooler_output
            vectors = features.double().cpu().numpy()
        return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def middle(image: Any) -> Any:
    """Crop a PIL image with sides of more than 4 to 1 towards the part that the processor keeps. The processor resizes
    first: an image of 1 x 5000 pixels would become one of 128 x 640,000."""
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


def _once(
    embed: Callable[[Sequence[Any]], NDArray[np.float64]], images: Sequence[Any]
) -> NDArray[np.float64]:
    """Embed an image once that is compared with many others."""
    distinct = {id(image): image for image in images}
    rows = {key: row for row, key in enumerate(distinct)}
    return embed([*distinct.values()])[[rows[id(image)] for image in images]]


def _cosines(a: NDArray[np.float64], b: NDArray[np.float64]) -> list[float]:
    return [100 * float(x) for x in (a * b).sum(axis=-1)]


class FunctionScorer:
    """A function of the user's own that returns a score, higher for better, for each image (PIL) with its prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        module, _, function = name.partition(":")
        self._name = name
        sys.path.insert(0, str(folder))
        try:
            self._function = getattr(importlib.import_module(module), function)
        except Exception as error:
            traceback.print_exc()
            raise UnknownModel(f"--scorer {name} cannot be imported: {reason(error)}") from error
        finally:
            sys.path.remove(str(folder))

    def scores(self, images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
        """Return the score of each image (PIL) with its prompt."""
        try:
            scores = [float(score) for score in self._function(list(images), list(prompts))]
        except Exception as error:
            traceback.print_exc()
            raise Unsupported(f"--scorer {self._name} failed: {reason(error)}") from error
        if len(scores) != len(images) or not np.isfinite(scores).all():
            raise Unsupported(
                f"--scorer {self._name} returned {scores[:3]} for {len(images)} images and prompts; it has to return a "
                "list of as many finite numbers"
            )
        return scores


class Witness:
    """Any BLIP model for image-text matching in a local folder (transformers' format, safetensors only)."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        from transformers import BlipForImageTextRetrieval

        with reading(folder, UnknownModel, _NEEDED, problem="does not load as a BLIP model"):
            model, loading = BlipForImageTextRetrieval.from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            images, tokenizer = _processors(folder)
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


ALEXNET = "alexnet-owt-7be5be79.pth"
_URL = f"https://download.pytorch.org/models/{ALEXNET}"
_MAX_BYTES = 1_000_000_000
MIN_SIDE = 32  # pixels; AlexNet's pooling reduces smaller images to nothing
# Mean and standard deviation of ImageNet's channels for images in -1 .. 1, as in LPIPS training.
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Convolutions of AlexNet by their index in its published `features`: in, out, kernel, stride, padding.
_CONVOLUTIONS = {
    0: (3, 64, 11, 4, 2),
    3: (64, 192, 5, 1, 2),
    6: (192, 384, 3, 1, 1),
    8: (384, 256, 3, 1, 1),
    10: (256, 256, 3, 1, 1),
}
_POOLED_BEFORE = (3, 6)


class Lpips:
    """LPIPS distance with AlexNet: 0 for equal images, larger for images that look more different."""

    def __init__(self, device: str = "cpu", weights: Path | None = None) -> None:
        import torch
        from torch import nn

        path = weights or default_weights()
        if not path.is_file():
            raise Unsupported(_missing_weights(path))
        self._stages: list[Any] = []
        self._heads: list[Any] = []
        with reading(path, Unsupported, f"replace it with {_URL}", problem="does not hold AlexNet's weights"):
            with open_plain(path, _MAX_BYTES) as opened:
                state = torch.load(opened, map_location="cpu", weights_only=True)
            heads = resources.files("torchmetrics.functional.image") / "lpips_models" / "alex.pth"
            with resources.as_file(heads) as file:
                linear = torch.load(file, map_location="cpu", weights_only=True)
            for k, (index, (num_in, num_out, kernel, stride, padding)) in enumerate(_CONVOLUTIONS.items()):
                convolution = nn.Conv2d(num_in, num_out, kernel, stride, padding)
                convolution.load_state_dict(
                    {kind: state[f"features.{index}.{kind}"] for kind in ("weight", "bias")}
                )
                pooling = [nn.MaxPool2d(3, 2)] if index in _POOLED_BEFORE else []
                stage = nn.Sequential(*pooling, convolution, nn.ReLU())
                self._stages.append(stage.eval().requires_grad_(False).to(device))
                self._heads.append(linear[f"lin{k}.model.1.weight"].to(device))
        self._device = device

    def distances(self, images: Sequence[Pixels], references: Sequence[Pixels]) -> list[float]:
        """Return the distance of each image (H, W, 3), 0 to 255, to its reference of the same size."""
        import torch

        distances = []
        for image, reference in zip(images, references, strict=True):
            if image.shape != reference.shape or min(image.shape[:2]) < MIN_SIDE:
                raise ValueError(
                    f"LPIPS needs images of equal size, at least {MIN_SIDE} pixels a side, "
                    f"got {image.shape[1]}x{image.shape[0]} and {reference.shape[1]}x{reference.shape[0]}"
                )
            pair = torch.from_numpy(np.stack([image, reference]).transpose(0, 3, 1, 2).copy())
            with torch.inference_mode():
                distances.append(self._distance(pair.float().to(self._device) / 127.5 - 1))
        return distances

    def _distance(self, pair: Any) -> float:
        """Return the distance of two images (2, 3, H, W) in -1 .. 1. It is the sum over stages of the weighted squared
        differences of normalised features."""
        import torch

        shift, scale = (torch.tensor(v, device=pair.device)[:, None, None] for v in (_SHIFT, _SCALE))
        features = (pair - shift) / scale
        total = 0.0
        for stage, head in zip(self._stages, self._heads, strict=True):
            features = stage(features)
            unit = features / (1e-8 + features.square().sum(dim=1, keepdim=True)).sqrt()
            difference = (unit[:1] - unit[1:]).square()
            total += float(torch.nn.functional.conv2d(difference, head).mean())
        return total


def default_weights() -> Path:
    """Return where torch's libraries keep AlexNet's weights, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = user_path(os.environ.get("TORCH_HOME") or Path(cache) / "torch")
    return home / "hub" / "checkpoints" / ALEXNET


def check_lpips() -> None:
    """Raise Unsupported if the weights are missing. Called before anything is measured."""
    if not default_weights().is_file():
        raise Unsupported(_missing_weights(default_weights()))


def _missing_weights(path: Path) -> str:
    return f"LPIPS needs AlexNet's weights (244 MB), which are missing; save {_URL} as {path}"
