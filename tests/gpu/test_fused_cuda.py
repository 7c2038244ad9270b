"""The fused kernels, and FLUX fused, on a CUDA device. `python -m pytest -m gpu tests/gpu/test_fused_cuda.py`."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel, ZImageTransformer2DModel

import vivace
from benchmarks.lora import write_random
from tests import families, fused_unets
from tests import fused_kernels as kernels
from tests.families import STEPS, draw, psnr
from tests.fused_kernels import error
from tests.lora_files import write_lora
from tests.targets import target_of
from vivace.errors import Unsupported
from vivace.machinery.attention_backends.cudnn_fp8 import attend, unsupported_on
from vivace.machinery.fused.models.vae import attend_by_rows
from vivace.machinery.kernels.reference import TokenLayout
from vivace.machinery.technique import Target
from vivace.measure.machine import this_machine
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

pytestmark = pytest.mark.gpu
CASES = list(kernels.cases())
SHAPES = [(1, 512, 32, 32), (1, 128, 32, 32), (2, 128, 16, 24), (2, 512, 33, 47), (1, 77, 17, 23)]
"""Batch, text tokens, height and width in tokens."""


@pytest.mark.parametrize(("kind", "tokens"), CASES, ids=[f"{kind}-{t.batch}-{t.text}" for kind, t in CASES])
def test_each_fused_kernel_against_float64_on_a_gpu(kind: str, tokens: TokenLayout) -> None:
    for quantize in (False, True):
        for channels in (96, 3072):
            for adds in (False, True):
                kernels.check_residual_norm(kind, tokens, channels, adds, quantize, "cuda")
        for heads, channels in ((5, 32), (24, 128)):
            kernels.check_qk_norm_rope(kind, tokens, heads, channels, quantize, "cuda")
    for channels in (200, 3072):
        kernels.check_quantize(kind, 5, channels, "cuda")


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("quantize", [False, True])
def test_swiglu_against_float64(kind: str, quantize: bool) -> None:
    for hidden, channels in ((72, 0), (96, 64), (9216, 0), (9216, 3072), (12288, 4096), (18432, 6144)):
        kernels.check_swiglu(kind, 5, hidden, channels, quantize, "cuda")


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("quantize", [False, True])
def test_rms_residual_against_float64(kind: str, quantize: bool) -> None:
    for channels in (96, 3840):
        for adds, scaled in ((False, False), (True, False), (True, True)):
            kernels.check_rms_residual(kind, 2, 4, channels, adds, scaled, quantize, "cuda")
            kernels.check_rms_residual(kind, 3, 5, channels, adds, scaled, quantize, "cuda")


def test_the_barrier_between_gpus() -> None:
    kernels.check_peer_barrier("cuda")


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "channels"), [(3, 130, 144), (1, 4096, 3072), (64, 130, 3072)])
def test_the_skinny_product_against_float64(rows: int, outputs: int, channels: int, quantize: bool) -> None:
    kernels.check_skinny_product(rows, outputs, channels, quantize, "cuda")


def transformer() -> Any:
    """Two double and two single blocks of FLUX.1's width."""
    with torch.device("cuda"):
        made = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs(batch: int, text: int, height: int, width: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.zeros(height, width, 3, device="cuda")
    ids[..., 1] += torch.arange(height, device="cuda")[:, None]
    ids[..., 2] += torch.arange(width, device="cuda")[None]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    return {
        "hidden_states": random(batch, height * width, 64),
        "encoder_hidden_states": random(batch, text, 4096),
        "pooled_projections": random(batch, 768),
        "timestep": torch.full((batch,), 700.0, device="cuda").bfloat16() / 1000,
        "guidance": torch.full([1], 3.5, device="cuda").expand(batch),
        "img_ids": ids.reshape(-1, 3).bfloat16(),
        "txt_ids": torch.zeros(text, 3, device="cuda").bfloat16(),
        "return_dict": False,
    }


def target(made: Any, timesteps: list[float] | None = None) -> Target:
    scheduler = None
    if timesteps is not None:
        scheduler = types.SimpleNamespace(timesteps=torch.tensor(timesteps, device="cuda"))
    pipe = types.SimpleNamespace(transformer=made, scheduler=scheduler)
    return target_of(machine=this_machine("cuda"), pipe=pipe)


def flux2(num_heads: int = 24) -> Any:
    """Two double and two single blocks of FLUX.2 [klein]: of 4B by default; 9B has 32 heads, and [dev] 48."""
    with torch.device("cuda"):
        made = Flux2Transformer2DModel(
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=num_heads,
            joint_attention_dim=7680,
            guidance_embeds=False,
        )
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs_of_flux2(batch: int, text: int, height: int, width: int) -> dict[str, Any]:
    arguments = inputs(batch, text, height, width)
    ids = torch.nn.functional.pad(arguments["img_ids"], (0, 1))
    words = torch.zeros(text, 4, device="cuda")
    words[:, 3] = torch.arange(text, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    return {
        "hidden_states": arguments["hidden_states"].repeat(1, 1, 2),
        "encoder_hidden_states": torch.randn(
            batch, text, 7680, generator=generator, device="cuda"
        ).bfloat16(),
        "timestep": arguments["timestep"],
        "img_ids": ids.expand(batch, -1, -1),
        "txt_ids": words.expand(batch, -1, -1),
        "return_dict": False,
    }


def z_image() -> Any:
    """Four blocks of Z-Image's width."""
    with torch.device("cuda"):
        made = ZImageTransformer2DModel(n_layers=2, n_refiner_layers=1)
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs_of_z_image(*shape: Any) -> dict[str, Any]:
    words, height, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    return {
        "x": [
            torch.randn(16, 1, height, width, generator=generator, device="cuda").bfloat16() for _ in words
        ],
        "t": torch.full((len(words),), 0.3, device="cuda"),
        "cap_feats": [
            torch.randn(number, 2560, generator=generator, device="cuda").bfloat16() for number in words
        ],
        "return_dict": False,
    }


@torch.no_grad()
def test_z_images_transformer_against_diffusers_and_torchao() -> None:
    def of(made: Any) -> Any:
        """As the others: the images of a batch as one tensor."""
        return lambda **arguments: (torch.stack(made(**arguments)[0]),)

    shapes = [((77,), 64, 64), ((40, 40), 32, 48), ((40, 90), 32, 48), ((3,), 34, 46)]
    assert too_far(z_image, inputs_of_z_image, shapes, of, of_bf16=0.012, of_fp8=0.1) == []


@pytest.mark.parametrize("num_heads", [24, 32, 48])
@torch.no_grad()
def test_flux2s_transformer_against_diffusers_and_torchao(num_heads: int) -> None:
    assert too_far(lambda: flux2(num_heads), inputs_of_flux2) == []


@torch.no_grad()
def test_the_transformer_against_diffusers_and_torchao() -> None:
    assert too_far(transformer, inputs) == []


def too_far(
    transformer: Any,
    inputs: Any,
    shapes: Any = SHAPES,
    call_of: Any = lambda made: made,
    of_bf16: float = 0.01,
    of_fp8: float = 0.05,
) -> list[str]:
    """Return the forwards that differ from diffusers' by more than allowed: in fp8, than 1.5 times torchao's."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    plain = transformer()
    references = [call_of(plain)(**inputs(*shape))[0] for shape in shapes]
    lists = ("blocks", "layers", "refiner")
    quantize_(
        plain,
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        lambda layer, name: (
            isinstance(layer, torch.nn.Linear)
            and any(part in name for part in lists)
            and "adaLN" not in name
            and "_mod." not in name
        ),
    )
    torchaos_errors = []
    for shape, reference in zip(shapes, references, strict=True):
        try:
            torchaos_errors.append(error(call_of(plain)(**inputs(*shape))[0], reference))
        except RuntimeError as failure:
            # cuBLASLt has no matmul with a bias and scales by row for some odd numbers of rows; ours has.
            if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(failure):
                raise
            print(f"torchao cannot compute {shape}")
    torchaos = max(torchaos_errors)
    far = []
    for knobs, allowed in (
        ({"precision": "bf16"}, of_bf16),
        ({"precision": "fp8"}, min(of_fp8, 1.5 * torchaos)),
        ({"precision": "fp8", "attention": "fp8"}, min(of_fp8, 1.5 * torchaos)),
    ):
        technique = Fused(**knobs)
        made = transformer()
        if (reason := technique.unsupported(target(made))) is not None:
            assert any(part in reason for part in ("nvidia-cudnn-frontend", "capability", "heads of 128"))
            continue
        technique.apply(target(made))
        for shape, w in zip(shapes, references, strict=True):
            difference = error(call_of(made)(**inputs(*shape))[0], w)
            print(f"{knobs} {shape}: {difference:.4f}, torchao's {torchaos:.4f}")
            if not difference < allowed:
                far.append(f"{knobs} {shape}: {difference:.4f} of {allowed:.4f}")
    return far


@torch.no_grad()
def test_modulations_are_hoisted_or_computed_but_never_stale() -> None:
    made, plain = transformer(), transformer()
    Fused(precision="bf16").apply(target(made, [1000.0, 700.0, 300.0]))
    table = made.vivace_fused.modulations
    arguments = inputs(*SHAPES[2])
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.01
    assert table.num_computed == 0, "found in the table"
    for name in ("timestep", "guidance", "pooled_projections"):
        arguments[name] = arguments[name] * 0.9
        assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.01, name
    before = int(table.num_computed)
    assert before, "a timestep that the scheduler does not have is computed"
    arguments["pooled_projections"].mul_(0.5)  # in place: the same object with another content
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.01


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)"])
def test_a_lora_is_exchanged_in_a_graph(recipe: str, tmp_path: Path) -> None:
    pipe = vivace.load("tiny-flux", "baseline", device="cuda").pipe
    files = [tmp_path / f"{rank}.safetensors" for rank in (4, 8)]
    for rank, path in zip((4, 8), files, strict=True):
        write_random(pipe, path, rank, rank)
    own, other = (path.as_posix() for path in files)

    def load(path: str) -> Any:
        hot = f"lora({path!r}, hot=True, max_rank=8, scale=60)"
        return vivace.load("tiny-flux", f"bf16+{recipe}+{hot}+cuda_graph", device="cuda")

    hot = load(own)
    first = draw(hot)
    graphs = hot.evidence()["cuda_graphs_recorded"]
    hot.set_lora(other)
    second = draw(hot)
    assert not np.array_equal(first, second)
    hot.set_lora(own)
    assert np.array_equal(draw(hot), first)
    assert hot.evidence()["cuda_graphs_recorded"] == graphs, "no graph was captured anew"
    assert np.array_equal(draw(load(other)), second), "nothing of the first was left"
    hot.set_lora(scale=0)
    plain = draw(vivace.load("tiny-flux", f"bf16+{recipe}+cuda_graph", device="cuda"))
    assert psnr(draw(hot), plain) > 35, "wider products may be summed in another order, and nothing else"


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)", "fused(fp8, convolutions=fp8)"])
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_loras_of_all_layers_of_a_unet_are_exchanged_in_a_graph(
    family: str, recipe: str, tmp_path: Path
) -> None:
    pipe = families.build(family)
    own, other = (write_lora(pipe, tmp_path / f"{rank}.safetensors", rank, rank) for rank in (4, 8))

    def load(path: str | None) -> Any:
        more = "" if path is None else f"+lora({path!r}, hot=True, max_rank=8)"
        return vivace.apply(families.build(family).to("cuda"), f"bf16+{recipe}{more}+cuda_graph")

    # In bf16, since a pipeline in fp32 begins with other noise from the same seed.
    merged = draw(vivace.apply(families.build(family).to("cuda"), f"bf16+lora({own!r})"))
    hot = load(own)
    first = draw(hot)
    assert psnr(first, merged) > 20
    graphs = hot.evidence()["cuda_graphs_recorded"]
    hot.set_lora(other)
    second = draw(hot)
    assert not np.array_equal(first, second)
    hot.set_lora(own)
    assert np.array_equal(draw(hot), first)
    assert hot.evidence()["cuda_graphs_recorded"] == graphs, "no graph was captured anew"
    assert np.array_equal(draw(load(other)), second), "nothing of the first was left"
    hot.set_lora(scale=0)
    assert psnr(draw(hot), draw(load(None))) > 35, (
        "wider products may be summed in another order, and nothing else"
    )


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)", "fused(fp8, attention=fp8)"])
@pytest.mark.parametrize("more", ["", "+cuda_graph", "+teacache(hits=0.5)+cuda_graph"])
def test_a_picture(recipe: str, more: str) -> None:
    reference = draw(vivace.load("tiny-flux", f"bf16{more.replace('+cuda_graph', '')}", device="cuda"))
    try:
        made = vivace.load("tiny-flux", f"bf16+{recipe}{more}", device="cuda")
    except Unsupported as error:
        pytest.skip(str(error))
    for _ in range(2):
        assert psnr(draw(made), reference) > (25 if recipe == "fused(bf16)" else 20)
    assert made.refuted({}) is None
    assert made.evidence()["denoiser.modulations_hoisted"]
    assert made.effects["fused@denoiser"]["denoiser.fused_by"] == "Triton"


def test_each_kernel_of_unets_against_float64() -> None:
    kernels.check_of_unets("cuda")
    for pixels, channels in ((16384, 320), (1024, 2560), (4096, 960)):
        kernels.check_group_norm("normal", 2, pixels, channels, 32, True, True, "cuda")
    for channels in (1280, 5120):
        kernels.check_geglu("outliers", 33, channels, True, True, "cuda")


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("kind", [*kernels.KINDS, "sharp"])
def test_attention_to_a_text_against_float64(kind: str, quantize: bool) -> None:
    if quantize and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3")
    for words in (1, 77, 154, 512):
        for tokens, heads, channels in (
            (4096, 8, 40),
            (1024, 20, 64),
            (1000, 8, 80),
            (256, 8, 160),
            (64, 8, 160),
        ):
            kernels.check_cross_attention(kind, (2, tokens, words), heads, channels, quantize, "cuda")


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_convolutions_against_float64(kind: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3")
    for images, inputs, outputs in (
        ((2, 64, 64), 320, 320),
        ((2, 32, 32), 960, 640),
        ((2, 16, 16), 1280, 1280),
        ((1, 8, 8), 2560, 1280),
        ((3, 37, 50), 48, 80),
        ((1, 1, 3), 16, 16),
    ):
        for enlarges in (False, True):
            kernels.check_convolve(kind, images, inputs, outputs, "cuda", enlarges)


@pytest.mark.parametrize("enlarges", [False, True])
def test_each_division_of_a_convolution_against_float64(enlarges: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3")
    kernels.check_convolve("normal", (2, 21, 34), 320, 480, "cuda", enlarges, every_division=True)


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({"precision": "bf16"}, 0.015),
        ({"precision": "fp8"}, 0.06),
        ({"precision": "fp8", "convolutions": "fp8"}, 0.07),
    ],
)
@pytest.mark.parametrize("linear", [True, False])
@torch.no_grad()
def test_a_unet_against_diffusers(knobs: Any, allowed: float, linear: bool) -> None:
    for shape in ((2, 77, 32, 48), (1, 77, 16, 16), (3, 154, 8, 4)):
        arguments = fused_unets.inputs(*shape, device="cuda")
        expected = fused_unets.unet(linear, "cuda")(**arguments)[0]
        made = fused_unets.unet(linear, "cuda")
        Fused(**knobs).apply(fused_unets.target("cuda", unet=made))
        assert error(made(**arguments)[0], expected) < allowed


@pytest.mark.parametrize(("convolutions", "allowed"), [("bf16", 0.02), ("fp8", 0.15)])
@torch.no_grad()
def test_a_vae_against_diffusers(convolutions: Any, allowed: float) -> None:
    made, plain = fused_unets.vae("cuda"), fused_unets.vae("cuda")
    technique = Fused(precision="fp8", convolutions=convolutions, targets=("vae",))
    technique.apply(fused_unets.target("cuda", vae=made))
    latents = torch.randn(2, 4, 37, 50, generator=torch.Generator().manual_seed(3)).cuda()
    decoded = plain.decode(latents, return_dict=False)[0]
    assert error(made.decode(latents, return_dict=False)[0], decoded) < allowed
    encoded = made.encode(decoded.clamp(-1, 1), return_dict=False)[0].mode()
    assert error(encoded, plain.encode(decoded.clamp(-1, 1), return_dict=False)[0].mode()) < allowed


def test_padded_keys_are_not_attended_to() -> None:
    if (reason := unsupported_on(this_machine("cuda"))) is not None:
        pytest.skip(reason)
    q, k, v = (torch.randn(1, 700, 3, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
    ones, made = torch.ones(2, device="cuda"), torch.empty_like(q)
    num_keys = torch.tensor([640], dtype=torch.int32, device="cuda")
    attend(q, k, v, ones, ones, made, num_keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(q, k, v, ones, ones, made, num_keys)
    for count in (640, 513, 700):
        num_keys.fill_(count)
        graph.replay()
        parts = (q, k[:, :count], v[:, :count])
        heads_first = [part.float().transpose(1, 2) for part in parts]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
        assert error(made.float(), expected) < 0.1


def test_wide_heads_attend_by_rows() -> None:
    parts = torch.randn(2, 3072, 3, 1, 512, device="cuda", dtype=torch.bfloat16).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert error(attend_by_rows(q, k, v), expected) < 0.01


@pytest.mark.parametrize(
    "recipe",
    [
        "fused(bf16)@denoiser,vae+cuda_graph@denoiser,text_encoder,vae",
        "fused(fp8)+cuda_graph",
        "fused(fp8, convolutions=fp8)+cuda_graph",
    ],
)
def test_an_embedded_unet_in_a_graph(recipe: str) -> None:
    # At the size that it was trained for; at others rounding alone changes the image by 24 dB in 20 steps.
    call: Any = {"num_inference_steps": 20, "height": 128, "width": 128}
    plain = draw(vivace.load("tiny-sd", "baseline", device="cuda"), **call)
    made = vivace.load("tiny-sd", recipe, device="cuda")
    for _ in range(3):
        assert psnr(draw(made, **call), plain) > 30
    assert made.refuted({}) is None


@pytest.mark.parametrize("recipe", ["fused(bf16)@denoiser,vae", "fused(fp8)"])
@pytest.mark.parametrize("model", ["tiny-flux", "tiny-sd"])
def test_an_offloaded_model_draws_the_same(model: str, recipe: str) -> None:
    """fp8 weights are rounded on the GPU in both, one transformer or block at a time where it is offloaded."""
    kept = vivace.load(model, recipe, device="cuda")
    moved = vivace.load(model, f"{recipe}+offload(model)", device="cuda")
    assert kept.effects.items() <= moved.effects.items()
    for calls, prompt in enumerate(("a red circle", "a blue square"), 1):
        assert psnr(draw(moved, prompt), draw(kept, prompt)) > 60
        evidence = moved.evidence()
        assert evidence["weights_on_gpu_after_run_bytes"] == 0
        if model == "tiny-flux":
            assert evidence["denoiser.modulations_hoisted"] == calls * STEPS["flux"], "a row for each step"
            assert evidence["denoiser.modulations_computed_in_the_loop"] == 0
    assert moved.refuted({}) is None
