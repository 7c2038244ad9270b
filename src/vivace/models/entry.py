"""What is known of a model beforehand: how it is meant to be run, and where its weights come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.spec.base import Spec


class Part(Spec):
    """Files of a repository of the Hugging Face hub at a commit.

    As a component: either its folder's files (config.json and weights), or one .safetensors file whose configuration
    is the one of the pipeline that it goes into.
    """

    repo: str
    revision: str
    files: tuple[str, ...] = Field(min_length=1)


class Embedded(Spec):
    """Weights that ship with vivace: folders in diffusers' format below models/weights.

    With a `base`, `folder` holds only the components in which the model differs from it.
    """

    folder: str
    base: str | None = None
    tiny_vae: str | None = None


class Hub(Spec):
    """A repository of the Hugging Face hub in diffusers' format.

    revision: a commit, tag or branch; None is the main branch.
    variants: which weights to take where a component has several, the best first, those without a variant's name
        last; "fp16" names files like model.fp16.safetensors. None: in half precision, as the denoiser's kind runs best.
    parts: components that other repositories give in place of its own.
    lora: a LoRA that is merged into the denoiser's weights, so that it costs nothing at each step.
    without: components that are left out.
    download_bytes: what is fetched in all, about.
    """

    repo: str
    revision: str | None = None
    variants: tuple[str, ...] | None = None
    parts: dict[str, Part] = Field(default={})
    lora: Part | None = None
    without: tuple[str, ...] = ()
    tiny_vae: Part | None = None
    download_bytes: int | None = None


class Sampler(Spec):
    """A scheduler class of diffusers and in what it differs from the repository's own configuration."""

    class_name: str
    overrides: dict[str, Any] = Field(default={})


class FewSteps(Spec):
    """A LoRA that makes the model draw in few steps; fields as of `vivace.contract.technique.Distillation`.

    lora: one file on the hub, or of those that ship with vivace, below models/weights.
    """

    kind: Literal["lcm", "lightning", "hyper", "turbo"]
    lora: Part | str
    steps: tuple[int, ...] = Field(min_length=1)
    guidance_scale: float
    scheduler: Sampler
    scale: float = 1.0


class Entry(Spec):
    """How a model is meant to be run by those who published it: what `baseline` stands for.

    pipeline: its class in diffusers.
    size_multiple: what height and width must be a multiple of, in pixels.
    cuda_dtype: the precision on a GPU ("fp16", "bf16"); CPUs run fp32.
    scheduler: in place of the repository's own; None where that is the one to use.
    clip_skip: layers of CLIP that are skipped, as diffusers counts them: 0 is the layer that the pipeline takes by
        itself, which for SDXL is the last but one.
    max_sequence_length: tokens that a FluxPipeline must be told; it pads prompts to 512 by itself.
    threads: CPU threads to draw with. A picture depends on it in its last bits, so it is fixed; None: all cores.
    prompts: what is drawn unless something else is asked for.
    prompt_set: the key in `vivace.models.prompts` of prompts such as this model understands.
    few_steps: LoRAs that make it draw in fewer steps, the usual one of each kind first.
    scorer: the CLIP model that scores the pictures; None: whichever usual one is at hand.
    """

    name: str
    summary: str
    licence: str
    origin: Embedded | Hub
    pipeline: str
    height: int
    width: int
    size_multiple: int
    max_size: int
    num_inference_steps: int
    guidance_scale: float
    cuda_dtype: Literal["fp16", "bf16", "fp32"]
    prompts: tuple[str, ...] = Field(min_length=1)
    prompt_set: Literal["tinyworld", "real"]
    gated: bool = False
    scheduler: Sampler | None = None
    clip_skip: int | None = None
    max_sequence_length: int | None = None
    threads: int | None = None
    few_steps: tuple[FewSteps, ...] = ()
    scorer: str | None = None
