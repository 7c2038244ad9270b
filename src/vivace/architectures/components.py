"""The networks of a pipeline without their weights, and those that several families share.

Each is its class with the arguments in which its published config.json differs from the class's defaults: enough to
count parameters and FLOPs without memory, and to build the pipeline with random weights (`vivace.models.synthetic`).
Sources are the config.json files of the repositories that comments name. Of transformers after FLUX.1 these were not
at hand: theirs are the defaults of diffusers 0.42.1 and transformers, which are those of the published models,
diffusers' conversion scripts, and configurations that public repositories quote from the hub. The number of parameters
of every denoiser and language model was compared with the published one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.architectures.entry import Entry, StoredPart
from vivace.foundation.spec.base import Spec

Library = Literal["diffusers", "transformers", "vivace.machinery.tiny_vaes"]


class ComponentConfig(Spec):
    """A network's class, its library, and its constructor arguments (lists, since JSON has no tuples)."""

    library: Library
    class_name: str
    config: dict[str, Any]


class Architecture(Spec):
    """A whole pipeline without its weights, of a native size in pixels; without a `tiny_vae` none is known.

    `components` and further `arguments` are those of the pipeline's constructor; `text_lengths` is the number of tokens
    per prompt for each text encoder.
    """

    name: str
    pipeline: str
    components: dict[str, ComponentConfig]
    text_lengths: dict[str, int]
    scheduler: ComponentConfig
    tiny_vae: ComponentConfig | None
    height: int
    width: int
    arguments: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entry: Entry,
        components: dict[str, ComponentConfig],
        scheduler: ComponentConfig,
        text_lengths: dict[str, int],
        tiny_vae: ComponentConfig | None = None,
        **arguments: Any,
    ) -> Architecture:
        """Return the architecture of a model of the catalogue, whose name, pipeline and size it has. A tiny VAE of
        vivace's own class is named by the entry's files of it."""
        stored = entry.origin.tiny_vae
        if isinstance(stored, StoredPart) and stored.class_name is not None:
            kind = stored.class_name
            tiny_vae = ComponentConfig(library="vivace.machinery.tiny_vaes", class_name=kind, config={})
        return cls(
            name=entry.name,
            pipeline=entry.pipeline,
            components=components,
            text_lengths=text_lengths,
            scheduler=scheduler,
            tiny_vae=tiny_vae,
            height=entry.height,
            width=entry.width,
            arguments=arguments,
        )

    @property
    def denoiser(self) -> Literal["unet", "transformer"]:
        """Name of the component that is called at every step."""
        return "unet" if "unet" in self.components else "transformer"

    def changed(self, **configs: dict[str, Any]) -> Architecture:
        """Return a copy with other arguments for some components: `changed(unet={"layers_per_block": 1})`."""
        unknown = set(configs) - set(self.components)
        if unknown:
            raise ValueError(
                f"{self.name} has no {', '.join(sorted(unknown))}; it has {', '.join(self.components)}"
            )
        components = self.components | {
            name: reconfigure(self.components[name], **config) for name, config in configs.items()
        }
        return self.model_copy(update={"components": components})


def reconfigure(component: ComponentConfig, **config: Any) -> ComponentConfig:
    return component.model_copy(update={"config": component.config | config})


def of_diffusers(class_name: str, **config: Any) -> ComponentConfig:
    return ComponentConfig(library="diffusers", class_name=class_name, config=config)


def of_transformers(class_name: str, **config: Any) -> ComponentConfig:
    return ComponentConfig(library="transformers", class_name=class_name, config=config)


# The published eos_token_id of 2 is a mistake that must be kept: with it, the pooled vector is taken at the highest id,
# which is the true end token, 49407.
_CLIP = {
    "vocab_size": 49408,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 77,
}
# openai/clip-vit-large-patch14, as text_encoder of SD 1.5, SDXL and FLUX.1.
CLIP_L = of_transformers(
    "CLIPTextModel",
    **_CLIP,
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
    num_hidden_layers=12,
    projection_dim=768,
    hidden_act="quick_gelu",
)
# laion/CLIP-ViT-bigG-14-laion2B-39B-b160k, as text_encoder_2 of SDXL.
OPEN_CLIP_BIGG = of_transformers(
    "CLIPTextModelWithProjection",
    **_CLIP,
    hidden_size=1280,
    intermediate_size=5120,
    num_attention_heads=20,
    num_hidden_layers=32,
    projection_dim=1280,
    hidden_act="gelu",
)
# google/t5-v1_1-xxl, its encoder, as text_encoder_2 of FLUX.1.
T5_XXL = of_transformers(
    "T5EncoderModel",
    vocab_size=32128,
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_decoder_layers=24,
    num_heads=64,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    decoder_start_token_id=0,
)
# Of Stable Diffusion, SDXL, SD 3.5, FLUX.1, FLUX.2, Z-Image and CogView4.
KL: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}
# black-forest-labs/FLUX.1-dev's, which Z-Image has too.
FLUX_VAE = of_diffusers(
    "AutoencoderKL",
    **KL,
    sample_size=1024,
    latent_channels=16,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
# madebyollin/taef1; taesd3 has the same architecture.
TAEF1 = of_diffusers("AutoencoderTiny", latent_channels=16)


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": rope(1_000_000.0),
}
QWEN3_4B: dict[str, Any] = QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
# Qwen/Qwen-Image, which Krea 2 has too: a video VAE, called with one frame. Its configuration is the class's default.
QWEN_IMAGE_VAE = of_diffusers("AutoencoderKLQwenImage", base_dim=96, z_dim=16)
FLOW = "FlowMatchEulerDiscreteScheduler"
# madebyollin/taesd and taesdxl differ in their weights alone.
TAESD = of_diffusers("AutoencoderTiny")
