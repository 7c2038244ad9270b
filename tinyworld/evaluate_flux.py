"""Measure the FLUX family and the scorer against their limits, and the behaviour of a step cache; write the record.

    python -m tinyworld.evaluate_flux --weights build/flux --record results/tinyworld-flux.json

Captions, seeds and round trips are those of `evaluate`; the images are generated with diffusers' FluxPipeline.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny, FirstBlockCacheConfig, FluxPipeline
from numpy.typing import NDArray

from tinyworld import captions, clip, evaluate, flux, networks, scenes, tokenizer
from tinyworld.train_vae import psnr

TINY_VAE_FOLDER = networks.TINY_VAE_FOLDERS[flux.CHANNELS]
CLIP_SEED = 40_001
CANDIDATES = 64
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)

GATES = {
    "vae": evaluate.GATES["vae"],
    "tiny_vae": evaluate.GATES["tiny_vae"],
    "flux": evaluate.GATES["sd"],
    "schnell": {"colour": 0.95, "shape": 0.90, "where": 0.85, "binding": 0.70},
    "clip": {"retrieval": 0.90, "colour": 0.90, "shape": 0.90, "relation": 0.90},
}


@dataclass(frozen=True)
class Setting:
    """How a row of pictures is drawn."""

    model: str = flux.FOLDER
    steps: int = flux.STEPS
    guidance: float = flux.GUIDANCE
    dtype: str = "fp16"
    vae: str = "vae"
    tokens: int = flux.CALL["max_sequence_length"]


DEFAULT = Setting()
SCHNELL = replace(DEFAULT, model=flux.SCHNELL_FOLDER, steps=flux.SCHNELL_STEPS, guidance=0.0)
VARIATIONS = (
    replace(DEFAULT, dtype="bf16"),
    replace(DEFAULT, dtype="fp32"),
    replace(DEFAULT, vae="tiny_vae"),
    replace(DEFAULT, tokens=512),  # FluxPipeline's own default
    *(replace(DEFAULT, guidance=guidance) for guidance in (0.0, 1.0, 2.0, 5.0)),
    *(replace(DEFAULT, steps=steps) for steps in (1, 2, 4, 8, 14)),
    *(replace(SCHNELL, steps=steps) for steps in (1, 2)),
    replace(SCHNELL, vae="tiny_vae"),
)


def load_pipe(weights: Path, setting: Setting, device: str) -> FluxPipeline:
    kind = evaluate.DTYPES[setting.dtype]
    if setting.model == flux.SCHNELL_FOLDER:
        pipe = flux.load_schnell(weights, kind)
    else:
        pipe = FluxPipeline.from_pretrained(weights / setting.model, dtype=kind)
    if setting.vae == "tiny_vae":
        pipe.vae = AutoencoderTiny.from_pretrained(weights / TINY_VAE_FOLDER, dtype=kind)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def draw(pipe: FluxPipeline, prompts: Sequence[str], setting: Setting, batch: int = 125) -> NDArray[np.uint8]:
    """(N, 128, 128, 3) pictures."""
    arguments = {**flux.CALL, "max_sequence_length": setting.tokens}
    return evaluate.call(
        pipe, prompts, batch, num_inference_steps=setting.steps, guidance_scale=setting.guidance, **arguments
    )


def measure(
    weights: Path, settings: Sequence[Setting], prompts: Sequence[str], device: str, scorer: evaluate.Scorer
) -> list[dict[str, Any]]:
    rows = []
    for setting in settings:
        pictures = draw(load_pipe(weights, setting, device), prompts, setting)
        rows.append({**asdict(setting), "accuracies": scorer(pictures, prompts)})
        print(*asdict(setting).values(), evaluate.summarise(rows[-1]["accuracies"]), sep="  ", flush=True)
    return rows


def measure_cache(
    weights: Path, setting: Setting, prompts: Sequence[str], device: str, scorer: evaluate.Scorer
) -> list[dict[str, Any]]:
    """Measure the first-block cache at rising thresholds: cache hits, PSNR against no cache, accuracies.

    Images are generated one by one, since the cache decides for a whole batch. A step is a hit if the last block did
    not run.
    """
    plain = draw(load_pipe(weights, setting, device), prompts, setting, batch=1)
    rows = []
    for threshold in THRESHOLDS:
        pipe = load_pipe(weights, setting, device)
        steps, run = [], []
        pipe.transformer.x_embedder.register_forward_hook(lambda *_, steps=steps: steps.append(1))
        last = pipe.transformer.single_transformer_blocks[-1]
        last.proj_out.register_forward_hook(lambda *_, run=run: run.append(1))
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        pictures = draw(pipe, prompts, setting, batch=1)
        error = float(np.square((pictures.astype(np.float32) - plain) / 255).mean())
        row = {
            "threshold": threshold,
            "hit_rate": 1 - len(run) / len(steps),
            "psnr_db": round(psnr(error), 2) if error else None,  # the same pictures, to the byte
            "accuracies": scorer(pictures, prompts),
        }
        rows.append(row)
        print(f"cache {threshold}  hits {row['hit_rate']:.3f}  {row['psnr_db']} dB", flush=True)
    return rows


@torch.no_grad()
def measure_clip(folder: Path, number: int, device: str) -> dict[str, Any]:
    """Measure the scorer on held-out scenes: the right caption among 64, and against a caption with a mistake."""
    model = clip.load(folder, device)
    words, rng = tokenizer.build(), random.Random(CLIP_SEED)
    labels = scenes.sample(number, CLIP_SEED, "held_out")
    described = captions.describe(labels)
    embeddings = torch.cat(
        [
            clip.embed_images(model, scenes.draw(labels[i : i + 250])[0].to(device) * 2 - 1)
            for i in range(0, number, 250)
        ]
    )

    def read(rows: Sequence[str]) -> torch.Tensor:
        return clip.embed_captions(model, torch.tensor(tokenizer.encode(words, list(rows)), device=device))

    def counted(hits: torch.Tensor) -> dict[str, float]:
        return {"accuracy": hits.float().mean().item(), "right": int(hits.sum()), "asked": len(hits)}

    # Retrieval uses complete captions; a terse one may describe several images.
    full = read([captions.write(description, rng, terse=0.0, noise=0.0) for description in described])
    whole = number // CANDIDATES * CANDIDATES or number
    groups = zip(embeddings[:whole].split(CANDIDATES), full[:whole].split(CANDIDATES), strict=True)
    hits = [(a @ b.T).argmax(1) == torch.arange(len(a), device=device) for a, b in groups]
    out = {"retrieval": counted(torch.cat(hits))}
    for mistake in ("colour", "shape", "relation"):
        pairs = []
        for index, scene in enumerate(described):
            right = captions.write(scene, rng, noise=0.0)
            wrong = captions.mistaken(right, mistake, rng)
            if wrong is not None:
                pairs.append((index, right, wrong))
        at, rights, wrongs = zip(*pairs, strict=True)
        own = embeddings[list(at)]
        out[mistake] = counted((own * read(rights)).sum(1) > (own * read(wrongs)).sum(1))
    print("clip", evaluate.summarise(out), flush=True)
    return {"accuracies": out}


def gates(record: dict[str, Any]) -> list[dict[str, Any]]:
    trips = record["round_trips"]
    measured = {
        "vae": trips["vae"],
        "tiny_vae": trips["tiny_vae"],
        "flux": record["default"],
        "schnell": record["schnell"],
        "clip": record["clip"],
    }
    return evaluate.judge(GATES, measured)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--cache-prompts", type=int, default=32)
    args = parser.parse_args()
    scorer = evaluate.Scorer(args.workers)
    weights, device = args.weights, args.device
    prompts = evaluate.held_out_captions(args.captions)
    default = DEFAULT if device == "cuda" else replace(DEFAULT, dtype="fp32")
    schnell = replace(SCHNELL, dtype=default.dtype)
    flux_row, schnell_row = measure(weights, (default, schnell), prompts, device, scorer)
    vaes = weights / flux.FOLDER / "vae", weights / TINY_VAE_FOLDER
    result: dict[str, Any] = {
        "environment": evaluate.environment(device),
        "captions": args.captions,
        "round_trips": evaluate.round_trips(*vaes, 2 * args.captions, device, scorer),
        "default": flux_row,
        "schnell": schnell_row,
        "clip": measure_clip(weights / clip.FOLDER, max(2 * args.captions, CANDIDATES), device),
        "cache": measure_cache(weights, default, prompts[: args.cache_prompts], device, scorer),
    }
    result["gates"] = gates(result)
    if not args.quick:
        result["variations"] = [schnell_row, *measure(weights, VARIATIONS, prompts, device, scorer)]
    evaluate.write(result, args)
    if args.pictures:
        for setting in (default, schnell):
            pictures = draw(load_pipe(weights, setting, device), prompts[:64], setting)
            evaluate.show(pictures, prompts[:64], args.pictures / setting.model)


if __name__ == "__main__":
    main()
