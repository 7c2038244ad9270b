"""The catalogue: one entry a model, data not code."""

from __future__ import annotations

from vivace.spec.base import Spec


class Entry(Spec):
    """How a model is meant to be run by those who published it: what `baseline` stands for.

    `folder`, `base` and `tiny_vae` are folders in diffusers' format below models/weights, `scorer` is one in
    transformers'. With a `base`, `folder` holds only the components in which the model differs from it. `threads` is
    the number of CPU threads with which it draws; a picture depends on it in its last bits, so it is fixed.
    `size_multiple` is what height and width must be a multiple of, in pixels. `max_sequence_length` is the number of
    tokens that a FluxPipeline must be told; it pads prompts to 512 by itself. `scorer` is the CLIP model that scores
    the pictures.
    """

    name: str
    summary: str
    licence: str
    folder: str
    tiny_vae: str | None
    height: int
    width: int
    size_multiple: int
    max_size: int
    num_inference_steps: int
    guidance_scale: float
    cuda_dtype: str
    threads: int
    prompts: tuple[str, ...]
    base: str | None = None
    max_sequence_length: int | None = None
    scorer: str | None = None


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="tiny-sd",
            summary="Stable Diffusion's architecture, small: coloured shapes on plain backgrounds",
            licence="Apache-2.0",
            folder="tiny-sd",
            tiny_vae="tiny-sd-tiny-vae",
            height=128,
            width=128,
            size_multiple=32,
            max_size=512,
            num_inference_steps=25,
            guidance_scale=4.0,
            cuda_dtype="fp16",
            threads=1,
            prompts=(
                "a red circle above a blue square",
                "a large green triangle on a white background",
                "a small yellow star left of a purple diamond",
            ),
        ),
    )
}
