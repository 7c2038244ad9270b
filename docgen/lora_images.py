"""Draw docs/images/lora-MODEL.png: the LoRAs of tinyworld/loras at several scales, in one session each.

    python -m docgen.lora_images

A row is a scale, a column a prompt. It fails if scale 0 does not give the image without a LoRA, byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vivace

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LORAS = Path(__file__).parents[1] / "tinyworld" / "loras"
SCALES = (0.0, 0.5, 1.0)
PROMPTS = {
    "tiny-sd": (
        "a large red circle on a white background",
        "a large green diamond on a gray background",
        "a large blue square",
        "a red circle above a blue square",
        "a large yellow star on a gray background",
    ),
    "tiny-flux": (
        "a large red circle on a white background",
        "a large green diamond on a gray background",
        "a large blue square",
        "a red circle above a blue square",
        "a large orange diamond on a white background",
    ),
}
GAP = 4  # pixels


def main() -> int:
    torch.set_num_threads(1)  # the images' last bits depend on it
    for model, prompts in PROMPTS.items():
        plain = images(vivace.load(model, device="cpu"), prompts)
        path = (LORAS / f"{model}-outlines.safetensors").as_posix()
        session = vivace.load(model, f"lora({path!r}, hot=True)", device="cpu")
        rows = []
        for scale in SCALES:
            session.set_lora(scale=scale)
            rows.append(images(session, prompts))
        if not np.array_equal(rows[0], plain):
            print(f"{model}: scale 0 does not give the image without a LoRA", file=sys.stderr)
            return 1
        Image.fromarray(_sheet(rows)).save(IMAGES / f"lora-{model}.png", optimize=True)
    return 0


def images(session: vivace.Session, prompts: tuple[str, ...]) -> np.ndarray:
    """Return the images of prompts, (number, height, width, 3) bytes; number k has seed k."""
    drawn = [
        session(prompt, generator=torch.Generator("cpu").manual_seed(seed)).images[0]
        for seed, prompt in enumerate(prompts)
    ]
    return np.stack([np.asarray(image) for image in drawn])


def _sheet(rows: list[np.ndarray]) -> np.ndarray:
    grid = np.stack(rows)
    padded = np.pad(grid, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    number, columns, height, width, channels = padded.shape
    return padded.transpose(0, 2, 1, 3, 4).reshape(number * height, columns * width, channels)[:-GAP, :-GAP]


if __name__ == "__main__":
    sys.exit(main())
