"""Draw the variants' images, and look at them: figures of every image, and the verifier's verdict."""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vivace
from tinyworld import damage, gate_variants, verifier
from tinyworld.gate_variants import PROMPT_SET, Variant, num_drawn, tasks, variants
from vivace.errors import VivaceError
from vivace.measure.image_metrics import aligned, faults, match, pixels
from vivace.measure.scorer import ClipScorer
from vivace.models.prompts import PROMPT_SETS
from vivace.models.scorers import find_scorer
from vivace.runtime.session import Session

SCORER = "tiny-clip"
BATCH, CACHE_BATCH = 25, 13


def draw(session: Session, prompts: Sequence[str], seeds: Sequence[int], batch: int) -> NDArray[np.uint8]:
    """Generate images (N, H, W, 3), each from its own seed. Values that are not finite become black, as with PIL."""
    made = []
    for start in range(0, len(prompts), batch):
        some = list(prompts[start : start + batch])
        generators = [torch.Generator("cpu").manual_seed(s) for s in seeds[start : start + batch]]
        images = session(some, generator=generators, output_type="np").images
        made.append(np.round(np.nan_to_num(images) * 255).clip(0, 255).astype(np.uint8))
    return np.concatenate(made)


def draw_all(args: argparse.Namespace) -> None:
    for model in args.model or gate_variants.RECIPES:
        for variant in variants(model):
            path = args.out / model / f"{variant.file}.npz"
            if variant.sort == "images":
                continue
            with mine(path) as is_mine:
                if is_mine:
                    draw_to(path, variant)


def draw_to(path: Path, variant: Variant) -> None:
    start = time.perf_counter()
    try:
        pictures, reason = draw_variant(variant), ""
    except VivaceError as error:
        pictures, reason = np.zeros((0, 128, 128, 3), np.uint8), str(error)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, pictures=pictures, reason=np.array(reason))
    unfinished.rename(path)
    print(f"{variant.model} {variant.name}: {time.perf_counter() - start:.1f} s {reason}", flush=True)


@contextmanager
def mine(path: Path) -> Iterator[bool]:
    """Yield whether a file is this process's to make: it does not exist, and no other process makes it.

    So several of these commands can share the work.
    """
    claim = path.with_suffix(path.suffix + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        yield False
        return
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield False
        return
    try:
        yield not path.exists()
    finally:
        claim.unlink()


def draw_variant(variant: Variant) -> NDArray[np.uint8]:
    recipe = variant.name if variant.sort == "recipe" else "baseline"
    with vivace.load(variant.model, recipe, device="cpu") as session:
        if variant.sort == "weights":
            damage.spoil(session, *damage.WEIGHTS[variant.kind][variant.name])
        prompts, seeds = zip(*tasks(num_drawn(variant)), strict=True)
        return draw(session, prompts, seeds, CACHE_BATCH if "cache" in recipe else BATCH)


def look_at_all(args: argparse.Namespace) -> None:
    """Store the figures of every image beside it, and whether the verifier finds everything right in it."""
    clip = ClipScorer(find_scorer(SCORER).folder)
    for model in args.model or gate_variants.RECIPES:
        drawn = load(args.out, Variant(model, "baseline", "baseline", "recipe"))
        if drawn is None:
            continue
        for variant in variants(model):
            path = args.out / model / f"{variant.file}.json"
            with mine(path) as is_mine:
                pictures = pictures_of(args.out, variant, drawn) if is_mine else None
                if pictures is None:
                    continue
                rows = figures_of(clip, variant, pictures, drawn)
                path.with_suffix(".tmp").write_text(json.dumps(rows) + "\n", encoding="utf-8")
                path.with_suffix(".tmp").rename(path)
                print(model, variant.name, sum(row["right"] for row in rows), flush=True)


def pictures_of(out: Path, variant: Variant, drawn: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Return the images of a variant; those of a damage are made of the baseline's."""
    if variant.sort != "images":
        return load(out, variant)
    prompts = [prompt for prompt, _ in tasks()[: len(drawn)]]
    return gate_variants.image_damages()[variant.kind][variant.name](drawn, prompts)


def figures_of(
    clip: ClipScorer, variant: Variant, pictures: NDArray[np.uint8], drawn: NDArray[np.uint8]
) -> list[dict[str, Any]]:
    """Return what the gate sees of each image, its faults, and the verifier's verdict.

    Args:
        drawn: the baseline's images.
    """
    prompts, others = [prompt for prompt, _ in tasks()[: len(pictures)]], PROMPT_SETS[PROMPT_SET]
    read, read_others = clip.embed_prompts(prompts), clip.embed_prompts(others)
    near = [aligned(pixels(image), pixels(other)) for image, other in zip(pictures, drawn, strict=False)]
    embeddings = embeddings_of(clip, np.stack(near).astype(np.uint8))
    rows = []
    for k, picture in enumerate(pictures):
        alone = {"clip_score": 100 * float(embeddings[k] @ read[k])}
        against: dict[str, float] = {}
        if variant.kind == "baseline":
            strangers = [
                float(embeddings[k] @ other)
                for prompt, other in zip(others, read_others, strict=True)
                if prompt != prompts[k]
            ]
            alone["clip_score_of_others"] = 100 * float(np.mean(strangers))
        elif (picture != drawn[k]).any():
            against["match"] = match(pixels(picture), pixels(drawn[k]))
        rows.append(
            {
                "faults": faults(pixels(picture)),
                "alone": rounded(alone),
                "against": rounded(against),
                "right": verifier.verify(np.ascontiguousarray(picture), prompts[k]).right,
            }
        )
    return rows


def load(out: Path, variant: Variant) -> NDArray[np.uint8] | None:
    """Return the images of a variant; None if they are not drawn, or cannot be."""
    path = out / variant.model / f"{variant.file}.npz"
    if not path.exists():
        return None
    with np.load(path) as stored:
        pictures: NDArray[np.uint8] = stored["pictures"]
    return pictures[: num_drawn(variant)] if len(pictures) else None


def embeddings_of(clip: ClipScorer, pictures: NDArray[np.uint8]) -> NDArray[np.float64]:
    images = [Image.fromarray(np.ascontiguousarray(picture)) for picture in pictures]
    return np.concatenate([clip.embed_images(images[k : k + 20]) for k in range(0, len(images), 20)])


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}
