"""Predictions against what was measured and published, and against models that are really loaded here."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.make import make_trial
from vivace.errors import NoEffect, UnknownModel, Unsupported, UnusableModel, WorkloadError
from vivace.measure.accelerator import weights_bytes
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.memory import fit
from vivace.runtime.memory.fit import RESERVE_BYTES, changes, fits
from vivace.runtime.memory.footprint import CUBLAS_WORKSPACE
from vivace.runtime.memory.predict import Prediction, predict, predict_trial
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.opening import session_of
from vivace.techniques import TECHNIQUES, offload
from vivace.techniques.offload import Offload
from vivace.techniques.quantize import Quantize

GIB = 2**30
# One H200, PyTorch 2.11.0+cu130, cuDNN 9.19, diffusers 0.42.1, 2026-11-20: the public stack with random weights, eager,
# batch 1, native size, prompt embeddings given, without text encoders (docs/memory.md). GiB after loading (FLUX.1-dev)
# or after the calls (UNets: cuBLAS's workspace is in it), and at the peak.
PUBLISHED = [
    ("flux-dev", "baseline", 22.36699914932251, 24.744956493377686),
    ("sdxl", "baseline", 5.077349662780762, 10.006784915924072),
    ("sdxl", "channels_last", 5.079852104187012, 8.750895023345947),
    ("sd15", "baseline", 1.8127522468566895, 2.409029960632324),
    ("sd15", "channels_last", 1.811638355255127, 2.24971342086792),
]


@functools.cache
def of(model: str, recipe: str = "baseline", **arguments: Any) -> Prediction:
    return predict(find_weightless(model), resolve(recipe), **arguments)


@pytest.mark.parametrize(("model", "recipe", "model_gib", "peak_gib"), PUBLISHED)
@pytest.mark.slow("flux-dev*", "sdxl*")
def test_published_figures(model: str, recipe: str, model_gib: float, peak_gib: float) -> None:
    prediction = of(model, recipe, text="embeddings")
    encoders = sum(c.num_bytes for c in prediction.components if c.name.startswith("text_encoder"))
    weights = prediction.model_bytes - encoders + CUBLAS_WORKSPACE
    peak = prediction.peak_bytes - encoders
    print(f"{model} {recipe}: {weights / GIB:.3f} of {model_gib:.3f}, {peak / GIB:.3f} of {peak_gib:.3f} GiB")
    assert weights == pytest.approx(model_gib * GIB, rel=0.03)
    assert peak == pytest.approx(peak_gib * GIB, rel=0.10)
    assert prediction.peak_stage == "vae"


STORED = {
    "quantize(int8)": "int8",
    "quantize(int8, convolutions=True)": "int8",
    "quantize(int8_dynamic)": "int8",
    "quantize(fp8_weight)": "fp8",
    "quantize(fp8, granularity=tensor)": "fp8",
    "quantize(fp8_static, pictures=1)": "fp8",
    "quantize(nf4)": "uint8",
}
"""Not int4, which a CPU stores otherwise than the GPU for which memory is predicted."""


@pytest.mark.parametrize("recipe", ["baseline", "tiny_vae", *STORED])
@pytest.mark.slow(
    "tiny_vae",
    "*convolutions=True*",
    "quantize(int8_dynamic)",
    "quantize(fp8_weight)",
    "quantize(fp8_static*",
    "quantize(nf4)",
)
def test_weights_are_those_of_the_model_when_it_is_loaded(recipe: str) -> None:
    """fp32 on both sides: that is what a CPU runs. Blocks of 512 bytes are 5 % of so small a model at most."""
    expected = "dtype(fp32)" if recipe == "baseline" else f"dtype(fp32)+{recipe}"
    predicted = of("tiny-sd", expected)
    located = find_model("tiny-sd")
    session = session_of(load_pipeline(located, "cpu"), located, resolve(recipe), "cpu")
    real = weights_bytes(session.pipe)
    assert real <= sum(c.num_bytes for c in predicted.components) < 1.05 * real
    for component in predicted.components:
        module = getattr(session.pipe, component.name)
        assert component.num_parameters == sum(p.numel() for p in module.parameters())
        assert component.class_name == type(module).__name__
    if recipe in STORED:
        (unet,) = (c for c in predicted.components if c.name == "unet")
        assert STORED[recipe] in unet.dtype
        assert predicted.peak_bytes < of("tiny-sd", "dtype(fp32)").peak_bytes


def test_what_the_recipe_does_shows_in_the_stage_that_it_concerns() -> None:
    base = of("tiny-sd")
    assert set(base.stages) == {"text encoders", "between", "denoiser", "vae"}
    assert of("tiny-sd", "guidance(1)").stages["denoiser"] < base.stages["denoiser"], "half the batch"
    math = of("tiny-sd", "attention(math)")
    assert math.stages["denoiser"] > base.stages["denoiser"], "score matrices"
    assert math.stages["vae"] == base.stages["vae"]
    tiny = of("tiny-sd", "tiny_vae")
    assert tiny.stages["vae"] < base.stages["vae"]
    assert tiny.model_bytes < base.model_bytes <= tiny.loading_bytes, "it is loaded before it is exchanged"
    assert of("tiny-sd", "compile").peak_bytes == base.peak_bytes, "the eager call stands for it"
    embedded = of("tiny-sd", text="embeddings")
    assert embedded.stages["text encoders"] < base.stages["text encoders"], "only handed through"
    assert embedded.model_bytes == base.model_bytes
    four = of("tiny-sd", batch=4)
    assert four.peak_bytes - four.model_bytes - CUBLAS_WORKSPACE == pytest.approx(
        4 * (base.peak_bytes - base.model_bytes - CUBLAS_WORKSPACE), rel=0.1
    )
    assert of("tiny-sd", height=256).peak_bytes > base.peak_bytes


def test_nothing_is_computed_and_the_random_numbers_stay() -> None:
    state = torch.random.get_rng_state()
    pipe = find_weightless("tiny-sd").build()
    devices = {t.device.type for c in ("unet", "vae", "text_encoder") for t in getattr(pipe, c).parameters()}
    assert devices == {"meta"}
    of.__wrapped__("tiny-sd")
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    located = find_model("tiny-sd")
    for name, path in located.files.items():
        if path.suffix != ".safetensors":
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, tmp_path / name)
    mine, theirs = of.__wrapped__(str(tmp_path)), of("tiny-sd")
    assert (mine.model_bytes, mine.peak_bytes) == (theirs.model_bytes, theirs.peak_bytes)
    index = tmp_path / "model_index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"unet": ["my_module", "Evil"]}))
    with pytest.raises(UnusableModel, match="vivace runs no code from models"):
        of.__wrapped__(str(tmp_path))
    index.write_text(json.dumps(content))
    (tmp_path / "unet" / "config.json").write_text("[]")
    with pytest.raises(UnusableModel, match=r"unet/config.json cannot be used: it holds a JSON list"):
        of.__wrapped__(str(tmp_path))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(WorkloadError, match="--width 130: tiny-sd takes multiples of"):
        of("tiny-sd", width=130)
    with pytest.raises(UnknownModel, match="did you mean 'flux-dev'"):
        of("synthetic:flux-dve")
    assert find_weightless("playground").build_tiny_vae is None, "its latents have statistics of their own"
    assert find_weightless(" Synthetic:SDXL ").build_tiny_vae is not None
    with pytest.raises(Unsupported, match="no chain of transformer blocks"):
        of("tiny-sd", "first_block_cache")


def test_one_image_has_no_batch_to_slice() -> None:
    with pytest.raises(Unsupported, match="one image is drawn per call"):
        of("tiny-sd", "vae_slicing")
    assert of("tiny-sd", "vae_slicing", batch=2).batch == 2


@pytest.mark.parametrize("name", ["tiny-sd", "tiny-flux"])
def test_a_scheduler_is_what_its_configuration_says(name: str) -> None:
    located = find_model(name)
    built = find_weightless(name).build().scheduler
    read = type(built).from_pretrained(str(located.files["scheduler/scheduler_config.json"].parent))
    assert {k: v for k, v in built.config.items() if k[0] != "_"} == {
        k: v for k, v in read.config.items() if k[0] != "_"
    }


def test_a_trial_is_predicted_as_it_would_be_measured() -> None:
    trial = make_trial("tiny_vae")
    assert predict_trial(trial) == of("tiny-sd", "tiny_vae")


@pytest.mark.long
def test_what_the_other_gpus_of_a_shared_picture_hold() -> None:
    alone, shared = (
        of("synthetic:flux-dev", "int8"),
        of("synthetic:flux-dev", "int8+parallel(ulysses, gpus=4)"),
    )
    assert (alone.other_gpus, alone.other_gpu_bytes) == (0, 0)
    assert shared.other_gpus == 3
    (denoiser,) = [part.num_bytes for part in shared.components if part.name == "transformer"]
    assert denoiser < shared.other_gpu_bytes < 1.1 * denoiser
    assert (shared.peak_bytes, shared.model_bytes) == (alone.peak_bytes, alone.model_bytes)


def test_what_techniques_propose_is_a_recipe_of_theirs_alone() -> None:
    proposed = {
        name: (*technique.declared.saves_memory, *technique.declared.fallback)
        for name, technique in TECHNIQUES.items()
    }
    assert any(proposed.values())
    for name, recipes in proposed.items():
        for recipe in recipes:
            assert [call.name for call in resolve(recipe).techniques] == [name]


@pytest.fixture
def _each_prediction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was predicted for one card is not computed again for the next."""
    kept: dict[object, Prediction | Exception] = {}

    def once(model: Any, recipe: Any, **arguments: Any) -> Prediction:
        key = (model.name, recipe.text, *arguments.items())
        if key not in kept:
            try:
                kept[key] = predict(model, recipe, **arguments)
            except (NoEffect, Unsupported, WorkloadError) as error:
                kept[key] = error
        stored = kept[key]
        if isinstance(stored, Exception):
            raise stored
        return stored

    monkeypatch.setattr(fit, "predicted", once)


@pytest.mark.long
def test_what_is_left_free_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_STEP", 1e6)
    monkeypatch.setattr(fit, "_WORTH_IT", 1)
    declared = replace(Quantize.declared, saves_memory=())
    monkeypatch.setattr(Quantize, "declared", declared)  # four bits would fit without it
    model = find_weightless("tiny-flux")
    recipe = resolve("bf16+int8@denoiser,text_encoder_2+channels_last@vae+offload(model)")
    whole = predict(model, recipe, height=64, width=64)
    card = RESERVE_BYTES + whole.peak_bytes - 1e5
    proposals = changes(model, recipe, whole, card, lambda _: None)
    *smaller, filled = proposals
    assert not any(change.fills for change in smaller)
    assert filled.fills
    before, after = smaller[-1].prediction, filled.prediction
    assert "offload(group)" in before.recipe
    (made,) = (technique for technique in resolve(after.recipe) if isinstance(technique, Offload))
    kept = made.keep * 1e9
    assert kept >= 2e6
    assert after.recipe == before.recipe.replace("offload(group)", f"offload(group, keep={kept / 1e9:g})")
    assert fits(after, card)
    assert 0.6 * kept < after.stages["denoiser"] - before.stages["denoiser"] <= kept
    assert after.stages["vae"] == before.stages["vae"], "what is kept makes room for the VAE"


@pytest.mark.usefixtures("_each_prediction_once")
@pytest.mark.long
def test_changes_come_in_order_of_harmlessness_and_each_lowers_the_peak() -> None:
    model, recipe = find_weightless("tiny-sd"), resolve("dtype(fp32)")
    now = predict(model, recipe, batch=4)
    assert fits(now, now.needed_bytes + RESERVE_BYTES)
    assert not fits(now, now.needed_bytes + RESERVE_BYTES - 1)
    tried: list[str] = []
    proposals = changes(model, recipe, now, RESERVE_BYTES, tried.append)
    assert not fits(proposals[-1].prediction, RESERVE_BYTES), "nothing fits a card of nothing"
    kinds = [change.what for change in proposals]
    assert kinds[0] == "dtype(bf16)"
    expected = ["vae_slicing", "offload(model)", "offload(group)", "tiny_vae"]
    assert [what for what in kinds if what in expected] == expected, "what keeps the image comes first"
    assert "offload(model)" not in proposals[-1].prediction.recipe, (
        "one way of offloading takes the other's place"
    )
    barely = RESERVE_BYTES + proposals[-1].prediction.loading_bytes
    many = [change.what for change in changes(model, recipe, now, barely, tried.append)]
    assert many[-2:] == ["tiny_vae", "batch 2"], "recipes before the workload"
    assert not any("batch" in what for what in kinds), "a smaller batch loads the same weights"
    peaks = [now.peak_bytes, *(change.prediction.peak_bytes for change in proposals)]
    assert peaks == sorted(peaks, reverse=True)
    assert "fp32" not in proposals[-1].prediction.recipe, "one dtype takes the other's place"
    first = changes(model, recipe, now, now.needed_bytes + RESERVE_BYTES - 1, tried.append)
    assert [change.what for change in first] == ["dtype(bf16)"], "no more than is needed"
