"""Predicted against measured memory, at full size with random weights. `python -m pytest -m gpu -s tests/gpu`.

Prints a line a pair. The call is vivace's own: prompts in, an image out, after one warm-up.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.targets import target_of
from vivace.architectures import ARCHITECTURES
from vivace.measure.accelerator import MemoryMeter
from vivace.measure.machine import this_machine
from vivace.models.synthetic import build, build_component
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.footprint import CUBLAS_WORKSPACE
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.session import Session

pytestmark = pytest.mark.gpu
PAIRS = [
    ("sd15", "baseline", 1),
    ("sd15", "baseline", 4),
    ("sd15", "channels_last", 1),
    ("sd15", "tiny_vae", 1),
    ("sd15", "attention(math)+tiny_vae", 1),
    ("sdxl", "baseline", 1),
    ("sdxl", "baseline", 2),
    ("sdxl", "bf16", 1),
    ("sdxl", "channels_last", 1),
    ("sdxl", "quantize(int8)", 1),
    ("sdxl", "compile", 1),
    ("sdxl", "tiny_vae+cfg_cutoff(0.5)", 1),
    ("sdxl-turbo", "baseline", 1),
    ("lcm-sdxl", "quantize(int4)", 1),
    ("playground", "baseline", 1),
    ("flux-dev", "baseline", 1),
    ("flux-dev", "baseline", 2),
    ("flux-dev", "quantize(int8)@denoiser,text_encoder_2", 1),
    ("flux-dev", "tiny_vae+first_block_cache(hits=0.5)", 1),
    ("flux-schnell", "tiny_vae", 1),
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _memory_released() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("name", "text", "batch"), PAIRS)
def test_predicted_is_measured(name: str, text: str, batch: int) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()  # cuBLAS's workspace, from the second pair on
    model, recipe, architecture = find_weightless(name), resolve(text), ARCHITECTURES[name]
    predicted = predict(model, recipe, batch=batch)
    meter = MemoryMeter("cuda")
    pipe = build(name, "cuda", DTYPES[model.dtype])
    session = Session(
        pipe,
        recipe,
        target_of(
            machine=this_machine("cuda"),
            pipe=pipe,
            defaults=dict(model.defaults),
            load_tiny_vae=lambda: build_component(architecture.tiny_vae, "cpu", torch.float32),
        ),
    )
    draw_noise_in_fp32(pipe)
    gc.collect()
    meter.loaded(pipe)
    for _ in range(2):
        # The second call is what counts: whatever is made once has been made.
        meter.start_peak()
        generators = [torch.Generator().manual_seed(seed) for seed in range(batch)]
        session(["a red circle above a blue square"] * batch, generator=generators, num_inference_steps=4)
    measured = meter.read()
    model_error = predicted.model_bytes / (measured.model_bytes - before) - 1
    # The prediction counts the workspace as the call's.
    peak_error = predicted.peak_bytes / (measured.peak_bytes - max(0, before - CUBLAS_WORKSPACE)) - 1
    print(
        f"\n{name:12} {text:42} batch {batch}: "
        f"model {predicted.model_bytes / 1e9:6.2f} GB {100 * model_error:+5.1f} %, "
        f"peak {predicted.peak_bytes / 1e9:6.2f} GB {100 * peak_error:+5.1f} % ({predicted.peak_stage})"
    )
    assert abs(model_error) < 0.03
    assert abs(peak_error) < 0.10
