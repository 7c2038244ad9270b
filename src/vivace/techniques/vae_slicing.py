"""Decode the images of a batch one by one.

Why: the VAE's activations are the largest tensors of a call and grow with the batch. With slicing, a batch of N is
    denoised together, but decoding needs the memory of a single image.
Costs: the decoder runs N times at batch 1; with images large enough to fill the GPU that costs next to nothing.
Needs: more than one image per call.
Source: diffusers, `vae.enable_slicing`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts
from vivace.machinery.technique.script import Script


class VaeSlicing(Technique):
    name: ClassVar[str] = "vae_slicing"
    summary: ClassVar[str] = "a batch is decoded image by image"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SPLIT,
        owns="slicing",
        same_picture=True,
        targetable=("vae",),
        default_targets=("vae",),
        saves_memory=("vae_slicing",),
    )

    def unsupported(self, target: Target) -> str | None:
        if target.request.batch == 1:
            return "one image is drawn per call, so there is no batch to slice"
        if target.pipe is None:
            return None
        vae = target.module("vae")
        if not hasattr(vae, "use_slicing") or not hasattr(vae, "decoder"):
            return f"diffusers cannot decode {type(vae).__name__} in slices"
        return None

    def apply(self, target: Target) -> Effect:
        vae = target.module("vae")
        if vae.use_slicing:
            raise NoEffect("the VAE already decodes image by image", already_so=True)
        vae.enable_slicing()
        counts = {"vae_batch": 0, "vae_slices": 0}

        def count(decoder: Any, args: tuple[Any, ...]) -> None:
            counts["vae_slices"] += int(args[0].shape[0]) == 1 and counts["vae_batch"] > 1

        vae.decode = functools.partial(_decode_and_record, counts, vae.decode)
        vae.decoder.register_forward_pre_hook(count)

        def refuted(_: dict[str, Any]) -> str | None:
            if counts["vae_batch"] == 1:
                return "every call generated one image, so there was no batch to slice"
            if counts["vae_batch"] and not counts["vae_slices"]:
                return f"a batch of {counts['vae_batch']} was decoded at once"
            return None

        return Effect(changed={"vae.slicing": "on"}, evidence=lambda: dict(counts), refuted=refuted)

    def script(self, target: Target) -> Script:
        return Script(lines=("pipe.vae.enable_slicing()",))


def _decode_and_record(counts: dict[str, int], decode: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
    counts["vae_batch"] = max(counts["vae_batch"], int(z.shape[0]))
    return decode(z, *args, **kwargs)
