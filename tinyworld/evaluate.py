"""Measure the shipped models against their limits with diffusers' pipeline, and write the record.

    python -m tinyworld.evaluate --record results/tinyworld-sd.json

The 500 captions are of held-out combinations (see `scenes.held_out`). Image k has seed 1000 + k whatever the batch
size. The weights are the fp16 weights of the package.
"""

import argparse
import json
import multiprocessing
import platform
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
)
from numpy.typing import NDArray
from PIL import Image

from tinyworld import captions, networks, scenes, verifier
from tinyworld.train_vae import psnr

WEIGHTS = Path(__file__).parents[1] / "src/vivace/models/weights"
CAPTION_SEED = 20_001
PICTURE_SEED = 1000
ROUND_TRIP_SEED = 30_001
SCHEDULERS = {
    "euler_a": EulerAncestralDiscreteScheduler,
    "euler": EulerDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

GATES = {
    "vae": {"colour": 0.99, "shape": 0.97, "psnr_db": 36.0},
    "tiny_vae": {"colour": 0.98, "shape": 0.95},
    "sd": {"colour": 0.98, "shape": 0.95, "where": 0.90, "binding": 0.80},
}


@dataclass(frozen=True)
class Setting:
    """How a row of pictures is drawn."""

    scheduler: str = "euler_a"
    steps: int = 25
    guidance: float = 4.0
    dtype: str = "fp16"
    vae: str = "vae"


DEFAULT = Setting()
VARIATIONS = (
    *(
        replace(DEFAULT, scheduler=scheduler, guidance=guidance)
        for scheduler in SCHEDULERS
        for guidance in (3.0, 4.0, 5.0, 7.0)
    ),
    replace(DEFAULT, steps=30),
    replace(DEFAULT, scheduler="dpmpp_2m", steps=20),
    replace(DEFAULT, vae="tiny_vae"),
    replace(DEFAULT, dtype="bf16"),
    replace(DEFAULT, dtype="fp32"),
    # Quality must drop for aggressive settings, or the models could not distinguish good recipes from bad ones.
    *(replace(DEFAULT, scheduler="dpmpp_2m", steps=steps) for steps in (1, 2, 4, 8)),
    *(replace(DEFAULT, guidance=guidance) for guidance in (0.0, 1.0)),
)


def held_out_captions(number: int) -> list[str]:
    """Return captions of held-out combinations, with synonyms and omissions, but without meaningless words."""
    rng = random.Random(CAPTION_SEED)
    labels = scenes.sample(number, CAPTION_SEED, "held_out")
    return [captions.write(full, rng, noise=0.0) for full in captions.describe(labels)]


def draw(
    pipe: StableDiffusionPipeline, prompts: Sequence[str], setting: Setting, batch: int = 125
) -> NDArray[np.uint8]:
    """(N, 128, 128, 3) pictures; picture k starts from seed PICTURE_SEED + k."""
    pipe.scheduler = SCHEDULERS[setting.scheduler].from_config(pipe.scheduler.config)
    return call(pipe, prompts, batch, num_inference_steps=setting.steps, guidance_scale=setting.guidance)


def call(
    pipe: DiffusionPipeline, prompts: Sequence[str], batch: int, **call_arguments: Any
) -> NDArray[np.uint8]:
    """(N, 128, 128, 3) pictures of any pipeline, `told` beside prompts and seeds; picture k from PICTURE_SEED + k."""
    out = []
    for start in range(0, len(prompts), batch):
        some = list(prompts[start : start + batch])
        generators = [torch.Generator("cpu").manual_seed(PICTURE_SEED + start + k) for k in range(len(some))]
        made = pipe(some, generator=generators, output_type="np", **call_arguments).images
        out.append(np.round(np.nan_to_num(made) * 255).astype(np.uint8))
    return np.concatenate(out)


class Scorer:
    """Runs the verifier in several processes: it takes ten milliseconds per image."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        spawn = multiprocessing.get_context("spawn")  # forking a process that holds a GPU is not safe
        self.pool = ProcessPoolExecutor(workers, mp_context=spawn) if workers > 1 else None

    def __call__(self, pictures: NDArray[np.uint8], prompts: Sequence[str]) -> dict[str, dict[str, float]]:
        if self.pool is None:
            return verifier.score(pictures, prompts)
        n = self.workers
        parts = self.pool.map(
            verifier.tally, [pictures[k::n] for k in range(n)], [prompts[k::n] for k in range(n)]
        )
        totals: verifier.Tally = {}
        for part in parts:
            for key, (right, total) in part.items():
                before = totals.get(key, (0, 0))
                totals[key] = before[0] + right, before[1] + total
        return verifier.accuracies(totals)


@torch.no_grad()
def round_trips(
    vae_folder: Path, tiny_folder: Path, number: int, device: str, scorer: Scorer
) -> dict[str, Any]:
    """Measure accuracies and PSNR of both VAEs on true scenes, with fp16 weights in fp32 arithmetic.

    "tiny_vae" decodes the big encoder's latents, as in a pipeline; "tiny_vae_alone" also encodes.
    """
    vae = AutoencoderKL.from_pretrained(vae_folder).to(device)
    tiny = AutoencoderTiny.from_pretrained(tiny_folder).to(device)
    labels = scenes.sample(number, ROUND_TRIP_SEED, "held_out")
    rng = random.Random(ROUND_TRIP_SEED)
    prompts = [captions.write(full, rng, terse=0.0, noise=0.0) for full in captions.describe(labels)]
    true, made = [], {"vae": [], "tiny_vae": [], "tiny_vae_alone": []}
    for start in range(0, number, 100):
        picture = scenes.draw(labels[start : start + 100])[0].to(device) * 2 - 1
        latents = vae.encode(picture).latent_dist.mean
        scaled = latents * vae.config.scaling_factor / tiny.config.scaling_factor
        true.append(scenes.to_uint8(picture / 2 + 0.5).cpu().numpy())
        for name, back in (
            ("vae", vae.decode(latents).sample),
            ("tiny_vae", tiny.decode(scaled).sample),
            ("tiny_vae_alone", tiny.decode(tiny.encode(picture).latents).sample),
        ):
            made[name].append(scenes.to_uint8(back / 2 + 0.5).cpu().numpy())
    truth = np.concatenate(true)
    out: dict[str, Any] = {"scenes": {"accuracies": scorer(truth, prompts)}}
    for name, parts in made.items():
        pictures = np.concatenate(parts)
        error = float(np.square((pictures.astype(np.float32) - truth) / 255).mean())
        out[name] = {"psnr_db": round(psnr(error), 2), "accuracies": scorer(pictures, prompts)}
    for name, trip in out.items():
        print(f"round trip {name}  {trip.get('psnr_db', '')}  {summarise(trip['accuracies'])}", flush=True)
    return out


def summarise(accuracies: dict[str, dict[str, float]]) -> str:
    return "  ".join(f"{key} {value['accuracy']:.4f}" for key, value in accuracies.items())


def load_pipe(weights: Path, setting: Setting, device: str) -> StableDiffusionPipeline:
    kind = DTYPES[setting.dtype]
    pipe = StableDiffusionPipeline.from_pretrained(weights / networks.SD_FOLDER, dtype=kind)
    if setting.vae == "tiny_vae":
        pipe.vae = AutoencoderTiny.from_pretrained(weights / networks.TINY_VAE_FOLDER, dtype=kind)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def measure(
    weights: Path, settings: Sequence[Setting], prompts: Sequence[str], device: str, scorer: Scorer
) -> list[dict[str, Any]]:
    rows = []
    for setting in settings:
        pictures = draw(load_pipe(weights, setting, device), prompts, setting)
        row = {**asdict(setting), "accuracies": scorer(pictures, prompts)}
        rows.append(row)
        print(*asdict(setting).values(), summarise(row["accuracies"]), sep="  ", flush=True)
    return rows


def gates(trips: dict[str, Any], default: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each limit with the measured figure, and whether it is reached."""
    return judge(GATES, {"vae": trips["vae"], "tiny_vae": trips["tiny_vae"], "sd": default})


def judge(requirements: dict[str, dict[str, float]], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each model's figures (shares, or dB) with their minimum."""
    out = []
    for model, limits in requirements.items():
        for figure, least in limits.items():
            got = measured[model]
            value = got["psnr_db"] if figure == "psnr_db" else got["accuracies"][figure]["accuracy"]
            out.append(
                {
                    "model": model,
                    "figure": figure,
                    "least": least,
                    "measured": value,
                    "passed": value >= least,
                }
            )
    return out


def sheet(pictures: NDArray[np.uint8], columns: int, path: Path) -> None:
    """Pictures side by side in one PNG."""
    rows = len(pictures) // columns
    grid = pictures[: rows * columns].reshape(rows, columns, *pictures.shape[1:])
    Image.fromarray(np.concatenate(list(np.concatenate(list(grid.swapaxes(0, 1)), 2)), 0)).save(path)


def show(pictures: NDArray[np.uint8], prompts: Sequence[str], at: Path) -> None:
    """Write them as a sheet, `at`.png, and as an array with their prompts, `at`.npz."""
    at.parent.mkdir(parents=True, exist_ok=True)
    sheet(pictures, min(8, len(pictures)), at.with_suffix(".png"))
    np.savez_compressed(at.with_suffix(".npz"), pictures=pictures, prompts=np.array(prompts))


def environment(device: str) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=500)
    parser.add_argument(
        "--training", type=Path, help="folder of the training, whose step counts go into the record"
    )
    parser.add_argument("--pictures", type=Path, help="write sheets of pictures here")
    parser.add_argument("--quick", action="store_true", help="the gates only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)


def write(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the record, with the training's facts, and print its gates."""
    if args.training:
        facts = [
            json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.training.glob("*.json"))
        ]
        result["training"] = [fact for fact in facts if "steps" in fact]
    args.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for gate in result["gates"]:
        print(
            f"{gate['model']:12} {gate['figure']:12} {gate['measured']:.4f}  wants {gate['least']}  {gate['passed']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args()
    scorer = Scorer(args.workers)
    vaes = args.weights / networks.SD_FOLDER / "vae", args.weights / networks.TINY_VAE_FOLDER
    trips = round_trips(*vaes, 2 * args.captions, args.device, scorer)
    prompts = held_out_captions(args.captions)
    default = DEFAULT if args.device == "cuda" else replace(DEFAULT, dtype="fp32")
    rows = measure(args.weights, [default], prompts, args.device, scorer)
    result = {
        "environment": environment(args.device),
        "captions": args.captions,
        "gates": gates(trips, rows[0]),
        "round_trips": trips,
        "default": rows[0],
    }
    if not args.quick:
        result["variations"] = measure(args.weights, VARIATIONS, prompts, args.device, scorer)
    write(result, args)
    if args.pictures:
        for vae in ("vae", "tiny_vae"):
            setting = replace(default, vae=vae)
            pictures = draw(load_pipe(args.weights, setting, args.device), prompts[:64], setting)
            show(pictures, prompts[:64], args.pictures / vae)


if __name__ == "__main__":
    main()
