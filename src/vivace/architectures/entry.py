"""Schema of a catalogue entry: how a model is meant to be run, and where its weights come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec


class StoredPart(Spec):
    """Files of a Hugging Face hub repository at a commit: as a component, a folder's (config.json and weights), or one
    .safetensors file that takes its configuration from the pipeline, or is of a `class_name` of
    `vivace.machinery.tiny_vaes`."""

    repo: str
    revision: str
    files: tuple[str, ...] = Field(min_length=1)
    class_name: str | None = None


class Embedded(Spec):
    """Weights that ship with vivace: folders in diffusers' format below models/weights. Components that `folder` lacks
    are those of the `base` model; an index of its own makes it another pipeline."""

    folder: str
    base: str | None = None
    tiny_vae: str | None = None


class Hub(Spec):
    """A Hugging Face hub repository in diffusers' format.

    revision: a commit, tag or branch; None is the main branch.
    variants: in order of preference, "fp16" for model.fp16.safetensors, then weights without one. None: half precision,
        in the dtype that suits the denoiser.
    parts: components that other repositories provide instead.
    lora: a LoRA that is merged into the denoiser's weights.
    without: components that are left out.
    """

    repo: str
    revision: str | None = None
    variants: tuple[str, ...] | None = None
    parts: dict[str, StoredPart] = Field(default={})
    lora: StoredPart | None = None
    without: tuple[str, ...] = ()
    tiny_vae: StoredPart | None = None
    download_bytes: int | None = None


class SamplerEntry(Spec):
    """A diffusers scheduler class, and its differences from the repository's scheduler configuration."""

    class_name: str
    overrides: dict[str, Any] = Field(default={})


class FewSteps(Spec):
    """A LoRA, on the hub or embedded below models/weights, that makes a model draw in few steps, and the numbers of
    steps (the usual one first), the scale and the further arguments of the call that it was made for."""

    kind: Literal["lcm", "lightning", "hyper", "turbo"]
    lora: StoredPart | str
    steps: tuple[int, ...] = Field(min_length=1)
    guidance_scale: float
    scheduler: SamplerEntry
    scale: float = 1.0
    call: dict[str, Any] = Field(default={})

    @property
    def where(self) -> str:
        lora = self.lora
        return lora if isinstance(lora, str) else f"{lora.repo}/{lora.files[0]}@{lora.revision}"


class Entry(Spec):
    """How a model's publishers intend it to be run. This defines `baseline`.

    size_multiple: of height and width, in pixels.
    max_size: of height and width, in pixels: what a model computes at all; images may be worse long before.
    cuda_dtype: the precision on a GPU; CPUs run fp32.
    scheduler: replaces the repository's scheduler; None keeps it.
    clip_skip: number of CLIP layers to skip, as diffusers counts them: 0 is the pipeline's default layer, which for
        SDXL is the last but one.
    max_sequence_length: prompt length in tokens for pipelines that pad to one.
    arguments: further ones of the pipeline's call.
    threads: of a CPU. Images depend on it in their last bits, so it is fixed; None: all cores.
    prompt_set: the key in `vivace.models.prompts` of prompts that this model understands.
    few_steps: the usual LoRA of each kind first.
    scorer: the CLIP model that scores the images; None: any usual one that is available.
    """

    name: str
    summary: str
    licence: str
    origin: Embedded | Hub
    pipeline: str
    height: int = 1024
    width: int = 1024
    size_multiple: int = 16
    max_size: int = 4096
    num_inference_steps: int
    guidance_scale: float
    cuda_dtype: Literal["fp16", "bf16", "fp32"] = "bf16"
    prompt_set: Literal["tinyworld", "real", "edit"] = "real"
    gated: bool = False
    scheduler: SamplerEntry | None = None
    clip_skip: int | None = None
    max_sequence_length: int | None = None
    arguments: dict[str, bool | int | float | str] = Field(default={})
    ignores_guidance: bool = False
    threads: int | None = None
    few_steps: tuple[FewSteps, ...] = ()
    scorer: str | None = None

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of the pipeline's call besides size, steps and guidance."""
        keys = ("max_sequence_length", "clip_skip")
        own = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return own | self.arguments


def few_steps_of(entry: Entry | None) -> tuple[FewSteps, ...]:
    return () if entry is None else entry.few_steps


def embedded_entry(**own: Any) -> Entry:
    """Return the entry of a model that ships with vivace; docs/tinyworld.md describes its training and quality."""
    common = {
        "licence": "Apache-2.0",
        "height": 128,
        "width": 128,
        "max_size": 512,
        "cuda_dtype": "fp16",
        "threads": 1,
        "prompt_set": "tinyworld",
        "scorer": "tiny-clip",
    }
    return Entry.model_validate(common | own)


VAE_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
TAEF1_FILES = StoredPart(
    repo="madebyollin/taef1", revision="b1b2d00e9e440cfbf3dedb34266864da86016ceb", files=VAE_FILES
)
TAEF2_FILES = StoredPart(
    repo="madebyollin/taef2",
    revision="bd244ebfe4398c84fbf312a2f1c868c676b500e3",
    files=("taef2.safetensors",),
    class_name="AutoencoderTinyFlux2",
)
# Published in github.com/madebyollin/taehv alone. This copy is the same file, by its SHA-256 in IonDen/mlx-taef; most
# of the values in Kijai/WanVideo_comfy's are others.
TAEW21_FILES = StoredPart(
    repo="ionden/taew2.1",
    revision="2ac5ae1c3291a8607a2d6c423b9a0337cef45f2b",
    files=("taew2_1.safetensors",),
    class_name="AutoencoderTinyQwenImage",
)
