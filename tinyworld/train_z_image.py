"""Train tiny-z-image: transformer and text encoder together, on the latents of tiny-flux's VAE.

    python -m tinyworld.train_z_image --out build/z-image --minutes 7

A rectified flow, x = (1 - sigma) image + sigma noise; the transformer predicts image - noise. A tenth of the captions
is empty, for guidance. At the end it writes the whole pipeline folder, `--out`/tiny-z-image, also after a run that
stopped early (--stop-s).
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from tinyworld import loop, scenes, tokenizer, z_image
from tinyworld.train_flux import noise_levels
from tinyworld.train_sd import empty_caption, latent_pool, pick_captions, token_pool
from tinyworld.train_vae import load

POOL_SEED = 23
VAE = Path("src/vivace/models/weights/tiny-flux/vae")


class FlowLoss:
    """One step's loss: noised latents of a random batch, their captions, the error of the predicted velocity."""

    def __init__(self, transformer, text_encoder, ids: Tensor, args: argparse.Namespace, batch: int) -> None:
        self.transformer, self.text_encoder, self.batch, self.device = (
            transformer,
            text_encoder,
            batch,
            args.device,
        )
        self.latents = torch.empty(0)  # (N, 64, 64) fp16
        self.ids = ids.to(args.device)
        self.empty = empty_caption(args.device)
        self.end = tokenizer.build().eos_token_id
        self.rotary = z_image.attend_in_real_numbers(transformer, args.device)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        n, device = self.batch, self.device
        index = torch.randint(len(self.latents), (n,), device=device)
        ids = pick_captions(self.ids, index, self.empty)
        latents = self.latents[index].float()
        return self.compute(latents, ids, torch.randn_like(latents), noise_levels(n, device))

    def _compute(self, latents: Tensor, ids: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        at = sigma[:, None, None]
        mixed = (1 - at) * latents + at * noise
        is_word = z_image.is_word(ids, self.end)
        with loop.mixed_precision(self.device):
            words = z_image.encode(self.text_encoder, ids)
            made = z_image.velocity(self.transformer, mixed, sigma, words, is_word, self.rotary)
        loss = (made.float() - (latents - noise)).square().mean()
        return loss, torch.zeros(0, device=self.device)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("--vae", type=Path, default=VAE, help="folder of the VAE whose latents it draws")
    parser.add_argument("--start-from", type=Path, help="a finished pipeline folder to train on from")
    args = parser.parse_args()
    torch.manual_seed(0)
    loop.avoid_broken_attention()
    labels = scenes.sample(args.scenes, POOL_SEED)
    transformer, text_encoder = z_image.build_transformer(), z_image.build_text_encoder()
    z_image.init_adaln_zero(transformer)
    if args.start_from:
        z_image.load_weights(args.start_from, transformer, text_encoder)
    transformer.to(args.device).train()
    text_encoder.to(args.device).train()
    loss = FlowLoss(transformer, text_encoder, token_pool(labels, POOL_SEED + 1), args, args.batch or 512)
    vae = load(args.vae, args.device).eval()
    loss.latents = z_image.pack(latent_pool(vae, labels, args.device))
    print(f"z-image  {len(labels)} latents, std {loss.latents[:4096].float().std().item():.3f}", flush=True)
    training = loop.Loop(
        "z-image",
        {"transformer": transformer, "text_encoder": text_encoder},
        loss,
        figures=(),
        rate=8e-4,
        budget=loop.budget_from(args),
        checkpoint=args.out / "z-image.pt",
        seed=24,
        warm_up=500,
        ema=0.9995,
    )
    training.run()
    finished = training.finished
    training.use_ema()
    folder = loop.destination(args.out, z_image.FOLDER, finished)
    z_image.save(folder, vae, transformer, text_encoder)


if __name__ == "__main__":
    main()
