"""Train tiny-flux: first a teacher with classifier-free guidance, then a student with the scale as an input.

    python -m tinyworld.train_flux --stage teacher --out build/flux --minutes 4.7
    python -m tinyworld.train_flux --stage student --out build/flux --minutes 2.2

Both are rectified flows: latents are mixed with noise at level sigma, x = (1 - sigma) image + sigma noise, and the
transformer predicts the velocity noise - image. The teacher is trained with both text encoders (its T5 is pretrained,
see `train_t5`), a tenth of the captions empty, its guidance input fixed at 1. The student starts from the teacher and
learns to predict in one forward, with the scale w as input, what the teacher predicts in two:
v(empty) + w (v(caption) - v(empty)). Its text encoders are the teacher's.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from tinyworld import flux, loop, networks, scenes, train_t5
from tinyworld.train_sd import empty_caption, latent_pool, pick_captions, token_pool
from tinyworld.train_vae import load

POOL_SEED = 11
EVEN_SHARE = 0.2
"""Share of a batch whose noise levels are uniform: logit-normal ones hardly ever come near 1, where sampling starts."""


def noise_levels(n: int, device: str) -> Tensor:
    """Return (n,) sigmas in 0..1: logit-normal, as in FLUX's training, some uniform; stratified for a steady loss."""
    even = int(n * EVEN_SHARE)

    def strata(number: int) -> Tensor:
        return (torch.arange(number, device=device) + torch.rand(number, device=device)) / max(1, number)

    return torch.cat([torch.special.ndtri(strata(n - even)).sigmoid(), strata(even)])


class FlowLoss:
    """Base of both stages: a random batch of packed latents, noise, noise levels, and token ids of captions."""

    def __init__(self, ids: Tensor, args: argparse.Namespace, batch: int) -> None:
        self.batch, self.device = batch, args.device
        self.latents = torch.empty(0)  # (N, 64, 64) fp16, once the VAE is there
        self.ids = ids.to(args.device)
        self.empty = empty_caption(args.device)
        self.positions = flux.position_ids(args.device)
        self.ones = torch.ones(batch, device=args.device)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        n, device = self.batch, self.device
        index = torch.randint(len(self.latents), (n,), device=device)
        ids = pick_captions(self.ids, index, self.empty)
        latents = self.latents[index].float()
        scale = torch.rand(n, device=device) * flux.MAX_GUIDANCE
        return self.compute(latents, ids, torch.randn_like(latents), noise_levels(n, device), scale)

    def compile_now(self) -> None:
        """Compile on noise, while the VAE is still in training."""
        noise = torch.randn(self.batch, flux.TOKENS, flux.TOKEN_WIDTH, device=self.device)
        sigma = noise_levels(self.batch, self.device)
        ids, other = self.empty.long().repeat(self.batch, 1), torch.randn_like(noise)
        self.compute(noise, ids, other, sigma, torch.rand_like(sigma))[0].backward()

    def _compute(
        self, latents: Tensor, ids: Tensor, noise: Tensor, sigma: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        at = sigma[:, None, None]
        mixed = (1 - at) * latents + at * noise
        with loop.mixed_precision(self.device):
            made, target = self._made_and_target(mixed, latents, ids, noise, sigma, scale)
        return (made.float() - target.float()).square().mean(), torch.zeros(0, device=self.device)

    def _made_and_target(self, mixed, latents, ids, noise, sigma, scale) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class TeacherLoss(FlowLoss):
    """The true velocity, from the caption or from none."""

    def __init__(self, transformer, clip, t5, ids, args, batch) -> None:
        super().__init__(ids, args, batch)
        self.transformer, self.clip, self.t5 = transformer, clip, t5

    def _made_and_target(self, mixed, latents, ids, noise, sigma, scale) -> tuple[Tensor, Tensor]:
        prompts = flux.encode(self.clip, self.t5, ids)
        return flux.velocity(
            self.transformer, mixed, sigma, prompts, self.positions, self.ones
        ), noise - latents


class StudentLoss(FlowLoss):
    """The teacher's guided velocity, with a random scale for each image."""

    def __init__(self, student, teacher, clip, t5, ids, args, batch) -> None:
        super().__init__(ids, args, batch)
        self.student, self.teacher, self.clip, self.t5 = student, teacher, clip, t5

    def _made_and_target(self, mixed, latents, ids, noise, sigma, scale) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            prompts = flux.encode(self.clip, self.t5, ids)
            empty = flux.encode(self.clip, self.t5, self.empty.long())
            # One call on twice the batch, as guidance is usually drawn: half as much to compile as two calls.
            both = flux.PromptEmbeddings(
                *(torch.cat([a, b.expand_as(a)]) for a, b in zip(prompts, empty, strict=True))
            )
            twice = mixed.repeat(2, 1, 1), sigma.repeat(2)
            made = flux.velocity(self.teacher, *twice, both, self.positions, self.ones.repeat(2)).float()
            conditional, unconditional = made.chunk(2)
            target = unconditional + scale[:, None, None] * (conditional - unconditional)
        return flux.velocity(self.student, mixed, sigma, prompts, self.positions, scale), target


def packed_pool(vae, labels: scenes.Labels, device: str) -> Tensor:
    """(N, 64, 64) fp16: every scene's latents as the transformer takes them."""
    return flux.pack(latent_pool(vae, labels, device))


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("--stage", choices=("teacher", "student"), required=True)
    parser.add_argument(
        "--start-from", type=Path, help="a finished folder of this stage to train on from, but for its T5"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    loop.avoid_broken_attention()
    name, batch = f"flux-{args.stage}", args.batch or 512
    labels = scenes.sample(args.scenes, POOL_SEED)
    ids = token_pool(labels, POOL_SEED + 1)
    clip, t5, transformer = (
        build().to(args.device).train()
        for build in (flux.build_clip_text, flux.build_t5, flux.build_transformer)
    )
    flux.embed_latents_in_fp32(transformer)
    if args.stage == "teacher":
        # Its bias is learned and shared by the whole batch, which the fused kernels' backward is not made for.
        t5.set_attn_implementation("eager")
        loss: FlowLoss = TeacherLoss(transformer, clip, t5, ids, args, batch)
        modules = {"transformer": transformer, "clip": clip, "t5": t5}
        rate, warm_up, ema = (5e-4 if args.start_from else 8e-4), 500, 0.9995
    else:
        teacher = flux.build_transformer().to(args.device)
        flux.embed_latents_in_fp32(teacher)
        for module in (clip, t5, teacher):
            module.eval().requires_grad_(False)
        loss = StudentLoss(transformer, teacher, clip, t5, ids, args, batch)
        modules = {"transformer": transformer}
        rate, warm_up, ema = 3e-4, 100, 0.998
    if args.device != "cpu":  # on noise, while the models that it waits for are still in training
        loss.compile_now()
        for module in modules.values():
            module.zero_grad(set_to_none=True)
    source = args.out / networks.vae_name(flux.CHANNELS)
    loop.wait_for(source, name, args.stop_s)
    vae = load(source, args.device).eval()
    loss.latents = packed_pool(vae, labels, args.device)
    if args.stage == "teacher":
        loop.wait_for(args.out / train_t5.FOLDER, name, args.stop_s)
        flux.init_adaln_zero(transformer)
        if args.start_from:
            transformer.load_state_dict(flux.load_transformer(args.start_from, args.device).state_dict())
            clip.load_state_dict(flux.load_text(args.start_from, args.device)[0].state_dict())
        t5.load_state_dict(train_t5.load(args.out / train_t5.FOLDER).state_dict())
    else:
        folder = args.out / flux.TEACHER_FOLDER
        loop.wait_for(folder, name, args.stop_s)
        for model, trained in zip((clip, t5), flux.load_text(folder, args.device), strict=True):
            model.load_state_dict(trained.state_dict())
        teacher.load_state_dict(flux.load_transformer(folder, args.device).state_dict())
        start = flux.load_transformer(args.start_from, args.device) if args.start_from else teacher
        transformer.load_state_dict(start.state_dict())
    print(f"{name}  {len(labels)} latents, std {loss.latents[:4096].float().std().item():.3f}", flush=True)
    training = loop.Loop(
        name,
        modules,
        loss,
        figures=(),
        rate=rate,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{name}.pt",
        seed=12,
        warm_up=warm_up,
        ema=ema,
    )
    training.run()
    finished = training.finished
    training.use_ema()
    folder = flux.TEACHER_FOLDER if args.stage == "teacher" else flux.FOLDER
    flux.save(loop.destination(args.out, folder, finished), vae, transformer, clip, t5)


if __name__ == "__main__":
    main()
