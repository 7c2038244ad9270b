"""Train the UNet and the CLIP text encoder together on the VAE's latents, predicting v.

    python -m tinyworld.train_sd --out build/tinyworld --minutes 10.2

It may be started together with train_vae: it writes its captions and compiles, then waits for the VAE. At the end it
writes the whole pipeline folder, `--out`/tiny-sd, in fp16, also after a run that stopped early (--stop-s).
"""

import argparse
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from tinyworld import captions, loop, networks, scenes, tokenizer
from tinyworld.train_vae import load

POOL_SEED = 7
CAPTIONS_EACH = 2
EMPTY_CAPTIONS = 0.1
"""Share of the batch with an empty caption, for classifier-free guidance."""


def token_pool(labels: scenes.Labels, seed: int) -> Tensor:
    """(N, CAPTIONS_EACH, 32) int16 token ids of captions, each written in its own words."""
    rng = random.Random(seed)
    words = tokenizer.build()
    rows = []
    for full in captions.describe(labels):
        rows += [captions.write(full, rng) for _ in range(CAPTIONS_EACH)]
    ids = torch.cat(
        [
            torch.tensor(tokenizer.encode(words, rows[i : i + 20_000]), dtype=torch.int16)
            for i in range(0, len(rows), 20_000)
        ]
    )
    return ids.reshape(len(labels), CAPTIONS_EACH, tokenizer.MAX_LENGTH)


def empty_caption(device: str) -> Tensor:
    """(1, 32) int16 token ids."""
    return torch.tensor(tokenizer.encode(tokenizer.build(), [""]), dtype=torch.int16, device=device)


def pick_captions(pool: Tensor, index: Tensor, empty: Tensor) -> Tensor:
    """(N, 32) token ids: one caption of each scene at random, a tenth of them empty."""
    n, device = len(index), pool.device
    ids = pool[index, torch.randint(CAPTIONS_EACH, (n,), device=device)]
    return torch.where(torch.rand(n, 1, device=device) < EMPTY_CAPTIONS, empty, ids).long()


@torch.no_grad()
def latent_pool(vae: AutoencoderKL, labels: scenes.Labels, device: str) -> Tensor:
    """(N, channels, 16, 16) fp16 latents of every scene, on the device: encoding costs twice a denoiser's step."""
    out = []
    paint = scenes.paints(device)
    for i in range(0, len(labels), 512):
        pictures, _ = scenes.draw(labels[i : i + 512].to(device), paint)
        pictures = (pictures * 2 - 1).contiguous(memory_format=torch.channels_last)
        with loop.mixed_precision(device):
            mean = vae.encode(pictures).latent_dist.mean
        out.append((mean.float() * vae.config.scaling_factor).half().contiguous())
    return torch.cat(out)


class DenoiserLoss:
    """One step's loss: noised latents of a random batch, their captions, the error of the predicted v."""

    def __init__(
        self, unet: nn.Module, text: nn.Module, ids: Tensor, args: argparse.Namespace, batch: int
    ) -> None:
        self.unet, self.text, self.batch, self.device = unet, text, batch, args.device
        self.latents = torch.empty(0)
        self.ids = ids.to(args.device)
        self.empty = empty_caption(args.device)
        kept = DDPMScheduler(**networks.SCHEDULE).alphas_cumprod.to(args.device)
        self.signal, self.spread = kept.sqrt(), (1 - kept).sqrt()
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        n, device = self.batch, self.device
        index = torch.randint(len(self.latents), (n,), device=device)
        ids = pick_captions(self.ids, index, self.empty)
        latents = self.latents[index].float()
        # Timesteps in even strata: each batch covers all of them, which steadies the loss.
        spread = (torch.arange(n, device=device) + torch.rand(n, device=device)) / n
        steps = (spread * len(self.signal)).long()
        return self.compute(latents, ids, torch.randn_like(latents), steps)

    def _compute(self, latents: Tensor, ids: Tensor, noise: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        a, s = self.signal[steps][:, None, None, None], self.spread[steps][:, None, None, None]
        with loop.mixed_precision(self.device):
            words = self.text(ids).last_hidden_state
            made = self.unet(a * latents + s * noise, steps, encoder_hidden_states=words).sample
        loss = (made.float() - (a * noise - s * latents)).square().mean()
        return loss, torch.zeros(0, device=latents.device)

    def compile_now(self) -> None:
        """Compile on noise, while the VAE is still in training."""
        side = networks.LATENT_SIDE
        shape = (self.batch, networks.LATENT_CHANNELS, side, side)
        zeros = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        noise = torch.randn(shape, device=self.device)
        self.compute(noise, self.empty.long().repeat(self.batch, 1), noise, zeros)[0].backward()
        self.unet.zero_grad(set_to_none=True)
        self.text.zero_grad(set_to_none=True)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument(
        "--start-from", type=Path, help="a finished pipeline folder to train on from, VAE included"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    labels = scenes.sample(args.scenes, POOL_SEED)
    unet = networks.build_unet().to(args.device).train()
    unet.to(memory_format=torch.channels_last)
    text = networks.build_text_encoder().to(args.device).train()
    if args.start_from:
        unet.load_state_dict(UNet2DConditionModel.from_pretrained(args.start_from / "unet").state_dict())
        words = CLIPTextModel.from_pretrained(args.start_from / "text_encoder", dtype=torch.float32)
        text.load_state_dict(words.state_dict())
        networks.save_model(load(args.start_from / "vae", "cpu"), args.out / "vae")
    loss = DenoiserLoss(unet, text, token_pool(labels, POOL_SEED + 1), args, args.batch or 512)
    if args.device != "cpu" and not (args.out / "vae").exists():
        loss.compile_now()
    loop.wait_for(args.out / "vae", "sd", args.stop_s)
    vae = load(args.out / "vae", args.device).eval()
    loss.latents = latent_pool(vae, labels, args.device)
    print(f"sd  {len(labels)} latents, std {loss.latents[:4096].float().std().item():.3f}", flush=True)
    training = loop.Loop(
        "sd",
        {"unet": unet, "text": text},
        loss,
        figures=(),
        rate=6e-4,
        budget=loop.budget_from(args),
        checkpoint=args.out / "sd.pt",
        seed=4,
        warm_up=500,
        ema=0.9995,
    )
    training.run()
    training.use_ema()
    unet.to(memory_format=torch.contiguous_format)
    networks.save_sd(args.out / networks.SD_FOLDER, vae, unet, text)


if __name__ == "__main__":
    main()
