"""Train the VAE. It limits the quality of all models, so it gets enough time, and more weight on objects and edges.

python -m tinyworld.train_vae --out build/tinyworld --minutes 3.3 [--channels 16]
"""

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from tinyworld import loop, networks, scenes

POOL_SEED = 1
KL_WEIGHT = {4: 1e-5, 16: 1e-4}
"""By latent channels. Sixteen channels have spare capacity: with a larger weight unused channels stay noise."""


def add_channels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channels", type=int, choices=sorted(KL_WEIGHT), default=4, help="of the latents")


def latent_noise(channels: int, batch: int, device: str) -> Tensor:
    """(batch, channels, 16, 16) standard normal numbers."""
    return torch.randn(batch, channels, networks.LATENT_SIDE, networks.LATENT_SIDE, device=device)


def pixel_weights(distance: Tensor) -> Tensor:
    """(N, 1, H, W) weights of mean 1: an object counts 3 times its background, its edge up to 9 times."""
    weight = 1 + 2 * (distance < 1).float() + 6 * torch.exp(-((distance / 1.5) ** 2))
    return (weight / weight.mean())[:, None]


def picture_loss(made: Tensor, true: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted L1 + squared error of pictures in -1..1, and the plain squared error of pictures in 0..1."""
    error = made.float() - true
    weight = pixel_weights(distance)
    return (weight * (error.abs() + 4 * error.square())).mean(), error.square().mean() / 4


def psnr(squared_error: float) -> float:
    """Decibels, for pictures in 0..1."""
    return float(-10 * torch.tensor(squared_error).log10())


class VaeLoss:
    """One step's loss: a batch of scenes drawn on the spot, encoded, decoded, compared."""

    def __init__(self, vae: AutoencoderKL, args: argparse.Namespace, batch: int) -> None:
        self.vae, self.batch, self.device = vae, batch, args.device
        self.channels, self.kl_weight = args.channels, KL_WEIGHT[args.channels]
        self.pool = scenes.sample(args.scenes, POOL_SEED).to(args.device)
        self.paint = scenes.paints(args.device)
        self.draw = loop.compiled(scenes.draw, args)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.pool), (self.batch,), device=self.device)
        pictures, distance = self.draw(self.pool[index], self.paint)
        noise = latent_noise(self.channels, self.batch, self.device)
        return self.compute(pictures.contiguous(memory_format=torch.channels_last), distance, noise)

    def _compute(self, pictures: Tensor, distance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        pictures = pictures * 2 - 1
        with loop.mixed_precision(self.device):
            posterior = self.vae.encode(pictures).latent_dist
            mean, log_variance = posterior.mean.float(), posterior.logvar.float()
            latents = mean + (0.5 * log_variance).exp() * noise
            made = self.vae.decode(latents).sample
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss, squared_error = picture_loss(made, pictures, distance)
        return loss + self.kl_weight * kl, torch.stack([squared_error * 1000, kl])


@torch.no_grad()
def latent_statistics(vae: AutoencoderKL, device: str, number: int = 4096) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (channels,) of the latents of `number` scenes, their own noise included.

    A channel that the VAE has no use for has means near 0 and noise near 1: without its noise, whitening would blow
    it up to full size.
    """
    labels = scenes.sample(number, POOL_SEED + 1).to(device)
    distributions = [
        vae.encode(scenes.draw(labels[i : i + 256])[0] * 2 - 1).latent_dist for i in range(0, number, 256)
    ]
    latents = torch.cat([part.mean for part in distributions]).float()
    noise = torch.cat([part.var for part in distributions]).float().mean((0, 2, 3))
    return latents.mean((0, 2, 3)), (latents.var((0, 2, 3)) + noise).sqrt()


def load(folder: Path, device: str) -> AutoencoderKL:
    """The VAE in fp32 from its working folder."""
    return AutoencoderKL.from_pretrained(folder).to(device)


def main() -> None:
    parser = loop.arguments(__doc__)
    add_channels(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    name = networks.vae_name(args.channels)
    vae = networks.build_vae(args.channels).to(args.device).train()
    vae.to(memory_format=torch.channels_last)
    training = loop.Loop(
        name,
        {"vae": vae},
        VaeLoss(vae, args, args.batch or 64),
        figures=("mse_e3", "kl"),
        rate=8e-4,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{name}.pt",
        seed=2,
        decay=1e-4,
    )
    training.run()
    if not training.finished:
        return  # the denoiser and the tiny VAE wait for a VAE that stays as it is
    training.use_ema()
    vae.eval().to(memory_format=torch.contiguous_format)
    mean, std = latent_statistics(vae, args.device, min(4096, args.scenes))
    print(f"latents  mean {mean.tolist()}  std {std.tolist()}", flush=True)
    networks.whiten(vae, mean, std)
    networks.save_model(vae, args.out / name)


if __name__ == "__main__":
    main()
