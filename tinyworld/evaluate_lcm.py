"""Compare tiny-sd's LCM LoRA with plain few steps by the exact verifier, and write the record.

    python -m tinyworld.evaluate_lcm --record results/tinyworld-lcm.json
    python -m tinyworld.evaluate_lcm --lora NEW.safetensors --record build/new.json

Captions and seeds are those of `tinyworld.evaluate`. The LoRA is compared with plain tiny-sd, at its own number of
steps and at few, and with the sampler alone: LCMScheduler without guidance and without the LoRA. The LoRA's value is
what it adds to that.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from diffusers import LCMScheduler, StableDiffusionPipeline
from numpy.typing import NDArray
from safetensors import safe_open

from tinyworld import evaluate, train_lcm
from vivace.machinery.lora.read_lora import merge

SHIPPED = evaluate.WEIGHTS / train_lcm.FOLDER / train_lcm.FILE


@dataclass(frozen=True)
class Drawn:
    """How a row of pictures is drawn."""

    what: str
    steps: int
    guidance: float = 1.0

    @property
    def denoiser_calls(self) -> int:
        """Number of UNet rows per image: guidance doubles them."""
        return self.steps * (2 if self.guidance > 1 else 1)


PLAIN, SAMPLER, LORA = "euler_a", "LCMScheduler alone", "LCMScheduler and the LoRA"
ROWS = (
    *(Drawn(PLAIN, steps, 4.0) for steps in (25, 8, 4, 2)),
    *(Drawn(SAMPLER, steps) for steps in (8, 4, 2)),
    *(Drawn(LORA, steps) for steps in (8, 4, 2)),
)


def load_pipe(weights: Path, what: str, lora: Path, device: str) -> StableDiffusionPipeline:
    """tiny-sd, in fp16 on a GPU and in fp32 elsewhere."""
    setting = evaluate.Setting(dtype="fp16" if device == "cuda" else "fp32")
    pipe = evaluate.load_pipe(weights, setting, device)
    if what == LORA:
        merge(pipe, lora)
    if what != PLAIN:
        pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    return pipe


def draw(pipe: StableDiffusionPipeline, prompts: Sequence[str], row: Drawn, batch: int) -> NDArray[np.uint8]:
    return evaluate.call(pipe, prompts, batch, num_inference_steps=row.steps, guidance_scale=row.guidance)


def facts_of(lora: Path) -> dict[str, Any]:
    """Read from the file how the LoRA was trained."""
    with safe_open(lora, "pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["training"])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--lora", type=Path, default=SHIPPED)
    parser.add_argument("--batch", type=int, default=125)
    args = parser.parse_args()
    scorer = evaluate.Scorer(args.workers)
    prompts = evaluate.held_out_captions(args.captions)
    rows = []
    for row in ROWS:
        pictures = draw(load_pipe(args.weights, row.what, args.lora, args.device), prompts, row, args.batch)
        accuracies = scorer(pictures, prompts)
        rows.append({**asdict(row), "denoiser_calls": row.denoiser_calls, "accuracies": accuracies})
        print(row.what, row.steps, evaluate.summarise(accuracies), sep="  ", flush=True)
        if args.pictures:
            name = f"{row.what.replace(' ', '-')}-{row.steps}"
            evaluate.show(pictures[:64], prompts[:64], args.pictures / name)
    record = {
        "environment": evaluate.environment(args.device),
        "captions": args.captions,
        "training": facts_of(args.lora),
        "rows": rows,
    }
    args.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
