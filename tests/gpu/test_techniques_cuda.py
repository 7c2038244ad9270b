"""Techniques that only a CUDA device can show: graphs, TF32, offloading. `python -m pytest -m gpu tests/gpu`."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import STEPS, build, draw, psnr
from vivace.errors import NoEffect, RecipeError, Unsupported
from vivace.machinery.offloading import layer_offloader, offloaded_module
from vivace.machinery.step_caching.model_fits import Fit, keep

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def load(recipe: str) -> Any:
    return vivace.load("tiny-sd", recipe, device="cuda")


def on_gpu(family: str, recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    return vivace.apply(build(family).to("cuda", dtype), recipe)


# cuda_graph


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_replayed_steps_generate_the_same_images(family: str) -> None:
    reference = on_gpu(family, "baseline")
    captured = on_gpu(family, "cuda_graph")
    for _ in range(2):
        for call in ({}, {"height": 96}, {"seed": 5}):
            assert psnr(draw(captured, **call), draw(reference, **call)) > 60
    evidence = captured.evidence()
    assert evidence["cuda_graphs_recorded"] == 2, "one for each size"
    assert evidence["cuda_graph_replays"] == 6 * STEPS[family]
    assert captured.refuted({}) is None


@pytest.mark.parametrize(
    "recipe",
    [
        "scheduler(pndm)+guidance(1)",  # keeps earlier outputs
        "scheduler(dpmpp_2m)",
        "cfg_cutoff(0.5)",  # two batch sizes
        "guidance(1)",
        "fp32",
        "bf16+channels_last",
        "fuse_qkv",
        "int8",
        "compile",
        "attention(efficient)",
        "inference_mode",
    ],
)
def test_replayed_steps_compose(recipe: str) -> None:
    call = {"num_inference_steps": 6}
    reference = draw(load(recipe), **call)
    captured = load(f"cuda_graph+{recipe}")
    for _ in range(2):
        assert psnr(draw(captured, **call), reference) > 35
    assert captured.evidence()["cuda_graphs_recorded"] == (2 if "cutoff" in recipe else 1)
    assert captured.refuted({}) is None


def test_a_forward_that_reads_back_is_refused_with_a_reason() -> None:
    made = load("cuda_graph")
    forward = made.pipe.unet.conv_in.forward

    def reads_back(x: torch.Tensor) -> torch.Tensor:
        assert float(x.sum()) < float("inf")
        return forward(x)

    made.pipe.unet.conv_in.forward = reads_back
    with pytest.raises(Unsupported, match="cannot be captured"):
        draw(made)
    assert torch.randn(4, device="cuda").isfinite().all(), "a failed capture harms nothing after it"


# tf32


def test_tf32_rounds_and_is_set_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    reference = draw(load("fp32"))
    rounded = load("fp32+tf32")
    picture = draw(rounded)
    assert not np.array_equal(picture, reference)
    assert psnr(picture, reference) > 30
    assert rounded.evidence() == {"tf32_denoiser_calls": 3}
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
    assert np.array_equal(draw(load("fp32")), reference), "the next trial never notices"


def test_tf32_of_a_model_in_fp16_has_nothing_to_do() -> None:
    with pytest.raises(NoEffect, match="nothing computes in fp32"):
        load("tf32")
    assert load("tf32+steps(3)").warnings


# layerwise_casting


@pytest.mark.parametrize("recipe", ["", "+cuda_graph", "+inference_mode", "+fuse_qkv+channels_last"])
def test_weights_in_fp8_take_half_of_fp16(recipe: str) -> None:
    plain = load("baseline")
    stored = load(f"layerwise_casting{recipe}")
    draw(stored)
    num = stored.evidence()["denoiser.parameters_in_fp8_now"]
    assert num > 4_000_000
    assert psnr(draw(stored, num_inference_steps=6), draw(plain, num_inference_steps=6)) > 22
    assert sum(p.numel() for p in stored.pipe.unet.parameters() if p.element_size() == 1) == num


# offload

STREAMED = ["group, stream=True", "group, stream=True, keep=0.004"]


@pytest.mark.parametrize("mode", ["model", "sequential", "group", "group, keep=0.004", *STREAMED])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_offloaded_weights_generate_the_same_image(family: str, mode: str) -> None:
    reference = draw(on_gpu(family, "baseline"))
    offloaded = on_gpu(family, f"offload({mode})")
    for _ in range(2):
        assert psnr(draw(offloaded), reference) > 60
    assert offloaded.refuted({}) is None
    assert offloaded.evidence()["weights_on_gpu_after_run_bytes"] == 0


@pytest.mark.parametrize("mode", ["model", "sequential", "group", "group, stream=True"])
def test_offloading_takes_the_weights_off_the_gpu(mode: str) -> None:
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    plain = load("baseline")
    held = torch.cuda.memory_allocated() - before
    del plain
    gc.collect()
    before = torch.cuda.memory_allocated()
    offloaded = load(f"offload({mode})")
    assert torch.cuda.memory_allocated() - before < 0.1 * held
    draw(offloaded)
    gc.collect()
    # Beside cuBLAS' workspace.
    assert torch.cuda.memory_allocated() - before < 0.1 * held + 64 * 2**20


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        "tiny_vae",
        "prompt_cache",
        "inference_mode",
        "fuse_qkv+channels_last",
        "vae_tiling(32)+vae_slicing",
        "cfg_cutoff(0.5)",
        "layerwise_casting",
        "int8",
        "compile",
        "compile(blocks=repeated)",
        "deepcache(hits=0.5)",
        "fp32+tf32",
    ],
)
@pytest.mark.parametrize("mode", ["model", "sequential", "group", *STREAMED])
def test_offloading_composes(recipe: str, mode: str) -> None:
    refused = {"model": (), "sequential": ("int8", "compile", "compile(blocks=repeated)")}
    if recipe in refused.get(mode, ("compile",)):
        with pytest.raises(RecipeError, match="does not go with"):
            load(f"{recipe}+offload({mode})")
        return
    reference = draw(load(recipe))
    both = load(f"{recipe}+offload({mode})")
    for _ in range(2):
        assert psnr(draw(both), reference) > 35


def components_of(pipe: Any) -> list[Any]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def tensors_of(pipe: Any) -> list[torch.Tensor]:
    return [tensor for part in components_of(pipe) for tensor in (*part.parameters(), *part.buffers())]


def pinned(offloaded: Any) -> tuple[list[int], int]:
    """The address of each tensor in pinned host memory, and the bytes of all."""
    weights = tensors_of(offloaded.pipe)
    whole = sum({weight.data_ptr(): weight.nbytes for weight in weights}.values())
    assert all(weight.is_pinned() for weight in weights if weight.numel())
    (effect,) = offloaded.effects.values()
    assert effect["page_locked_bytes"] == whole
    assert "rest_not_page_locked" not in effect
    return [weight.data_ptr() for weight in weights], whole


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_components_are_copied_to_the_gpu_and_not_back(family: str) -> None:
    reference = draw(on_gpu(family, "baseline"))
    offloaded = on_gpu(family, "offload(model)")
    on_host, whole = pinned(offloaded)
    draw(offloaded)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        assert psnr(draw(offloaded), reference) > 60
    copies = [event.name for event in profiler.events() if event.name.startswith("Memcpy")]
    there = sum(name.startswith("Memcpy HtoD (Pinned") for name in copies)
    back = sum(name.startswith("Memcpy DtoH") for name in copies)
    assert there >= len({*on_host}), "every weight separately"
    assert back < 0.2 * there, "the image, and what schedulers read"
    assert [weight.data_ptr() for weight in tensors_of(offloaded.pipe)] == on_host
    evidence = offloaded.evidence()
    assert evidence["weights_copied_per_call_bytes"] == whole
    assert 0 < evidence["weights_copied_per_call_s"] < 1
    assert evidence["weights_on_gpu_after_run_bytes"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_layers_are_copied_to_the_gpu_and_not_back(family: str, stream: bool) -> None:
    reference = draw(on_gpu(family, "baseline"))
    offloaded = on_gpu(family, f"offload(group, stream={stream})")
    on_host, whole = pinned(offloaded)
    draw(offloaded)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        assert psnr(draw(offloaded), reference) > 60
    copies = [event for event in profiler.events() if event.name.startswith("Memcpy")]
    there = [event for event in copies if event.name.startswith("Memcpy HtoD (Pinned")]
    assert sum(event.name.startswith("Memcpy DtoH") for event in copies) < 0.2 * len(there)
    assert [weight.data_ptr() for weight in tensors_of(offloaded.pipe)] == on_host
    evidence = offloaded.evidence()
    assert evidence["weights_copied_per_call_bytes"] > 2 * whole, "in every step"
    assert evidence["weights_on_gpu_after_run_bytes"] == 0
    if stream:
        assert evidence["layers_fetched_ahead_per_call"] > 100
        computing = {e.device_resource_id for e in profiler.events() if "gemm" in e.name.lower()}
        assert {copy.device_resource_id for copy in there} - computing, "on a separate stream"


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("recipe", ["", "int8+"])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_no_kernel_reads_a_copy_before_it_is_complete(
    family: str, recipe: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = draw(on_gpu(family, recipe.strip("+") or "baseline"))
    offloaded = on_gpu(family, f"{recipe}offload({mode})")
    write_copies, empty_like = layer_offloader.write_copies, torch.empty_like  # type: ignore[attr-defined]

    def late(copies: Any) -> None:
        torch.cuda._sleep(10_000_000)  # cycles: milliseconds
        write_copies(copies)

    def unwritten(like: torch.Tensor, **how: Any) -> torch.Tensor:
        empty = empty_like(like, **how)
        return empty.fill_(float("nan") if empty.is_floating_point() else 77) if "device" in how else empty

    monkeypatch.setattr(torch, "empty_like", unwritten)
    monkeypatch.setattr(layer_offloader, "write_copies", late)
    for _ in range(3):
        assert psnr(draw(offloaded), reference) > 60
    assert offloaded.evidence()["layers_fetched_ahead_per_call"] > 30


@pytest.mark.parametrize("mode", ["model", "sequential", "group", "group, stream=True"])
def test_an_offloaded_vae_that_is_cast_in_the_call_on_a_gpu(mode: str) -> None:
    reference = draw(on_gpu("sdxl", "baseline", torch.float16))
    offloaded = on_gpu("sdxl", f"offload({mode})", torch.float16)
    assert offloaded.pipe.vae.config.force_upcast
    for _ in range(3):
        assert psnr(draw(offloaded), reference) > 45
    if mode != "sequential":
        assert offloaded.pipe.vae.dtype == torch.float16
        assert all(weight.is_pinned() for weight in offloaded.pipe.vae.parameters())


@pytest.mark.parametrize("mode", ["model", "group", *STREAMED])
def test_a_failed_call_leaves_nothing_on_the_gpu(mode: str) -> None:
    offloaded = on_gpu("sdxl", f"offload({mode})", torch.float16)
    reference = draw(offloaded)

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    for part in (offloaded.pipe.unet, offloaded.pipe.vae.decoder):
        hook = part.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no room"):
            draw(offloaded)
        hook.remove()
        assert {weight.device.type for weight in tensors_of(offloaded.pipe)} == {"cpu"}
        assert offloaded.pipe.vae.dtype == torch.float16
    assert psnr(draw(offloaded), reference) > 60


def test_a_host_that_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(_: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offloaded_module, "_allocate_pinned", allocate)
    reference = draw(on_gpu("flux", "baseline"))
    offloaded = on_gpu("flux", "offload(model)")
    (effect,) = offloaded.effects.values()
    assert (effect["page_locked_bytes"], effect["rest_not_page_locked"]) == (0, "CUDA error: out of memory")
    for _ in range(2):
        assert psnr(draw(offloaded), reference) > 60
    assert {weight.device.type for weight in tensors_of(offloaded.pipe)} == {"cpu"}


@pytest.mark.parametrize(
    "recipe", ["compile", "int8+compile", "compile(blocks=repeated)", "bf16+int4+compile"]
)
def test_onloading_compiles_nothing_again(recipe: str) -> None:
    offloaded = load(f"{recipe}+offload(model)")
    draw(offloaded)
    graphs = offloaded.evidence()["compiled_graphs"]
    for _ in range(2):
        draw(offloaded)
    assert offloaded.evidence()["compiled_graphs"] == graphs


# prompt_cache


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_freed_text_encoders_come_back_for_new_prompts(family: str) -> None:
    reference, freed = on_gpu(family, "baseline"), on_gpu(family, "prompt_cache(free_encoders=True)")
    for prompt in ("a red circle", "a star", "a red circle"):
        assert np.array_equal(draw(freed, prompt), draw(reference, prompt))
        assert freed.pipe.text_encoder.device.type == "cpu"
    evidence = freed.evidence()
    assert (evidence["prompt_cache_hits"], evidence["prompt_cache_misses"]) == (1, 2)
    assert evidence["text_encoders_freed"] == 2 * (1 if family == "sd" else 2)


# step caches


@pytest.mark.parametrize(
    "extra", ["compile", "compile(reduce-overhead)", "cuda_graph", "offload(model)", "offload(group)"]
)
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("sd", "deepcache(2)"),
        ("sdxl", "deepcache(2)"),
        ("sd", "faster_cache(2, start=1001)"),
        ("sdxl", "faster_cache(2, start=1001)"),
        ("flux", "teacache(hits=0.5)"),
        ("flux", "teacache(0.3)"),
        ("flux", "seacache(0.3)"),
        ("flux", "magcache(hits=0.5)"),
        ("flux", "taylorseer"),
        ("flux", "pyramid_attention"),
    ],
)
def test_a_step_cache_outlasts_what_wraps_the_forward(
    family: str, recipe: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    keep(Fit((1.0, 0.0), model="a line", high=10.0), build("flux").transformer)
    call: dict[str, Any] = {"num_inference_steps": 12 if family == "flux" else 8}
    prompts = ["a red circle", "a blue square"] if "faster" in recipe else "a red circle"
    alone = draw(on_gpu(family, recipe), prompts, **call)
    both = on_gpu(family, f"{recipe}+{extra}")
    for _ in range(3):
        assert psnr(draw(both, prompts, **call), alone) > 30
    evidence = both.evidence()
    assert 0.1 < evidence["cache_hit_rate"] < 0.9
    if "compile" in extra:
        assert (evidence["compiled_graphs"], evidence["graph_breaks"]) == (3 if "0.3" in recipe else 2, 0)
