"""Other libraries than torchao, where they are installed; what is said where they are not."""

import importlib.util
import os
from typing import Any

import pytest
import torch

import vivace
from tests.families import draw, psnr, session
from vivace.errors import RecipeError, Unsupported
from vivace.measure.memory import weights_bytes
from vivace.models.weightless import find_weightless
from vivace.runtime.prediction import predict
from vivace.techniques.quantization import SCHEMES
from vivace.techniques.resolve import resolve

os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")  # else it compiles each shape, on a CPU for seconds
OTHERS = sorted((backend, scheme) for backend, scheme in SCHEMES if backend != "torchao")
LEAST_DB = {"int8": 38, "fp8_weight": 28, "nf4": 15, "int4": 15}
# Quanto compiles its int4 for a CPU on first use, for a minute.
DRAWN = [pair for pair in OTHERS if pair != ("quanto", "int4")]


def installed(backend: str) -> None:
    module, _ = next(s.package for (library, _), s in SCHEMES.items() if library == backend)
    if importlib.util.find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{backend} is not installed")
    pytest.importorskip(module)


@pytest.mark.parametrize(("backend", "scheme"), DRAWN)
def test_the_picture_stays_near_and_the_weights_shrink(backend: str, scheme: str) -> None:
    installed(backend)
    reference, recipe = session("sd"), f"quantize({scheme}, backend={backend})"
    made = session("sd", recipe)
    assert made.effects["quantize@denoiser"]["denoiser.quantized_layers"] > 40
    assert LEAST_DB[scheme] < psnr(draw(made), draw(reference)) < 70
    assert weights_bytes(made.pipe) < weights_bytes(reference.pipe) - 3_000_000
    assert made.refuted(dict(made.evidence())) is None
    assert made.evidence()["denoiser.quantized"]


@pytest.mark.parametrize(("backend", "scheme"), DRAWN)
def test_its_memory_is_predicted(backend: str, scheme: str) -> None:
    installed(backend)
    convolutions = ", convolutions=True" if SCHEMES[backend, scheme].takes_convolutions else ""
    recipe = f"quantize({scheme}, backend={backend}{convolutions})"
    real = weights_bytes(session("sd", recipe).pipe)
    predicted = predict(find_weightless("tiny-sd"), resolve(f"fp32+{recipe}"))
    # Blocks of 512 bytes for each of many small tensors.
    assert 0.99 * real <= sum(c.num_bytes for c in predicted.components) < 1.08 * real


@pytest.mark.parametrize("backend", ["quanto", "sdnq"])
def test_convolutions(backend: str) -> None:
    installed(backend)
    made = session(
        "sd", f"quantize(int8, backend={backend}, convolutions=True, skip='conv_in, conv_out')@denoiser,vae"
    )
    # The UNet's; SDNQ also leaves the VAE's narrow ones alone.
    assert made.effects["quantize@denoiser,vae"]["denoiser.layers_left_alone"] == 2
    assert psnr(draw(made), draw(session("sd"))) > 34


def test_double_quantisation_is_a_choice_of_bitsandbytes() -> None:
    installed("bitsandbytes")
    recipe = "quantize(nf4, backend=bitsandbytes, double_quantization={})"
    found = [predict(find_weightless("sd15"), resolve(recipe.format(twice))) for twice in (True, False)]
    twice, once = ({c.name: c.num_bytes for c in p.components}["unet"] for p in found)
    # 3 bytes less for each 64 of the 0.38 billion weights that are not in convolutions.
    assert 12e6 < once - twice < 20e6
    layers = [
        session("sd", recipe.format(number)).pipe.unet.time_embedding.linear_2 for number in (True, False)
    ]
    assert [layer.weight.quant_state.nested for layer in layers] == [True, False]


@pytest.mark.parametrize("backend", ["bitsandbytes", "quanto"])
def test_text_encoders(backend: str) -> None:
    installed(backend)
    made = session("flux", f"bf16+quantize(int8, backend={backend})@text_encoder,text_encoder_2")
    call = {"height": 128, "width": 128, "num_inference_steps": 8}
    assert psnr(draw(made, **call), draw(session("flux"), **call)) > 20


def test_weights_that_another_backend_has_taken_are_not_taken_again() -> None:
    installed("bitsandbytes")
    pipe = session("sd", "quantize(nf4, backend=bitsandbytes)").pipe
    made = vivace.apply(pipe, "quantize(int8, backend=torchao, convolutions=True)")
    assert made.effects["quantize@denoiser"]["denoiser.quantized_layers"] == sum(
        isinstance(m, torch.nn.Conv2d) for m in pipe.unet.modules()
    ), "what was left of it"


def test_what_is_wrong_is_said_in_words(monkeypatch: Any) -> None:
    with pytest.raises(
        RecipeError, match="bitsandbytes has no fp8; it has int8, nf4, and fp8 comes with torchao"
    ):
        resolve("quantize(fp8, backend=bitsandbytes)")
    with pytest.raises(RecipeError, match="torchao's nf4 always quantises its scales"):
        resolve("quantize(nf4, double_quantization=False)")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend, package in {
        "bitsandbytes": "bitsandbytes",
        "quanto": "optimum-quanto",
        "sdnq": "sdnq",
    }.items():
        with pytest.raises(Unsupported, match=rf"{backend} is not installed \(pip install {package}\)"):
            session("sd", f"quantize(int8, backend={backend})")
