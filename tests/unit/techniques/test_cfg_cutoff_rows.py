"""Guidance that ends where its branches are rows of a batch: whatever else has rows is cut with it."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.conditioned import CASES, case, draw
from tests.families import build, psnr
from vivace.machinery.guidance import GuidanceRows, rows_of

pytestmark = pytest.mark.usefixtures("short_calls")


def ended_by_hand(pipe: Any, guided: int, number: int, conditional: int) -> None:
    """Compute the whole batch to the end, and give the pipeline the conditional rows for all after `guided` calls."""
    calls: list[str] = []

    def end(_: Any, __: Any, output: Any) -> Any:
        calls.append("a call")
        if len(calls) <= guided:
            return output
        rows = output[0].chunk(number)[conditional]
        return (torch.cat([rows] * number),)

    pipe.unet.register_forward_hook(end)


def rows_of_calls(pipe: Any) -> list[int]:
    """Grows by the rows of each call of the denoiser."""
    rows: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(args[0] if args else kwargs["sample"]))

    pipe.unet.register_forward_pre_hook(note, with_kwargs=True)
    return rows


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("two_controlnets_ip*-1", "t2i_adapter-1")
def test_it_is_what_guidance_by_hand_gives(name: str, images: int) -> None:
    number, conditional = (3, 0) if name == "pix2pix" else (2, 1)
    pipe, call = case(name)
    rows = rows_of_calls(pipe)
    made = vivace.apply(pipe, "cfg_cutoff(0.5)")
    picture = draw(made, call, images)
    assert rows[0] == number * images
    assert rows[-1] == images, "the denoiser computes one branch"
    assert made.refuted({}) is None
    other, call = case(name)
    ended_by_hand(other, int(made.evidence()["guided_steps"]), number, conditional)
    by_hand = draw(vivace.apply(other), call, images)
    assert psnr(picture, by_hand) > 80
    whole = draw(vivace.apply(case(name)[0]), call, images)
    assert psnr(picture, whole) < psnr(picture, by_hand) - 20, "the cutoff shows"


@pytest.mark.quick("heun-*", "pndm-*")
@pytest.mark.parametrize(
    ("sampler", "calls", "guided"),
    [
        ("heun", 11, 6),
        ("dpm2", 11, 6),
        ("dpm2_a", 11, 6),
        ("pndm", 15, 12),
        ("euler", 6, 3),
        ("dpmpp_2s", 6, 3),
    ],
)
def test_the_share_is_of_steps_and_not_of_calls(sampler: str, calls: int, guided: int) -> None:
    """Of six steps, Heun's and DPM2's have two calls each but the last, and PNDM's first three have four."""
    pipe = build("sd")
    rows = rows_of_calls(pipe)
    made = vivace.apply(pipe, f"scheduler({sampler})+cfg_cutoff(0.5)")
    draw(made, {}, num_inference_steps=6)
    assert rows == [2] * guided + [1] * (calls - guided)
    assert made.evidence() == {"guided_steps": 3, "unguided_steps": 3}


REFUSED = {
    "StableDiffusionPAGPipeline": "perturbed attention",
    "LEditsPPPipelineStableDiffusion": "does not say whether|no batch of two",
    "StableDiffusionGLIGENTextImagePipeline": "does not say whether|no batch|calls its denoiser",
    "DreamLitePipeline": "does not say whether|batches of several kinds",
    "PixArtSigmaPipeline": "does not say whether",
    "IFPipeline": "does not say whether",
    "StableDiffusionUpscalePipeline": "does not say whether",
    "StableDiffusionSAGPipeline": "does not say whether|calls its denoiser",
}
KNOWN_ROWS = {
    "StableDiffusionXLPipeline": GuidanceRows(2, 1),
    "StableDiffusionXLAdapterPipeline": GuidanceRows(2, 1),
    "StableDiffusionXLControlNetUnionPipeline": GuidanceRows(2, 1),
    "StableDiffusion3ControlNetPipeline": GuidanceRows(2, 1),
    "StableDiffusionInstructPix2PixPipeline": GuidanceRows(3, 0),
}


@pytest.mark.parametrize("name", [*REFUSED, *KNOWN_ROWS])
def test_which_pipelines_rows_are_known(name: str) -> None:
    import diffusers

    pipe = object.__new__(getattr(diffusers, name))
    vars(pipe)["unet"] = build("sd").unet
    rows = rows_of(pipe)
    if name in KNOWN_ROWS:
        assert rows == KNOWN_ROWS[name]
    else:
        assert isinstance(rows, str)
        assert re.search(REFUSED[name], rows)


def test_calls_outside_of_the_session_are_left_alone() -> None:
    made = vivace.apply(build("sd"), "cfg_cutoff(0.5)")
    plain = draw(vivace.apply(build("sd")), {})
    call = {
        "prompt": "a red circle",
        "num_inference_steps": 4,
        "guidance_scale": 5.0,
        "height": 64,
        "width": 64,
    }
    draw(made, {})
    own = made.pipe(**call, generator=torch.Generator().manual_seed(0), output_type="np").images
    assert np.array_equal(own, plain)


# callbacks of the caller


def _callbacks() -> dict[str, Any]:
    from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

    class Looks(PipelineCallback):
        tensor_inputs = ["latents", "prompt_embeds"]  # noqa: RUF012  as diffusers declares them

        def callback_fn(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.batches = [*getattr(self, "batches", []), sorted(tensors)]
            tensors["latents"] = tensors["latents"] * (1.1 if step == 1 else 1.0)
            return tensors

    looks = Looks()
    return {"one": looks, "several": MultiPipelineCallbacks([looks])}


@pytest.mark.parametrize("kind", ["one", "several"])
def test_callback_objects_get_the_tensors_that_they_declare(kind: str) -> None:
    callbacks = _callbacks()
    made = vivace.apply(build("sd"), "cfg_cutoff(0.5)")
    changed = draw(made, {}, callback_on_step_end=callbacks[kind])
    assert callbacks["one"].batches == [["latents", "prompt_embeds"]] * 4
    assert psnr(changed, draw(made, {})) < 40, "and what they return is taken"


def test_diffusers_own_cutoff_beside_ours() -> None:
    from diffusers.callbacks import SDCFGCutoffCallback

    own = SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=1)
    both = draw(vivace.apply(build("sd"), "cfg_cutoff(0.8)"), {}, callback_on_step_end=own)
    assert np.array_equal(both, draw(vivace.apply(build("sd")), {}, callback_on_step_end=own))
