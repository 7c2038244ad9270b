"""Train tiny-flux-schnell: four steps that follow tiny-flux's twenty-eight.

    python -m tinyworld.train_schnell --out build/flux --minutes 3.5

tiny-flux generates a pool of trajectories from noise with its usual guidance and steps; the five states at sigma 1,
3/4, 1/2, 1/4 and 0 are kept. From one state the student predicts the straight line to the next: the mean of the
teacher's velocity over seven of its steps. The trajectory is a deterministic function of its start, so a plain squared
error is enough; there is no discriminator and no pixel loss.
"""

import argparse
import random
from itertools import pairwise

import torch
from torch import Tensor, nn

from tinyworld import captions, flux, loop, scenes, tokenizer

POOL_SEED = 13
NAME = "flux-schnell"
BATCH = 1024
"""Trajectories drawn at once."""


def token_ids(number: int) -> Tensor:
    """(N, 32) int16 ids of captions of training scenes."""
    rng = random.Random(POOL_SEED)
    labels = scenes.sample(number, POOL_SEED)
    rows = [captions.write(full, rng) for full in captions.describe(labels)]
    return torch.tensor(tokenizer.encode(tokenizer.build(), rows), dtype=torch.int16)


class Trajectories:
    """The teacher's states at the student's noise levels."""

    def __init__(self, teacher: nn.Module, clip: nn.Module, t5: nn.Module, args: argparse.Namespace) -> None:
        self.teacher, self.clip, self.t5, self.device = teacher, clip, t5, args.device
        self.positions = flux.position_ids(args.device)
        self.velocity = loop.compiled(self._velocity, args)

    def _velocity(self, latents: Tensor, sigma: Tensor, prompts: flux.PromptEmbeddings) -> Tensor:
        with torch.no_grad(), loop.mixed_precision(self.device):
            scale = torch.full_like(sigma, flux.GUIDANCE)
            return flux.velocity(self.teacher, latents, sigma, prompts, self.positions, scale).float()

    @torch.no_grad()
    def draw(self, ids: Tensor, seed: int) -> Tensor:
        """(N, 5, 64, 64) fp16 states, from pure noise to picture."""
        generator = torch.Generator(self.device).manual_seed(seed)
        prompts = flux.encode(self.clip, self.t5, ids.to(self.device).long())
        shape = (len(ids), flux.TOKENS, flux.TOKEN_WIDTH)
        latents = torch.randn(shape, device=self.device, generator=generator)
        levels, every = flux.sigmas(flux.STEPS), flux.STEPS // flux.SCHNELL_STEPS
        kept = [latents.half()]
        for step, (now, following) in enumerate(pairwise(levels), 1):
            sigma = torch.full((len(ids),), now, device=self.device)
            latents = latents + (following - now) * self.velocity(latents, sigma, prompts)
            if step % every == 0:
                kept.append(latents.half())
        return torch.stack(kept, dim=1)

    def pool(self, ids: Tensor, batch: int = BATCH) -> Tensor:
        """All of them. The last, shorter batch is dropped rather than compiled anew."""
        batch = min(batch, len(ids))
        starts = range(0, len(ids) - batch + 1, batch)
        return torch.cat([self.draw(ids[start : start + batch], POOL_SEED + start) for start in starts])


class SchnellLoss:
    """One step's loss: at a random state of a random trajectory, the straight line to the next state."""

    def __init__(self, student, clip, t5, ids: Tensor, args: argparse.Namespace, batch: int) -> None:
        self.student, self.clip, self.t5 = student, clip, t5
        self.batch, self.device = batch, args.device
        self.ids, self.states = ids.to(args.device), torch.empty(0)
        self.positions = flux.position_ids(args.device)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        n, device = self.batch, self.device
        index = torch.randint(len(self.states), (n,), device=device)
        stage = torch.arange(n, device=device) % flux.SCHNELL_STEPS
        return self.compute(
            self.states[index, stage].float(),
            self.states[index, stage + 1].float(),
            1 - stage / flux.SCHNELL_STEPS,
            self.ids[index].long(),
        )

    def _compute(self, here: Tensor, there: Tensor, sigma: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with loop.mixed_precision(self.device):
            with torch.no_grad():
                prompts = flux.encode(self.clip, self.t5, ids)
            made = flux.velocity(self.student, here, sigma, prompts, self.positions, None).float()
        target = (here - there) * flux.SCHNELL_STEPS
        return (made - target).square().mean(), torch.zeros(0, device=self.device)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("--trajectories", type=int, default=60 * BATCH)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    loop.avoid_broken_attention()
    ids = token_ids(args.trajectories)
    folder = args.out / flux.FOLDER
    teacher, clip, t5 = (
        build().to(args.device).eval().requires_grad_(False)
        for build in (flux.build_transformer, flux.build_clip_text, flux.build_t5)
    )
    student = flux.without_guidance(teacher).train()
    for transformer in (teacher, student):
        flux.embed_latents_in_fp32(transformer)
    loss = SchnellLoss(student, clip, t5, ids, args, args.batch or 512)
    trajectories = Trajectories(teacher, clip, t5, args)
    if args.device != "cpu" and not folder.exists():  # compile on what is not trained yet
        loss.states = trajectories.draw(ids[:BATCH], POOL_SEED)
        loss()[0].backward()
        student.zero_grad(set_to_none=True)
    loop.wait_for(folder, NAME, args.stop_s)
    teacher.load_state_dict(flux.load_transformer(folder, args.device).state_dict())
    student.load_state_dict(flux.without_guidance(teacher).state_dict())
    for model, trained in zip((clip, t5), flux.load_text(folder, args.device), strict=True):
        model.load_state_dict(trained.state_dict())
    loss.states = trajectories.pool(ids)
    print(f"{NAME}  {len(loss.states)} trajectories", flush=True)
    training = loop.Loop(
        NAME,
        {"transformer": student},
        loss,
        figures=(),
        rate=5e-4,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{NAME}.pt",
        seed=14,
        ema=0.999,
    )
    training.run()
    finished = training.finished
    training.use_ema()
    flux.save_schnell(loop.destination(args.out, flux.SCHNELL_FOLDER, finished), student)


if __name__ == "__main__":
    main()
