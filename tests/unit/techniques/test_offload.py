"""Weights kept in host memory: the same hooks with the CPU in the GPU's place, and predicted memory."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, draw, drawn, session, upcasting
from tests.targets import target_of
from vivace.errors import NoEffect, RecipeError, Unsupported
from vivace.machinery.technique import Machine, Trait
from vivace.machinery.technique.traits import give
from vivace.measure.accelerator import weights_bytes
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques import offload
from vivace.techniques.offload import Offload

pytestmark = pytest.mark.usefixtures("small_images")

GPU = Machine("cuda", "a GPU", (9, 0), "/usr/bin/c++")
CPU = torch.device("cpu")
MODES = ("model", "sequential", "group", "group, stream=True")


@pytest.fixture
def _cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    enable = offload._enable

    def on_cpu(pipe: Any, technique: Any, device: Any) -> Any:
        if technique.mode != "sequential":
            return enable(pipe, technique, CPU)
        from accelerate import cpu_offload

        # diffusers would name the device "cpu:0", which accelerate takes for another one than "cpu".
        for module in offload._components(pipe).values():
            cpu_offload(module, CPU, offload_buffers=len(module._parameters) > 0)
        return None

    monkeypatch.setattr(offload, "_enable", on_cpu)
    monkeypatch.setattr("vivace.runtime.opening.this_machine", lambda device: GPU)


@pytest.mark.usefixtures("_cpu_as_gpu")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.diagonal
@pytest.mark.slow("sd-model")
def test_the_picture_stays(family: str, mode: str) -> None:
    reference = drawn(family)
    pipe = build(family)
    total = weights_bytes(pipe)
    moved = vivace.apply(pipe, f"offload({mode})")
    for _ in range(2):
        assert np.array_equal(draw(moved), reference)
    if (family, mode) != ("flux", "sequential"):  # accelerate unties T5's two views of its embeddings
        assert weights_bytes(pipe) == total, "wherever they are"
    (effect,) = moved.effects.values()
    assert effect["offloaded_components"] == (3 if family == "sd" else 4)
    assert 0.99 * total <= int(effect["offloaded_bytes"]) <= total
    evidence = moved.evidence()
    assert evidence.pop("weights_on_gpu_after_run_bytes") == 0
    if mode != "sequential":
        copied = evidence.pop("weights_copied_per_call_bytes")
        # Layers are onloaded in each step, the embeddings that T5 shares do not.
        assert copied >= (0.99 if mode == "model" else 2) * total, "to where it works"
    if mode == "model":
        assert evidence.pop("weights_copied_per_call_s") > 0
    if "stream" in mode:
        assert evidence.pop("layers_fetched_ahead_per_call") > 50
    assert evidence == {}
    assert moved.refuted({}) is None


@pytest.mark.usefixtures("_cpu_as_gpu")
def test_what_it_does_not_go_with_is_refused_with_a_reason() -> None:
    pipe = build("sd")
    give(pipe.unet, frozenset({Trait.CAPTURED}))
    with pytest.raises(Unsupported, match="the denoiser is captured in CUDA graphs"):
        vivace.apply(pipe, "offload(model)")
    for mode in ("model", "group"):
        pipe = session("sd", f"offload({mode})").pipe
        with pytest.raises(NoEffect, match="moves the pipeline's weights already"):
            vivace.apply(pipe, "offload(group)")


@pytest.mark.usefixtures("_cpu_as_gpu")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.quick("group")
def test_an_offloaded_vae_is_cast(mode: str) -> None:
    reference = draw(vivace.apply(upcasting(), "baseline"))
    moved = vivace.apply(upcasting(), f"offload({mode})")
    for _ in range(2):
        assert np.array_equal(draw(moved), reference)


def test_it_needs_a_gpu_and_stream_needs_group() -> None:
    with pytest.raises(Unsupported, match="in host memory already"):
        vivace.load("tiny-sd", "offload(model)")
    with pytest.raises(RecipeError, match="stream belongs to group, not to model"):
        resolve("offload(model, stream=True)")


def test_weights_that_never_left_refute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_bytes", lambda module, device=None: 10)
    monkeypatch.setattr(offload, "_enable", lambda *arguments: None)

    effect = Offload(mode="model").apply(target_of(machine=GPU, pipe=build("sd")))
    assert effect.refuted is not None
    assert effect.refuted({}) == "all weights were on the GPU after the run"


def of(recipe: str, name: str = "flux-dev") -> Prediction:
    return predict(find_weightless(name), resolve(recipe))


@pytest.mark.usefixtures("shallow")
@pytest.mark.long
def test_memory_of_an_offloaded_model_is_predicted() -> None:
    plain, model, group = (of(recipe) for recipe in ("baseline", "offload(model)", "offload(group)"))
    size = {c.name: c.num_bytes for c in plain.components}
    assert model.model_bytes == group.model_bytes == 0
    assert model.loading_bytes == group.loading_bytes < 0.1 * plain.model_bytes, "it is kept in host memory"
    assert of("offload(model)", "synthetic:flux-dev").loading_bytes == plain.model_bytes, "made on the GPU"
    assert [c.num_parameters for c in model.components] == [c.num_parameters for c in plain.components]
    # One component at a time: each stage saves what the others weigh.
    rest = sum(size.values()) - size["transformer"]
    assert plain.stages["denoiser"] - model.stages["denoiser"] == pytest.approx(rest, rel=0.01)
    rest = sum(size.values()) - size["vae"]
    assert plain.stages["vae"] - model.stages["vae"] == pytest.approx(rest, rel=0.01)
    assert model.stages["text encoders"] > size["text_encoder_2"], "T5 is onloaded alone"
    # One layer at a time: activations and the largest layer.
    assert plain.stages["denoiser"] - group.stages["denoiser"] > 0.98 * sum(size.values())
    assert [c.num_parameters for c in group.components] == [c.num_parameters for c in plain.components]
    with pytest.raises(RecipeError, match="CUDA graphs read weights at fixed addresses"):
        of("compile(reduce-overhead)+offload(model)", "tiny-sd")
    with pytest.raises(RecipeError, match="group swaps the weights of single layers"):
        of("compile+offload(group)")
    # A compiled block is onloaded as one: FLUX's larger ones have 340 million weights, its largest layer 57 million.
    block = of("compile(blocks=repeated)+offload(group)").stages["denoiser"] - group.stages["denoiser"]
    assert 300e6 < block < 700e6
    with pytest.raises(Unsupported, match="offload: which layers are prefetched is decided while it runs"):
        of("offload(group, stream=True)", "tiny-sd")


@pytest.mark.parametrize("name", ["tiny-sd", "tiny-flux"])
@pytest.mark.long
def test_weights_with_a_single_number_are_predicted(name: str) -> None:
    """nf4's weights hold tensors without dimensions."""
    alone, both = of("quantize(nf4)", name), of("quantize(nf4)+offload(model)", name)
    assert both.peak_bytes < alone.peak_bytes
    assert both.model_bytes < 0.01 * alone.model_bytes
