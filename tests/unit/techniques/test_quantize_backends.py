"""Other libraries than torchao, where they are installed; what is said where they are not."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import build, draw, drawn, psnr, session
from tests.targets import target_of
from vivace.errors import RecipeError, Unsupported
from vivace.foundation.spec.record import Record
from vivace.machinery.quantization import SCHEMES, schemes_of
from vivace.machinery.quantization.layers import move_to
from vivace.machinery.technique import Machine
from vivace.measure.accelerator import weights_bytes
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.cuda_graph import CudaGraph
from vivace.techniques.offload import Offload

os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")  # else it compiles each shape, on a CPU for seconds
OTHERS = sorted((backend, scheme) for backend, scheme in SCHEMES if backend != "torchao")
LEAST_DB = {
    "int8": 38,
    "fp8_weight": 28,
    "nf4": 15,
    "int4": 15,
    "q8_0": 40,
    "q5_1": 25,
    "q5_0": 22,
    "q4_1": 15,
    "q4_0": 15,
}


def installed(backend: str) -> None:
    module, _ = next(s.package for (library, _), s in SCHEMES.items() if library == backend)
    if importlib.util.find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{backend} is not installed")
    pytest.importorskip(module)


@pytest.mark.parametrize(("backend", "scheme"), OTHERS)
def test_weights_of_each_backend_shrink_and_the_image_stays_near(backend: str, scheme: str) -> None:
    installed(backend)
    reference, recipe = session("sd"), f"quantize({scheme}, backend={backend})"
    made = session("sd", recipe)
    assert made.effects["quantize@denoiser"]["denoiser.quantized_layers"] >= 40
    assert LEAST_DB[scheme] < psnr(draw(made), draw(reference)) < 70
    assert weights_bytes(made.pipe) < weights_bytes(reference.pipe) - 3_000_000
    assert made.refuted(dict(made.evidence())) is None
    assert made.evidence()["denoiser.quantized"]


@pytest.mark.parametrize(("backend", "scheme"), OTHERS)
def test_memory_of_each_backend_is_predicted(backend: str, scheme: str) -> None:
    installed(backend)
    convolutions = ", convolutions=True" if SCHEMES[backend, scheme].takes_convolutions else ""
    recipe = f"quantize({scheme}, backend={backend}{convolutions})"
    real = weights_bytes(session("sd", recipe).pipe)
    predicted = predict(find_weightless("tiny-sd"), resolve(f"fp32+{recipe}"))
    # Blocks of 512 bytes for each of many small tensors.
    assert 0.99 * real <= sum(c.num_bytes for c in predicted.components) < 1.08 * real


def test_convolutions() -> None:
    installed("sdnq")
    made = session(
        "sd", "quantize(int8, backend=sdnq, convolutions=True, skip='conv_in, conv_out')@denoiser,vae"
    )
    # The UNet's; SDNQ also leaves the VAE's narrow ones alone.
    assert made.effects["quantize@denoiser,vae"]["denoiser.layers_left_alone"] == 2
    assert psnr(draw(made), drawn("sd")) > 34


@pytest.mark.parametrize(
    ("backend", "scheme", "keeps_wo"),
    [
        ("bitsandbytes", "int8", False),
        ("bitsandbytes", "nf4", True),
        ("gguf", "q8_0", True),
        ("gguf", "q4_0", True),
    ],
)
def test_each_backend_quantises_text_encoders(backend: str, scheme: str, keeps_wo: bool) -> None:
    """T5 casts what enters its output projections to their weights' dtype, which must not be that of packed bytes."""
    installed(backend)
    made = session("flux", f"bf16+quantize({scheme}, backend={backend})@text_encoder,text_encoder_2")
    call = {"height": 128, "width": 128, "num_inference_steps": 8}
    assert psnr(draw(made, **call), drawn("flux", **call)) > 20
    kept = made.evidence().get("text_encoder_2.left_alone", [])
    assert isinstance(kept, list)
    assert any(".wo (3): its model casts inputs" in line for line in kept) is keeps_wo
    ids = torch.arange(5, 25)[None]
    plain, stored = (s.pipe.text_encoder_2(ids)[0].float() for s in (session("flux"), made))
    assert float((plain - stored).square().mean() / plain.square().mean()) < 0.2


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_gguf_stores_what_a_file_of_its_kind_would(kind: str) -> None:
    installed("gguf")
    import gguf

    plain = session("sd").pipe.unet.time_embedding.linear_1
    made = session("sd", f"quantize({kind}, backend=gguf)").pipe.unet.time_embedding.linear_1
    expected = gguf.quants.quantize(plain.weight.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(made.weight.as_tensor().numpy(), expected)
    widened = torch.from_numpy(gguf.quants.dequantize(expected, gguf.GGMLQuantizationType[kind.upper()]))
    inputs = torch.randn(5, plain.in_features, generator=torch.Generator().manual_seed(0))
    product = torch.nn.functional.linear(inputs, widened, plain.bias)
    assert torch.allclose(made(inputs), product, atol=0.01), "but for fp16's rounding of the widened weights"
    move_to(made, "meta")
    assert made(inputs.to("meta")).shape == product.shape, "moved, it knows its kind still"


def test_gguf_leaves_alone_rows_that_are_no_multiple_of_its_blocks() -> None:
    installed("gguf")
    pipe = build("sd")
    pipe.unet.time_embedding.linear_1 = torch.nn.Linear(65, 256).requires_grad_(False)
    made = vivace.apply(pipe, "quantize(q4_0, backend=gguf, skip='*.to_q', min_weights=20000)")
    kept = made.evidence()["denoiser.left_alone"]
    assert isinstance(kept, list)
    assert "time_embedding.linear_1: fewer than 20000 weights" in kept
    assert "down_blocks.*.attentions.*.transformer_blocks.*.attn1.to_q (2): skip" in kept
    pipe = build("sd")
    pipe.unet.time_embedding.linear_1 = torch.nn.Linear(65, 256).requires_grad_(False)
    kept = vivace.apply(pipe, "quantize(q4_0, backend=gguf)").evidence()["denoiser.left_alone"]
    assert isinstance(kept, list)
    assert "time_embedding.linear_1: 65 inputs are not a multiple of 32" in kept


def test_what_gguf_does_not_go_with() -> None:
    installed("gguf")
    pipe = session("sd", "quantize(q4_0, backend=gguf)").pipe
    gpu = target_of(Machine("cuda", "a GPU", (9, 0), None), pipe=pipe)
    assert "take q8_0" in (CudaGraph().unsupported(gpu) or "")
    assert "sequential moves plain weights only" in (Offload(mode="sequential").unsupported(gpu) or "")
    assert Offload(mode="group").unsupported(gpu) is None
    for recipe in ("fuse_qkv", "layerwise_casting"):
        with pytest.raises(Unsupported, match="quantised"):
            vivace.apply(pipe, recipe)
    with pytest.raises(Unsupported, match=r"weights are quantised, and computed in float32"):
        vivace.apply(pipe, "bf16")
    gpu.pipe = session("sd", "quantize(q8_0, backend=gguf)").pipe
    assert CudaGraph().unsupported(gpu) is None
    pipe = build("sdxl")
    pipe.vae.to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    with pytest.raises(Unsupported, match="q8_0 of gguf cannot be cast"):
        vivace.apply(pipe, "quantize(q8_0, backend=gguf)@vae")


def test_records_of_a_removed_backend_stay_readable() -> None:
    path = Path(__file__).parents[3] / "results" / "techniques-flux-dev.json"
    records = [Record.model_validate(item) for item in json.loads(path.read_text())]
    (record,) = (r for r in records if r.trial.recipe.text == "quantize(int8, backend=quanto)")
    assert any(
        "backend=quanto" in row.recipe and row.latency is not None for row in rows_of([records[0], record])
    )


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
        "sdnq": "sdnq",
        "gguf": "gguf",
    }.items():
        scheme = schemes_of(backend)[0]
        with pytest.raises(Unsupported, match=rf"{backend} is not installed \(pip install {package}\)"):
            session("sd", f"quantize({scheme}, backend={backend})")
