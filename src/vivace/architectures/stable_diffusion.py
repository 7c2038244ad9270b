"""Stable Diffusion 1 and 2, SDXL: a UNet. Source: diffusers, UNet2DConditionModel and its pipelines."""

from vivace.architectures.family import Doubled, Family

STABLE_DIFFUSION = Family(
    name="Stable Diffusion",
    denoiser="UNet2DConditionModel",
    pipelines=("StableDiffusionPipeline", "StableDiffusionXLPipeline", "LatentConsistencyModelPipeline"),
    embeddings={
        "StableDiffusionPipeline": ("prompt_embeds", "negative_prompt_embeds"),
        "StableDiffusionXLPipeline": (
            "prompt_embeds",
            "negative_prompt_embeds",
            "pooled_prompt_embeds",
            "negative_pooled_prompt_embeds",
        ),
    },
    doubled=Doubled(),
    is_transformer=False,
    cells=lambda _: 1,
)
