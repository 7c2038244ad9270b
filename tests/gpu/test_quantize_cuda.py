"""Quantised weights and matmuls on a GPU (compute capability 8.9 or later, for fp8)."""

import copy
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import vivace
from tests.families import build, draw, psnr
from vivace.errors import Unsupported
from vivace.machinery.quantization.packed_int4 import dequantize, pack
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.machinery.quantization.torchao_schemes import TORCHAO
from vivace.machinery.technique import Machine
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CALL = {"height": 128, "width": 128, "num_inference_steps": 8}
PROMPTS = ["a red circle above a blue square", "a large green triangle"]
# Least PSNR against bf16; and the most bytes that a quantised weight may take (bf16: 2), scales and padding included.
SCHEMES: dict[str, tuple[float, float]] = {
    "quantize(int8)": (24, 1.06),
    "quantize(int8, convolutions=True)": (22, 1.15),
    "quantize(int8_dynamic)": (20, 1.06),
    "quantize(fp8_weight)": (18, 1.06),
    "quantize(fp8)": (18, 1.06),
    "quantize(fp8, granularity=tensor)": (16, 1.01),
    "quantize(fp8_static, pictures=1)": (16, 1.01),
    "quantize(nf4)": (13, 0.54),
    "quantize(int4)": (13, 0.7),
}
OTHERS = {
    "quantize(int8, backend=bitsandbytes)": "bitsandbytes",
    "quantize(nf4, backend=bitsandbytes)": "bitsandbytes",
    "quantize(int8, backend=sdnq, convolutions=True)": "sdnq",
    "quantize(int4, backend=sdnq)": "sdnq",
    "quantize(q8_0, backend=gguf)": "gguf",
    "quantize(q8_0, backend=gguf)+compile": "gguf",
    "quantize(q8_0, backend=gguf)+cuda_graph": "gguf",
    "quantize(q8_0, backend=gguf)+offload(group)": "gguf",
    "quantize(q4_0, backend=gguf)": "gguf",
    "quantize(q4_0, backend=gguf)+compile": "gguf",
    "quantize(q4_0, backend=gguf)+offload(model)": "gguf",
}


@pytest.fixture(autouse=True)
def _memory_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    yield
    torch._dynamo.reset()
    gc.collect()


def opened(family: str, recipe: str = "baseline") -> Any:
    """In bf16, with the workload that the images are drawn with."""
    located = find_model(f"tiny-{family}")
    pipe = load_pipeline(located, DEVICE).to(torch.bfloat16)
    return session_of(pipe, located, resolve(recipe), DEVICE, dict(CALL), PROMPTS)


def picture(session: Any) -> np.ndarray:
    return draw(session, PROMPTS[0], **CALL)


def quantised(session: Any) -> dict[str, Any]:
    denoiser = session.pipe.unet if hasattr(session.pipe, "unet") else session.pipe.transformer
    return {
        n: m for n, m in denoiser.named_modules() if hasattr(getattr(m, "weight", None), "__tensor_flatten__")
    }


@pytest.mark.parametrize("after", ["", "+compile"])
@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.parametrize("recipe", SCHEMES)
def test_every_scheme_draws(recipe: str, family: str, after: str) -> None:
    made = opened(family, recipe + after)
    assert psnr(picture(made), picture(opened(family))) > SCHEMES[recipe][0]
    assert made.refuted(dict(made.evidence())) is None
    assert made.evidence()["denoiser.quantized"]


@pytest.mark.parametrize("recipe", [r for r in SCHEMES if "static" not in r])
def test_the_weights_shrink_on_the_gpu(recipe: str) -> None:
    pipe = build("flux").to(DEVICE, torch.bfloat16)
    before = torch.cuda.memory_allocated()
    made = vivace.apply(pipe, recipe)
    gc.collect()
    saved = before - torch.cuda.memory_allocated()
    num = sum(m.weight.numel() for m in quantised(made).values())
    # Each tensor lies in a block of a multiple of 512 bytes, and small layers are many.
    assert saved > (2 - SCHEMES[recipe][1]) * num - 2048 * len(quantised(made)) > 0
    assert saved > 0


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_kept_scales_draw_the_same_picture(family: str) -> None:
    first, second = (opened(family, "quantize(fp8_static, pictures=2)") for _ in range(2))
    hows = [made.effects["quantize@denoiser"]["scales"] for made in (first, second)]
    assert hows == ["calibrated on 2 images", "reloaded, calibrated on 2 images"]
    assert np.array_equal(picture(first), picture(second))


@pytest.mark.parametrize("scheme", ["int8_dynamic", "fp8", "nf4"])
def test_text_encoders_are_quantised_on_a_gpu(scheme: str) -> None:
    made = opened("flux", f"quantize({scheme})@text_encoder,text_encoder_2")
    assert psnr(picture(made), picture(opened("flux"))) > 18


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_int4_is_packed(precision: str) -> None:
    packed = opened("flux", f"{precision}+int4" if precision == "fp16" else "int4")
    assert packed.effects["quantize@denoiser"]["denoiser.weights_are"] == "PackedInt4Tensor"
    assert psnr(picture(packed), picture(opened("flux"))) > 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 32), (33, 96), (640, 3072), (18432, 3072)])
def test_the_kernel_dequantises_as_pytorch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    made = pack(torch.randn(shape, device=DEVICE, dtype=dtype))
    ours = made.dequantize()
    theirs = dequantize(made.packed.cpu(), made.scale.cpu(), made.zero.cpu(), dtype).to(DEVICE)
    # A multiply-add in one rounding or in two.
    torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    compiled = torch.compile(dequantize)(made.packed, made.scale, made.zero, dtype)
    torch.testing.assert_close(
        compiled, ours, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
    )


def test_a_scale_per_row_wants_bf16() -> None:
    with pytest.raises(Unsupported, match="a scale per row wants bf16"):
        opened("flux", "fp16+fp8")
    assert (
        psnr(picture(opened("flux", "fp16+quantize(fp8, granularity=tensor)")), picture(opened("flux"))) > 15
    )


@pytest.mark.parametrize("num_rows", [1, 23, 256, 512])
def test_fp8_with_a_scale_per_row_takes_few_rows(num_rows: int) -> None:
    """Qwen-Image's MLP of its text: as many rows as the prompt has tokens."""
    layer = torch.nn.Linear(12288, 3072, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(1, num_rows, 12288, device=DEVICE, dtype=torch.bfloat16)
    exact = layer(inputs)
    TORCHAO["fp8"].convert(layer, SchemeSettings(Machine("cuda", "a GPU", (9, 0), None)))
    for call in (layer, torch.compile(layer)):
        assert (call(inputs) - exact).norm() < 0.06 * exact.norm()


def test_int4_gemm_works_or_says_what_is_missing() -> None:
    try:
        made = opened("flux", "int4_gemm")
    except Unsupported as error:
        assert "mslk" in str(error) or "Hopper" in str(error)
        return
    assert psnr(picture(made), picture(opened("flux"))) > 13


@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.parametrize("recipe", OTHERS)
def test_other_libraries(recipe: str, family: str) -> None:
    if importlib.util.find_spec(OTHERS[recipe]) is None:
        pytest.skip(f"{OTHERS[recipe]} is not installed")
    made = opened(family, recipe)
    scheme = recipe.split(",")[0]
    least_db = 12 if "4" in scheme else 16 if "fp8" in scheme else 20
    assert psnr(picture(made), picture(opened(family))) > least_db
    assert made.refuted(dict(made.evidence())) is None


@pytest.mark.parametrize("num_rows", [3, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_dynamic_on_a_gpu_is_torchao_s_to_the_last_bit(dtype: torch.dtype, num_rows: int) -> None:
    layer = torch.nn.Linear(3072, 640, device=DEVICE, dtype=dtype).requires_grad_(False)
    ours, theirs = copy.deepcopy(layer), copy.deepcopy(layer)
    settings = SchemeSettings(Machine("cuda", "a GPU", (9, 0), None))
    TORCHAO["int8_dynamic"].convert(ours, settings)
    quantize_(theirs, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    inputs = torch.randn(2, num_rows, 3072, device=DEVICE, dtype=dtype)
    expected = theirs(inputs)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a copy to the host could not be captured
        output = ours(inputs)
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_int8_is_as_fast_as_dequantising(dtype: torch.dtype) -> None:
    """In bf16, inductor would compute the matmul of an image's thousands of rows with a kernel for a few."""
    layer = torch.nn.Linear(3072, 12288, device=DEVICE, dtype=dtype).requires_grad_(False)
    plain = copy.deepcopy(layer)
    TORCHAO["int8"].convert(layer, SchemeSettings(Machine("cuda", "a GPU", (9, 0), None)))
    inputs = torch.randn(4096, 3072, device=DEVICE, dtype=dtype)
    expected = layer(inputs)
    compiled = torch.compile(layer)
    torch.testing.assert_close(compiled(inputs), expected, rtol=0.02, atol=0.02)

    def milliseconds(work: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(10):
            start.record()
            work(inputs)
            end.record()
            end.synchronize()
            took.append(start.elapsed_time(end))
        return sorted(took)[len(took) // 2]

    assert milliseconds(compiled) < 1.5 * milliseconds(plain)
