"""Replace the VAE with a small distilled one (the TAESD family).

Why: with small images and few steps, VAE decoding is a large part of the call; the tiny decoder has 1.2 M parameters
    against 49.5 M (SD 1.5 at 512 px: 0.141 TFLOP against 2.515; FLUX.2 at 1024 px: 0.57 against 10.5). It needs much
    less peak memory.
Costs: fine detail is slightly softer, so the image differs. Others found an SSIM of 0.92 and 0.945 to what FLUX.2's own
    VAE decodes, and of 0.968 to Krea 2's (github.com/IonDen/mlx-taef).
Needs: a tiny VAE trained for the same latents: SD's, SDXL's, SD 3.5's, FLUX.1's, FLUX.2's (ERNIE-Image has the same),
    Qwen-Image's (Krea 2) or Qwen-Image 2.1's. For the last three diffusers has no class; vivace has, and exported
    scripts import it.
Source: github.com/madebyollin/taesd and taehv.
"""

from __future__ import annotations

from typing import ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts
from vivace.machinery.technique.script import Script, literal, written_call


class TinyVae(Technique):
    name: ClassVar[str] = "tiny_vae"
    summary: ClassVar[str] = "a small distilled VAE decoder"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SWAP,
        owns="module",
        same_picture=False,
        targetable=("vae",),
        default_targets=("vae",),
        saves_memory=("tiny_vae",),
        saved_share=0.8,
        is_stored=True,
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is not None and target.model.load_tiny_vae is None:
            return "no tiny VAE is known for this model's latents"
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        assert target.model.load_tiny_vae is not None
        old = target.module("vae")
        if type(old).__name__.startswith("AutoencoderTiny"):
            raise NoEffect("the pipeline already has a tiny VAE", already_so=True)
        tiny = torch.nn.Module.to(target.model.load_tiny_vae(), old.device, old.dtype)
        target.pipe.vae = tiny
        return Effect(
            changed={
                "vae.parameters_before": sum(p.numel() for p in old.parameters()),
                "vae.parameters": sum(p.numel() for p in tiny.parameters()),
            }
        )

    def script(self, target: Target) -> Script:
        arguments, dtype = target.model.tiny_vae_arguments, str(target.module("vae").dtype)
        if kind := target.model.tiny_vae_class:
            file = written_call("tiny_vae = hf_hub_download", *arguments)
            made = f"pipe.vae = read_tiny_vae(tiny_vae, {literal(kind)}, {dtype})"
            return Script(
                imports=("torch", "huggingface_hub:hf_hub_download", "vivace.models.load:read_tiny_vae"),
                lines=("# diffusers has no class for it; vivace has.", *file.splitlines(), made),
            )
        made = written_call("pipe.vae = AutoencoderTiny.from_pretrained", *arguments, dtype=dtype)
        return Script(imports=("torch", "diffusers:AutoencoderTiny"), lines=tuple(made.splitlines()))
