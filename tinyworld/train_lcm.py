"""Train a LoRA for tiny-sd in four steps, by latent consistency distillation.

    python -m tinyworld.train_lcm --out build/lcm --minutes 9

The teacher is tiny-sd with its usual guidance; the student is the same UNet with a LoRA, without guidance. A noised
latent moves one solver step along the teacher's guided probability-flow ODE (DDIM, skipping `--skip` of the 1000
timesteps). The student must predict the same image from both ends of that step, and at timestep 0 the image itself
(boundary scalings c_skip and c_out), so that every point of a trajectory maps to its end.

The target is the current student without gradient: for a LoRA the running mean of its weights is not needed as a
target, and is only written at the end. The result is one fp16 file,
`--out`/tiny-sd-lcm/pytorch_lora_weights.safetensors, for `pipe.load_lora_weights` and `distilled(lcm)`. After a run
that stopped early (--stop-s) it is in tiny-sd-lcm.so-far.

Source: Luo et al., Latent Consistency Models, arXiv 2310.04378, and LCM-LoRA, arXiv 2311.05556.
"""

import argparse
import copy
import json
import math
from pathlib import Path

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyworld import loop, networks, scenes
from tinyworld.evaluate import WEIGHTS
from tinyworld.train_sd import empty_caption, latent_pool, token_pool

NAME = "lcm"
FOLDER, FILE = "tiny-sd-lcm", "pytorch_lora_weights.safetensors"
POOL_SEED = 17
GUIDANCE = 4.0
"""The teacher's, which is the catalogue's for tiny-sd."""
RANK = 5
"""The largest rank for all layers within the repository's size limit for weights (see tests/repo)."""
ORIGINAL_STEPS = 50
"""LCMScheduler takes its timesteps from as many: 19, 39, ..., 999. The student starts from these alone."""
SIGMA_DATA, TIMESTEP_SCALING = 0.5, 10.0
"""LCMScheduler's, for its boundary scalings."""
HUBER = 1e-3
LEFT_ALONE = ("conv_in", "conv_out", "time_embedding")
"""Layers without a LoRA."""


class Adapted(nn.Module):
    """A Linear or Conv2d with a LoRA: W + B A, alpha equal to the rank. Only A and B are trained."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        weight = layer.weight
        self.down = nn.Parameter(weight.new_empty(rank, *weight.shape[1:]))
        self.up = nn.Parameter(weight.new_zeros(len(weight), rank, *[1] * (weight.dim() - 2)))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        # Small layers, large batches: the sum of the weights costs less than a second, narrow layer.
        layer = self.layer
        weight = layer.weight + (self.up.flatten(1) @ self.down.flatten(1)).view_as(layer.weight)
        if isinstance(layer, nn.Conv2d):
            return nn.functional.conv2d(x, weight, layer.bias, layer.stride, layer.padding)
        return nn.functional.linear(x, weight, layer.bias)


def adapt(unet: nn.Module, rank: int) -> dict[str, Adapted]:
    """Add a LoRA to all layers except LEFT_ALONE in place, and freeze everything else; return these layers by name."""
    unet.requires_grad_(False)
    adapted = {
        name: Adapted(layer, rank)
        for name, layer in unet.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.split(".")[0] not in LEFT_ALONE
    }
    for name, layer in adapted.items():
        unet.set_submodule(name, layer)
    return adapted


class ConsistencyLoss:
    """The loss of a step: the distance of the student's images from both ends of one of the teacher's steps."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        text: nn.Module,
        ids: Tensor,
        args: argparse.Namespace,
        batch: int,
    ) -> None:
        self.teacher, self.student, self.text = teacher, student, text
        self.batch, self.device, self.skip, self.guidance = batch, args.device, args.skip, args.guidance
        self.latents = torch.empty(0)
        self.ids = ids.to(args.device)
        self.empty = empty_caption(args.device).long()
        kept = DDPMScheduler(**networks.SCHEDULE).alphas_cumprod.to(args.device)
        self.signal, self.spread = kept.sqrt(), (1 - kept).sqrt()
        # A trajectory ends in the picture itself. The schedule's own timestep 0 still holds 3 % of noise, which the
        # student would learn to draw.
        self.signal[0], self.spread[0] = 1.0, 0.0
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        n, device = self.batch, self.device
        index = torch.randint(len(self.latents), (n,), device=device)
        ids = self.ids[index, torch.randint(self.ids.shape[1], (n,), device=device)].long()
        latents = self.latents[index].float()
        # In even strata, which steadies the loss; of the timesteps that LCMScheduler starts from.
        strata = (torch.arange(n, device=device) + torch.rand(n, device=device)) / n
        every = len(self.signal) // ORIGINAL_STEPS
        start = ((strata * ORIGINAL_STEPS).long() + 1).clamp(max=ORIGINAL_STEPS) * every - 1
        return self.compute(latents, torch.randn_like(latents), start, ids)

    def _compute(self, latents: Tensor, noise: Tensor, start: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            words = self.text(ids).last_hidden_state
            nothing = self.text(self.empty).last_hidden_state.expand_as(words)
            end = (start - self.skip).clamp(min=0)
            here = self.noised(latents, noise, start)
            there = self.solve(here, start, end, words, nothing)
            target = self.consistent(there, end, words)
        error = self.consistent(here, start, words) - target
        # Pseudo-Huber: nearly the absolute error, with a gradient that fades where both ends agree.
        return ((error.square() + HUBER**2).sqrt() - HUBER).mean(), torch.zeros(0, device=latents.device)

    def noised(self, picture: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        return self._of(self.signal, at) * picture + self._of(self.spread, at) * noise

    def solve(self, x: Tensor, start: Tensor, end: Tensor, words: Tensor, nothing: Tensor) -> Tensor:
        """One DDIM step of the guided teacher, from timestep `start` to `end`."""
        both = torch.cat([nothing, words])
        made = self.teacher(x.repeat(2, 1, 1, 1), start.repeat(2), encoder_hidden_states=both).sample
        free, conditioned = made.chunk(2)
        v = free + self.guidance * (conditioned - free)
        picture = self._of(self.signal, start) * x - self._of(self.spread, start) * v
        noise = self._of(self.signal, start) * v + self._of(self.spread, start) * x
        return self.noised(picture, noise, end)

    def consistent(self, x: Tensor, at: Tensor, words: Tensor) -> Tensor:
        """The student's picture from x at timestep `at`, as LCMScheduler reads it: x itself at timestep 0."""
        v = self.student(x, at, encoder_hidden_states=words).sample
        picture = self._of(self.signal, at) * x - self._of(self.spread, at) * v
        scaled = (at * TIMESTEP_SCALING).square()[:, None, None, None]
        c_skip = SIGMA_DATA**2 / (scaled + SIGMA_DATA**2)
        c_out = (scaled / (scaled + SIGMA_DATA**2)).sqrt()
        return c_skip * x + c_out * picture

    @staticmethod
    def _of(table: Tensor, at: Tensor) -> Tensor:
        return table[at][:, None, None, None]


def save(folder: Path, layers: dict[str, Adapted], facts: dict[str, str | int | float | bool]) -> None:
    """Write the LoRA in the PEFT library's layout, whole or not at all; `facts` go into the file's metadata."""
    state = {}
    for name, layer in layers.items():
        for role, matrix in (("A", layer.down), ("B", layer.up)):
            state[f"unet.{name}.lora_{role}.weight"] = matrix.detach().to("cpu", torch.float16).contiguous()
    with networks.atomic_folder(folder) as unsaved:
        unsaved.mkdir(parents=True)
        metadata = {"format": "pt", "training": json.dumps(facts, sort_keys=True)}
        save_file(state, unsaved / FILE, metadata)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="the folder that holds tiny-sd")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--skip", type=int, default=20, help="timesteps that the teacher's step skips")
    parser.add_argument("--guidance", type=float, default=GUIDANCE, help="the teacher's")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate at its highest")
    parser.add_argument("--ema", type=float, default=0.999)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision(
        "high"
    )  # TF32; bf16 would round away what neighbours on the ODE differ in
    labels = scenes.sample(args.scenes, POOL_SEED)
    pipe = StableDiffusionPipeline.from_pretrained(args.weights / networks.SD_FOLDER, dtype=torch.float32)
    pipe.to(args.device)
    for model in (pipe.unet, pipe.text_encoder, pipe.vae):
        model.requires_grad_(False).eval()
    teacher = pipe.unet.to(memory_format=torch.channels_last)
    student = copy.deepcopy(teacher)
    layers = adapt(student, args.rank)
    batch = args.batch or 512
    ids = token_pool(labels, POOL_SEED + 1)
    loss = ConsistencyLoss(teacher, student, pipe.text_encoder, ids, args, batch)
    loss.latents = latent_pool(pipe.vae, labels, args.device)
    parameters = sum(layer.down.numel() + layer.up.numel() for layer in layers.values())
    print(f"{NAME}  {len(labels)} latents, {parameters} parameters beside {len(layers)} layers", flush=True)
    training = loop.Loop(
        NAME,
        {"unet": student},
        loss,
        figures=(),
        rate=args.rate,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{NAME}.pt",
        seed=18,
        warm_up=50,
        ema=args.ema,
        decay=0.0,
    )
    training.run()
    finished = training.finished
    training.use_ema()
    facts = {
        "method": "latent consistency distillation, arXiv 2311.05556",
        "teacher": networks.SD_FOLDER,
        "guidance": args.guidance,
        "skip": args.skip,
        "original_inference_steps": ORIGINAL_STEPS,
        "rank": args.rank,
        "batch": batch,
        "scenes": args.scenes,
        "rate": args.rate,
        "ema": args.ema,
        "steps": training.step,
        "seconds": round(training.elapsed_s, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "finished": finished,
    }
    save(loop.destination(args.out, FOLDER, finished), layers, facts)


if __name__ == "__main__":
    main()
