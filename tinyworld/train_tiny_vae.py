"""Train the tiny VAE on the big VAE's latents, so that both can decode the denoiser's latents.

    python -m tinyworld.train_tiny_vae --out build/tinyworld --minutes 6 [--channels 16]

Encoder and decoder are trained separately: the encoder to predict the big encoder's latents, the decoder to reconstruct
the scene from the big encoder's latents with a little noise.
"""

import argparse

import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import Tensor

from tinyworld import loop, networks, scenes
from tinyworld.train_vae import POOL_SEED, add_channels, latent_noise, load, picture_loss

MAX_LATENT_NOISE = 0.1
"""Relative to the latents' standard deviation, which is 1. A denoiser's latents differ slightly from the encoder's."""


class TinyVaeLoss:
    def __init__(
        self, tiny: AutoencoderTiny, vae: AutoencoderKL, args: argparse.Namespace, batch: int
    ) -> None:
        self.tiny, self.vae, self.batch, self.device = tiny, vae, batch, args.device
        self.channels = args.channels
        self.pool = scenes.sample(args.scenes, POOL_SEED).to(args.device)
        self.paint = scenes.paints(args.device)
        self.draw = loop.compiled(scenes.draw, args)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.pool), (self.batch,), device=self.device)
        pictures, distance = self.draw(self.pool[index], self.paint)
        noise = latent_noise(self.channels, self.batch, self.device)
        level = torch.rand(self.batch, 1, 1, 1, device=self.device) * MAX_LATENT_NOISE
        return self.compute(pictures.contiguous(memory_format=torch.channels_last), distance, noise * level)

    def _compute(self, pictures: Tensor, distance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        pictures = pictures * 2 - 1
        with loop.mixed_precision(self.device):
            with torch.no_grad():
                latents = self.vae.encode(pictures).latent_dist.mean
            guessed = self.tiny.encode(pictures).latents
            made = self.tiny.decode(latents + noise).sample
        loss, squared_error = picture_loss(made, pictures, distance)
        apart = (guessed.float() - latents).square().mean()
        return loss + 0.1 * apart, torch.stack([squared_error * 1000, apart])


def main() -> None:
    parser = loop.arguments(__doc__)
    add_channels(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    source = networks.vae_name(args.channels)
    name = f"tiny-{source}"
    loop.wait_for(args.out / source, name, args.stop_s)
    vae = load(args.out / source, args.device).eval().requires_grad_(False)
    tiny = networks.build_tiny_vae(args.channels).to(args.device).train()
    for model in (vae, tiny):
        model.to(memory_format=torch.channels_last)
    training = loop.Loop(
        name,
        {"vae": tiny},
        TinyVaeLoss(tiny, vae, args, args.batch or 64),
        figures=("mse_e3", "latent_mse"),
        rate=1e-3,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{name}.pt",
        seed=3,
        decay=1e-4,
    )
    training.run()
    training.use_ema()
    tiny.eval().to(memory_format=torch.contiguous_format)
    networks.save_tiny_vae(args.out / networks.TINY_VAE_FOLDERS[args.channels], tiny)


if __name__ == "__main__":
    main()
