"""Images that become bytes on the GPU are diffusers' own, byte for byte. The arithmetic is the same on a CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from tests.targets import target_of
from vivace.machinery.technique import Machine
from vivace.techniques.gpu_postprocess import GpuPostprocess

GPU = Machine("cuda", "a GPU", (9, 0), None)


class Pipe:
    def __init__(self) -> None:
        self.image_processor = VaeImageProcessor()


def applied() -> tuple[Any, Any]:
    pipe: Any = Pipe()
    return pipe, GpuPostprocess().apply(target_of(machine=GPU, pipe=pipe))


def scripted() -> Any:
    pipe: Any = Pipe()
    script = GpuPostprocess().script(target_of(machine=GPU))
    exec("\n".join(script.lines), {"pipe": pipe, "Image": Image})  # noqa: S102
    return pipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bytes(dtype: torch.dtype) -> None:
    # Every value that a half of either kind can have between -1.2 and 1.2, and more.
    latents = torch.linspace(-1.2, 1.2, 2 * 3 * 64 * 48).reshape(2, 3, 64, 48).to(dtype)
    pipe, _ = applied()
    for options in ({}, {"do_denormalize": [True, False]}):
        expected = VaeImageProcessor().postprocess(latents, output_type="pil", **options)
        images = pipe.image_processor.postprocess(latents, output_type="pil", **options)
        assert [image.mode for image in images] == ["RGB", "RGB"]
        assert all(np.array_equal(a, b) for a, b in zip(images, expected, strict=True))


@pytest.mark.parametrize("kind", ["np", "pt", "latent"])
def test_other_outputs_are_diffusers(kind: str) -> None:
    latents = torch.linspace(-1, 1, 3 * 4 * 4).reshape(1, 3, 4, 4)
    pipe, effect = applied()
    image = pipe.image_processor.postprocess(latents, output_type=kind)
    expected = VaeImageProcessor().postprocess(latents, output_type=kind)
    assert type(image) is type(expected)
    assert np.array_equal(image, expected)
    assert "no image was converted on the GPU" in str(effect.refuted({}))


def test_what_was_on_the_cpu_is_no_gain() -> None:
    pipe, effect = applied()
    pipe.image_processor.postprocess(torch.zeros(1, 3, 4, 4))
    assert effect.evidence() == {"images_converted_on_gpu": 0}
    assert "the VAE runs on the CPU" in str(effect.refuted({}))


def test_it_is_for_gpus() -> None:
    reason = GpuPostprocess().unsupported(target_of(machine=Machine("cpu", "CPU", None, None)))
    assert "in the CPU's memory already" in str(reason)


def test_its_script_does_the_same() -> None:
    latents = torch.linspace(-1.2, 1.2, 3 * 16 * 16).reshape(1, 3, 16, 16)
    (actual,), (expected,) = (made.image_processor.postprocess(latents) for made in (scripted(), Pipe()))
    assert np.array_equal(actual, expected)
