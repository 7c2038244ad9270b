"""Weights in fewer bits: which layers, how close the image stays, what is reported."""

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch

import vivace
from tests.families import build, draw, drawn, psnr, session
from tests.targets import target_of
from vivace.errors import NoEffect, RecipeError, Unsupported
from vivace.machinery.quantization import SCHEMES as SCHEMES_OF
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.machinery.quantization.torchao_tensors import int8_dynamic_linear, int8_weight_linear
from vivace.machinery.technique import Machine
from vivace.measure.accelerator import plain_tensors, weights_bytes
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.quantize import Quantize

pytestmark = pytest.mark.usefixtures("small_images")

# Least PSNR on a small UNet with trained weights, and how much smaller (bytes a weight, of four) its layers are.
SCHEMES = {
    "int8": (42, 1.05),
    "int8_dynamic": (35, 1.05),
    "fp8_weight": (28, 1.05),
    "fp8_weight, granularity=tensor": (28, 1.01),
    "fp8": (25, 1.05),
    "fp8, granularity=tensor": (25, 1.01),
    "nf4": (15, 0.54),
    "int4": (18, 1.2),
    "nvfp4": (11, 0.75),
    "nvfp4, rank=8": (17, 1.4),
    "mxfp8": (22, 1.15),
}


def machine(*capability: int) -> Machine:
    return Machine("cuda", "a GPU", capability or None, None)


@functools.cache
def of(model: str, recipe: str, **arguments: Any) -> Any:
    return predict(find_weightless(model), resolve(recipe), **arguments)


def linears(module: torch.nn.Module) -> dict[str, Any]:
    return {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)}


def is_quantised(layer: Any) -> bool:
    return hasattr(layer.weight, "__tensor_flatten__")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick("fp8", "int8_dynamic", "nf4", "nvfp4, rank=8")
@pytest.mark.slow("nf4")
def test_quantised_weights_shrink_and_the_image_stays_near(scheme: str) -> None:
    least_db, bytes_a_weight = SCHEMES[scheme]
    reference = session("sd")
    made = session("sd", f"quantize({scheme})")
    quantized_layers = {n: m for n, m in linears(made.pipe.unet).items() if is_quantised(m)}
    effect = made.effects["quantize@denoiser"]
    assert effect["denoiser.quantized_layers"] == len(quantized_layers) > 60
    num = sum(m.weight.numel() for m in quantized_layers.values())
    saved = weights_bytes(reference.pipe) - weights_bytes(made.pipe)
    assert saved >= (4 - bytes_a_weight) * num
    picture = draw(made)
    assert least_db < psnr(picture, draw(reference)) < 60, "it is rounded, and no more than that"
    assert made.refuted(dict(made.evidence())) is None


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.diagonal
@pytest.mark.quick("bf16-int8")
def test_whatever_the_precision(dtype: str, scheme: str) -> None:
    if dtype == "fp16":
        # fp16 on a CPU is slow, so one matmul stands for the image.
        pipe = build("sd").to(torch.float16)
        vivace.apply(pipe, f"quantize({scheme})")
        layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].ff.net[2]
        assert is_quantised(layer)
        inputs = torch.randn(40, layer.in_features, generator=torch.Generator().manual_seed(0)).half()
        assert layer(inputs).dtype == torch.float16
        assert layer(inputs).isfinite().all()
        return
    # Both rounding errors count: that of bf16 is larger on a CPU which computes it in other steps.
    errors = (SCHEMES[scheme][0], psnr(drawn("sd", dtype), drawn("sd")))
    least = -10 * math.log10(sum(10 ** (-decibels / 10) for decibels in errors))
    assert psnr(drawn("sd", f"{dtype}+quantize({scheme})"), drawn("sd")) > least - 3


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "fp8", "fp8, granularity=tensor", "nf4"])
@pytest.mark.quick("fp8")
def test_a_prompt_of_zeros_is_no_division_by_zero(scheme: str) -> None:
    """SDXL takes zeros for the embeddings of an empty negative prompt."""
    made, reference = session("sdxl", f"quantize({scheme})"), session("sdxl")
    assert made.pipe.config.force_zeros_for_empty_prompt
    assert psnr(draw(made), draw(reference)) > 30


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae"])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "fp8", "nf4"])
@pytest.mark.diagonal
@pytest.mark.quick("fp8-*")
def test_by_component(component: str, scheme: str) -> None:
    pipe = build("flux")
    reference = draw(vivace.apply(pipe), num_inference_steps=8, height=128, width=128)
    made = vivace.apply(pipe, f"quantize({scheme})@{component}")
    effect = made.effects[f"quantize@{component}"]
    counted = {f"{component}.{k}" for k in ("quantized_layers", "layers_left_alone", "weights_are")}
    assert set(effect) == {*counted, "how"}
    assert not any(is_quantised(layer) for layer in linears(pipe.transformer).values())
    assert psnr(draw(made, num_inference_steps=8, height=128, width=128), reference) > 20


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "fp8", "fp8_weight", "nf4"])
def test_a_vae_that_the_pipeline_casts_for_decoding(scheme: str) -> None:
    """SDXL's in fp16 goes to fp32 and back; what cannot follow is refused before it is tried."""
    pipe = build("sdxl")
    pipe.vae.to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    recipe = f"quantize({scheme})@vae"
    if scheme.startswith("fp8_weight"):
        with pytest.raises(Unsupported, match="casts its fp16 VAE to fp32 in each call"):
            vivace.apply(pipe, recipe)
        return
    made = vivace.apply(pipe, recipe)
    assert psnr(draw(made), drawn("sdxl")) > 28
    assert made.refuted({}) is None
    assert next(pipe.vae.parameters()).dtype == torch.float16


@pytest.mark.parametrize("component", ["denoiser", "vae"])
def test_convolutions_where_the_scheme_can(component: str) -> None:
    made, reference = session("sd", f"quantize(int8, convolutions=True)@{component}"), session("sd")
    module = made.pipe.unet if component == "denoiser" else made.pipe.vae
    convolutions = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) > 20
    assert all(is_quantised(layer) for layer in convolutions)
    assert made.effects[f"quantize@{component}"][f"{component}.layers_left_alone"] == 0
    assert psnr(draw(made), draw(reference)) > 35
    assert weights_bytes(made.pipe) < 0.9 * weights_bytes(reference.pipe)
    with pytest.raises(
        RecipeError,
        match="nf4 of torchao does not take convolutions; those that do: int8 of torchao, int8 of sdnq",
    ):
        resolve("quantize(nf4, convolutions=True)")


def test_what_is_left_alone_is_named_and_says_why() -> None:
    made = session("flux", "quantize(int8_dynamic, skip='proj_out, single_*.attn', min_weights=30000)")
    evidence = made.evidence()
    quantized, kept = evidence["denoiser.quantized"], evidence["denoiser.left_alone"]
    assert isinstance(quantized, list)
    assert isinstance(kept, list)
    assert "transformer_blocks.*.ff.net.*.proj (2)" in quantized
    assert "single_transformer_blocks.*.attn.to_q (5)" not in quantized
    assert "proj_out: skip" in kept
    assert "single_transformer_blocks.*.attn.to_q (5): skip" in kept
    assert "transformer_blocks.*.attn.to_q (2): fewer than 30000 weights" in kept
    assert any(line.startswith("transformer_blocks.*.norm1.linear (2): one row an image") for line in kept)
    layers = linears(made.pipe.transformer)
    assert not is_quantised(layers["proj_out"])
    assert not is_quantised(layers["single_transformer_blocks.0.attn.to_q"])
    assert is_quantised(layers["transformer_blocks.0.ff.net.2"])
    assert made.effects["quantize@denoiser"]["denoiser.layers_left_alone"] == sum(
        not is_quantised(layer) for layer in layers.values()
    )


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("fused(bf16)+nvfp4", "its weights are stored anew"),
        ("quantize(nvfp4)+quantize(mxfp8)", "both set the weights"),
        ("nvfp4+layerwise_casting", "both set the weights"),
        ("quantize(int8, rank=32)", "rank is for nvfp4 and mxfp8; int8 has no low-rank branch"),
        ("quantize(nvfp4, granularity=tensor)", "granularity=tensor is for fp8 schemes"),
        ("quantize(mxfp8, convolutions=True)", "mxfp8 of torchao does not take convolutions"),
        ("quantize(nvfp4, backend=gguf)", "gguf has no nvfp4"),
    ],
)
def test_what_block_formats_do_not_go_with(recipe: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        resolve(recipe)


def test_a_scheme_leaves_alone_what_its_kernels_cannot() -> None:
    made = session("sd", "quantize(fp8, granularity=tensor)")
    shapes = {tuple(m.weight.shape) for m in linears(made.pipe.unet).values() if not is_quantised(m)}
    assert shapes == {(128, 128)}
    pipe = build("sd")
    pipe.unet.time_embedding.linear_1 = torch.nn.Linear(64, 250).requires_grad_(False)
    vivace.apply(pipe, "fp8")
    assert not is_quantised(pipe.unet.time_embedding.linear_1)
    assert is_quantised(pipe.unet.time_embedding.linear_2)


def test_a_run_that_dequantises_them_for_good_refutes_it() -> None:
    made = session("sd", "nf4")
    layer = made.pipe.unet.time_embedding.linear_1
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape))
    assert "1 of denoiser's layers are no longer quantised: time_embedding.linear_1" in (
        made.refuted({}) or ""
    )
    assert "time_embedding.linear_1" not in made.evidence()["denoiser.quantized"]


def quantized(scheme: str, **made: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """The same layer by our scheme and by torchao's configuration."""
    from torchao import quantization as ao

    configs = {
        "int8": ao.Int8WeightOnlyConfig,
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig,
    }
    ours = torch.nn.Linear(192, 64, **made).requires_grad_(False)
    theirs = copy.deepcopy(ours)
    SCHEMES_OF["torchao", scheme].convert(ours, SchemeSettings(machine(9, 0)))
    ao.quantize_(theirs, configs[scheme](set_inductor_config=False))
    return ours, theirs


@pytest.mark.parametrize("num_rows", [5, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_dynamic_is_torchao_s_to_the_last_bit(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        ours, theirs = quantized("int8_dynamic", bias=bias, dtype=dtype)
        inputs = torch.randn(2, num_rows, 192).to(dtype)
        inputs[0, 0] = 0
        assert torch.equal(ours(inputs), theirs(inputs))
        for rows in (inputs, inputs[0]):
            assert torch.equal(int8_dynamic_linear(rows, ours.weight, ours.bias), theirs(rows)), (
                "what a GPU is given"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_torchao_s_to_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        ours, theirs = quantized("int8", bias=bias, dtype=dtype)
        inputs = torch.randn(2, 20, 192).to(dtype)
        assert torch.equal(ours(inputs), theirs(inputs))
        sent = pickle.loads(pickle.dumps(ours))  # noqa: S301
        assert torch.equal(sent(inputs), theirs(inputs))
        compiled = int8_weight_linear(inputs, ours.weight, ours.bias)  # what a GPU is given
        torch.testing.assert_close(compiled, theirs(inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.long
def test_nothing_of_the_process_is_changed() -> None:
    from torch._inductor import config

    before = (dict(config.get_config_copy()), torch.get_float32_matmul_precision())
    for scheme in SCHEMES:
        session("sd", f"quantize({scheme})")
    after = (dict(config.get_config_copy()), torch.get_float32_matmul_precision())
    assert {k for k in before[0] if before[0][k] != after[0][k]} == set()
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("quantize(int8, granularity=tensor)", "granularity=tensor is for fp8 schemes"),
        ("quantize(fp8, convolutions=True)", "fp8 of torchao does not take convolutions"),
        ("quantize(int3)", "int8, int8_dynamic"),
        ("quantize(int8, backend=llama)", "torchao"),
        ("int8+fp8@denoiser", "both set the weights of denoiser"),
        ("quantize(int8, min_weights=-1)", "min_weights"),
    ],
)
def test_wrong_recipes(recipe: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(recipe)


def test_quantize_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="no layer of denoiser is called 'attentoin'"):
        session("sd", "quantize(int8, skip=attentoin)")
    with pytest.raises(
        Unsupported, match=r"no layer can be quantised: \d+ layers: .*; \d+ layers: convolution$"
    ):
        session("sd", "quantize(int8, min_weights=100000000)")
    with pytest.raises(NoEffect, match="already") as caught:
        vivace.apply(session("sd", "int8").pipe, "fp8")
    assert caught.value.already_so
    for scheme in ("fp8",):
        reason = Quantize(scheme=scheme).unsupported(target_of(machine(8, 0))) or ""
        assert "compute capability 8.9" in reason
        assert "8.0" in reason
    assert Quantize(scheme="fp8").unsupported(target_of(machine(8, 9))) is None
    assert "mslk" in (Quantize(scheme="int4_gemm").unsupported(target_of(machine(9, 0))) or "")
    assert "Hopper" in (Quantize(scheme="int4_gemm").unsupported(target_of(machine(8, 9))) or "")
    for scheme in ("nvfp4", "mxfp8"):
        for capability in ((10, 0), (10, 3), (12, 0)):
            assert Quantize(scheme=scheme).unsupported(target_of(machine(*capability))) is None
        for capability, instead in (
            ((8, 0), "int8_dynamic"),
            ((8, 9), "fp8"),
            ((9, 0), "fp8"),
            ((12, 1), "fp8"),
        ):
            reason = Quantize(scheme=scheme).unsupported(target_of(machine(*capability))) or ""
            assert "Blackwell's (compute capability 10.0, 10.3, 12.0)" in reason
            assert f"{instead} multiplies in eight bits" in reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install torchao" in (Quantize(scheme="int8").unsupported(target_of(machine(9, 0))) or "")


@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8_static"])
@pytest.mark.long
@pytest.mark.exhaustive("fp8_weight")
def test_a_pipeline_without_weights_takes_as_much(scheme: str) -> None:
    """Nothing is calibrated there, so no prompts are needed."""
    weightless = find_weightless("tiny-sd").build()
    weightless.unet.to(torch.float32)
    target = target_of(pipe=weightless, has_weights=False)
    (technique,) = resolve(f"quantize({scheme})")
    assert technique.unsupported(target) is None
    effect = technique.predict(target)
    if scheme == "fp8_static":
        with pytest.raises(Unsupported, match="there are no prompts"):
            session("sd", scheme)
        real = vivace.apply(build("sd"), "quantize(fp8_static, pictures=1)", prompts=["a star"])
    else:
        real = session("sd", f"quantize({scheme})")
    applied = real.effects["quantize@denoiser"]
    assert effect.changed == {key: applied[key] for key in effect.changed}
    assert all(tensor.is_meta for tensor in weightless.unet.parameters())
    parts = (weightless.unet, real.pipe.unet)
    predicted, held = (
        sum(p.numel() * p.element_size() for t in m.parameters() for p in plain_tensors(t)) for m in parts
    )
    assert predicted == pytest.approx(held, rel=0.001)
