"""Train a LoRA that gives an embedded model a style: its objects as outlines.

    python -m tinyworld.train_lora tiny-sd --out build/lora --minutes 5
    python -m tinyworld.train_lora tiny-flux --out build/lora --minutes 5

The model is trained on as it was made (`train_sd`, `train_flux`), with the same captions, on images in the style. So it
learns that "a red circle" is a red ring; what the captions ask for stays. Attention and feed-forward layers get a
LoRA of rank `--rank`, and a UNet's ResNets too. Minutes on a CPU are enough. The result is one fp16 file in the PEFT
library's layout, `--out`/MODEL-outlines.safetensors, for `lora(FILE)` and `pipe.load_lora_weights`.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyworld import flux, loop, networks, scenes
from tinyworld.evaluate import WEIGHTS
from tinyworld.train_flux import noise_levels
from tinyworld.train_lcm import Adapted
from tinyworld.train_sd import empty_caption, pick_captions, token_pool

STYLE = "outlines"
MODELS = ("tiny-sd", "tiny-flux")
POOL_SEED = 29
LINE = 6.0
"""Width of the outlines in pixels: less than a latent cell, which has 8, and wide enough for every shape."""
RANKS = {"tiny-sd": 4, "tiny-flux": 8}
CAPTION_GUIDANCE = 1.0
"""tiny-flux's guidance input in training: at 1 it predicts what the caption says, unguided."""
LAYERS: dict[str, Callable[[str], bool]] = {
    "tiny-sd": lambda name: ".resnets." in name or ".attentions." in name,
    "tiny-flux": lambda name: any(part in name for part in (".attn.", ".ff", ".proj_mlp", ".proj_out")),
}


def outlined(labels: scenes.Labels, paint: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Images (N, 3, 128, 128) in 0..1 of scenes whose objects are outlines, through which the background shows."""
    filled, distance = scenes.draw(labels, paint)
    _, ground = paint or scenes.paints(labels.count.device)
    background = ground[labels.tone, labels.kind][:, None]
    inside = (0.5 - (distance + LINE)).clamp(0, 1)[:, None]
    return filled + inside * (background - filled)


@torch.no_grad()
def latent_pool(vae: nn.Module, labels: scenes.Labels, device: str) -> Tensor:
    """(N, channels, 16, 16) latents of every scene in the style, on the device."""
    paint = scenes.paints(device)
    latents = []
    for start in range(0, len(labels), 64):
        images = outlined(labels[start : start + 64].to(device), paint) * 2 - 1
        latents.append(vae.encode(images).latent_dist.mean * vae.config.scaling_factor)
    return torch.cat(latents)


def adapt(denoiser: nn.Module, rank: int, chosen: Callable[[str], bool]) -> dict[str, Adapted]:
    """Add a LoRA to the chosen layers in place, and freeze everything else; return these layers by name."""
    denoiser.requires_grad_(False)
    adapted = {
        name: Adapted(layer, rank)
        for name, layer in denoiser.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and chosen(name)
    }
    for name, layer in adapted.items():
        denoiser.set_submodule(name, layer)
    return adapted


class StyleLoss:
    """One step's loss, as in the training of the model itself: tiny-sd's predicted v, tiny-flux's velocity."""

    def __init__(
        self, pipe: DiffusionPipeline, latents: Tensor, ids: Tensor, batch: int, device: str
    ) -> None:
        self.pipe, self.batch, self.device = pipe, batch, device
        self.is_flow = hasattr(pipe, "transformer")
        self.latents = flux.pack(latents) if self.is_flow else latents
        self.ids, self.empty = ids.to(device), empty_caption(device)
        self.positions = flux.position_ids(device)
        kept = DDPMScheduler(**networks.SCHEDULE).alphas_cumprod.to(device)
        self.signal, self.spread = kept.sqrt(), (1 - kept).sqrt()

    def __call__(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.latents), (self.batch,), device=self.device)
        ids = pick_captions(self.ids, index, self.empty)
        latents = self.latents[index].float()
        error = (self._flow if self.is_flow else self._noised)(latents, torch.randn_like(latents), ids)
        return error.square().mean(), torch.zeros(0, device=self.device)

    def _noised(self, latents: Tensor, noise: Tensor, ids: Tensor) -> Tensor:
        strata = (
            torch.arange(self.batch, device=self.device) + torch.rand(self.batch, device=self.device)
        ) / self.batch
        steps = (strata * len(self.signal)).long()
        a, s = self.signal[steps][:, None, None, None], self.spread[steps][:, None, None, None]
        with torch.no_grad():
            words = self.pipe.text_encoder(ids).last_hidden_state
        made = self.pipe.unet(a * latents + s * noise, steps, encoder_hidden_states=words).sample
        return made - (a * noise - s * latents)

    def _flow(self, latents: Tensor, noise: Tensor, ids: Tensor) -> Tensor:
        sigma = noise_levels(self.batch, self.device)
        at = sigma[:, None, None]
        with torch.no_grad():
            prompts = flux.encode(self.pipe.text_encoder, self.pipe.text_encoder_2, ids)
        scale = torch.full((self.batch,), CAPTION_GUIDANCE, device=self.device)
        mixed = (1 - at) * latents + at * noise
        made = flux.velocity(self.pipe.transformer, mixed, sigma, prompts, self.positions, scale)
        return made - (noise - latents)


def save(file: Path, component: str, layers: dict[str, Adapted], facts: dict[str, str | int | float]) -> None:
    """Write the LoRA in the PEFT library's layout; `facts` go into the file's metadata."""
    state = {}
    for name, layer in layers.items():
        for role, matrix in (("A", layer.down), ("B", layer.up)):
            half = matrix.detach().to("cpu", torch.float16).contiguous()
            state[f"{component}.{name}.lora_{role}.weight"] = half
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file, {"format": "pt", "training": json.dumps(facts, sort_keys=True)})


def num_parameters(layers: Iterable[Adapted]) -> int:
    return sum(layer.down.numel() + layer.up.numel() for layer in layers)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="the folder that holds the model")
    parser.add_argument("--rank", type=int, help="None: the model's own (4 or 8)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate at its highest")
    parser.set_defaults(scenes=3000, minutes=5.0)
    args: argparse.Namespace = parser.parse_args()
    torch.manual_seed(0)
    rank, batch = args.rank or RANKS[args.model], args.batch or 16
    labels = scenes.sample(args.scenes, POOL_SEED)
    pipe = DiffusionPipeline.from_pretrained(args.weights / args.model, dtype=torch.float32)
    pipe.to(args.device)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    component = "transformer" if hasattr(pipe, "transformer") else "unet"
    denoiser = getattr(pipe, component)
    layers = adapt(denoiser, rank, LAYERS[args.model])
    loss = StyleLoss(
        pipe,
        latent_pool(pipe.vae, labels, args.device),
        token_pool(labels, POOL_SEED + 1),
        batch,
        args.device,
    )
    print(
        f"{args.model}  {num_parameters(layers.values())} parameters beside {len(layers)} layers", flush=True
    )
    training = loop.Loop(
        f"{args.model}-{STYLE}",
        {component: denoiser},
        loss,
        figures=(),
        rate=args.rate,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{args.model}-{STYLE}.pt",
        seed=POOL_SEED + 2,
        warm_up=20,
        ema=0.98,
        decay=0.0,
    )
    training.run()
    training.use_ema()
    facts: dict[str, str | int | float] = {
        "style": STYLE,
        "model": args.model,
        "rank": rank,
        "batch": batch,
        "scenes": args.scenes,
        "rate": args.rate,
        "steps": training.step,
        "seconds": round(training.elapsed_s, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    }
    if not all(math.isfinite(float(layer.up.detach().abs().max())) for layer in layers.values()):
        raise FloatingPointError(f"{args.model}: the LoRA is not finite")
    save(args.out / f"{args.model}-{STYLE}.safetensors", component, layers, facts)


if __name__ == "__main__":
    main()
