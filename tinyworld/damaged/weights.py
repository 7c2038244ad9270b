"""Noise on the weights of a component."""

import torch

from vivace.runtime.session import Session

WEIGHTS = {
    "denoiser noise": {
        f"denoiser, noise of {share}": ("denoiser", share) for share in (0.003, 0.05, 0.1, 0.2, 0.4)
    },
    "decoder noise": {f"decoder, noise of {share}": ("vae", share) for share in (0.003, 0.05, 0.15, 0.4)},
    "text noise": {
        f"text encoder, noise of {share}": ("text_encoder", share) for share in (0.003, 0.1, 0.3, 0.6)
    },
}
"""Noise on the weights of a component, in shares of each tensor's standard deviation, by kind and name."""


@torch.no_grad()
def spoil(session: Session, component: str, share: float) -> None:
    """Add noise to every matrix of a component's weights, in place."""
    pipe = session.pipe
    name = component
    if component == "denoiser":
        name = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    generator = torch.Generator().manual_seed(5)
    modules = [getattr(pipe, name)]
    if component == "text_encoder" and getattr(pipe, "text_encoder_2", None) is not None:
        modules.append(pipe.text_encoder_2)
    for module in modules:
        for weight in module.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std().cpu() * share
                weight += noise.to(weight)
