"""LoRAs for few steps, merged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vivace
from tests.families import draw, psnr
from tests.targets import target_of
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import FewSteps, SamplerEntry, StoredPart, few_steps_of
from vivace.errors import Unsupported, UnusableModel, WorkloadError
from vivace.measure.machine import this_machine
from vivace.models.find import find_model
from vivace.models.load import load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.distilled import Distilled

pytestmark = pytest.mark.usefixtures("short_calls")

LAYERS = ("mid_block.attentions.0.transformer_blocks.0.attn1.to_q", "mid_block.resnets.0.conv1")
RANK = 2


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """Of tiny-sd: a Linear and a convolution."""
    unet = load_pipeline(find_model("tiny-sd"), "cpu").unet
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name in LAYERS:
        weight = unet.get_submodule(name).weight
        down = (RANK, *weight.shape[1:])
        up = (weight.shape[0], RANK, *[1] * (weight.dim() - 2))
        state[f"unet.{name}.lora_A.weight"] = torch.randn(down, generator=generator) * 0.1
        state[f"unet.{name}.lora_B.weight"] = torch.randn(up, generator=generator) * 0.1
    path = tmp_path / "lora.safetensors"
    save_file(state, str(path))
    return path


@pytest.fixture
def distilled_tiny_sd(lora: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tiny-sd has an LCM LoRA for 4 or 2 steps, and a lightning one for 8."""
    lcm = FewSteps(
        kind="lcm",
        lora=str(lora),
        steps=(4, 2),
        guidance_scale=1.0,
        scheduler=SamplerEntry(class_name="LCMScheduler"),
    )
    eight = lcm.model_copy(update={"kind": "lightning", "steps": (8,), "scale": 0.5})
    entry = CATALOGUE["tiny-sd"].model_copy(update={"few_steps": (lcm, eight)})
    monkeypatch.setitem(CATALOGUE, "tiny-sd", entry)
    return lora


def merged_weight(session: Any, name: str) -> torch.Tensor:
    return torch.as_tensor(session.pipe.unet.get_submodule(name).weight)


@pytest.mark.parametrize(("recipe", "amount"), [("distilled(lcm)", 1.0), ("distilled(lightning)", 0.5)])
@pytest.mark.quick("distilled(lcm)*")
def test_the_lora_is_in_the_weights_and_the_call_is_what_it_was_made_for(
    distilled_tiny_sd: Path, recipe: str, amount: float
) -> None:
    from safetensors.torch import load_file

    plain, made = vivace.load("tiny-sd", device="cpu"), vivace.load("tiny-sd", recipe, device="cpu")
    state = load_file(distilled_tiny_sd)
    for name in LAYERS:
        down, up = (state[f"unet.{name}.lora_{which}.weight"] for which in "AB")
        delta = amount * (up.flatten(1) @ down.flatten(1)).view_as(merged_weight(plain, name))
        assert torch.allclose(merged_weight(made, name), merged_weight(plain, name) + delta, atol=1e-6)
    assert type(made.pipe.scheduler).__name__ == "LCMScheduler"
    steps = 4 if amount == 1 else 8
    assert (made.defaults["num_inference_steps"], made.defaults["guidance_scale"]) == (steps, 1.0)
    effect = made.effects["distilled@denoiser"]
    assert (effect["denoiser.merged_layers"], effect["scheduler"]) == (2, "LCMScheduler")
    calls = []
    made.pipe.unet.register_forward_hook(lambda *_: calls.append(1))
    assert np.isfinite(np.asarray(made("a red circle", output_type="np").images)).all()
    assert len(calls) == steps


def test_what_stands_beside_it_wins(distilled_tiny_sd: Path) -> None:
    made = vivace.load("tiny-sd", "distilled(lcm, steps=2)+guidance(2)+scheduler(euler)", device="cpu")
    assert (made.defaults["num_inference_steps"], made.defaults["guidance_scale"]) == (2, 2.0)
    assert type(made.pipe.scheduler).__name__ == "EulerDiscreteScheduler"


@pytest.mark.parametrize("other", ["int8", "fuse_qkv", "bf16", "compile(backend=eager)"])
@pytest.mark.quick("int8")
@pytest.mark.exhaustive("compile*", "bf16", "fuse*")
def test_it_is_merged_before_what_changes_weights(distilled_tiny_sd: Path, other: str) -> None:
    alone = draw(vivace.load("tiny-sd", "distilled(lcm)", device="cpu"))
    both = draw(vivace.load("tiny-sd", f"{other}+distilled(lcm)", device="cpu"))
    assert psnr(both, alone) > 20


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        ("tiny-flux", "distilled(lcm)", "no few-step LoRA is known for this model"),
        ("tiny-sd", "distilled(turbo)", "no turbo LoRA is known for this model; use lcm or lightning"),
        ("tiny-sd", "distilled(lcm, steps=3)", "this model's lcm LoRA is made for 2, 4 steps, not for 3"),
    ],
)
def test_a_distillation_that_is_not_there_is_refused_with_a_reason(
    distilled_tiny_sd: Path, model: str, recipe: str, words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        vivace.load(model, recipe, device="cpu")


def test_a_file_of_another_model_is_refused(distilled_tiny_sd: Path) -> None:
    save_file(
        {"unet.nothing.lora_A.weight": torch.zeros(2, 2), "unet.nothing.lora_B.weight": torch.zeros(2, 2)},
        distilled_tiny_sd,
    )
    with pytest.raises(UnusableModel, match="is not a LoRA for this unet"):
        vivace.load("tiny-sd", "distilled(lcm)", device="cpu")


def test_random_weights_take_the_steps_and_no_lora(distilled_tiny_sd: Path) -> None:
    entry = CATALOGUE["tiny-sd"]
    pipe = load_pipeline(find_model("tiny-sd"), "cpu")
    before = pipe.unet.get_submodule(LAYERS[0]).weight.clone()
    target = target_of(
        this_machine("cpu"), pipe=pipe, has_random_weights=True, distillations=few_steps_of(entry)
    )
    technique = Distilled(kind="lcm")
    assert technique.unsupported(target) is None
    effect = technique.apply(target)
    assert "random weights" in str(effect.changed["lora"])
    assert effect.call["num_inference_steps"] == 4
    assert torch.equal(before, pipe.unet.get_submodule(LAYERS[0]).weight)


def test_sigmas_of_its_own_are_passed_and_no_other_number_of_steps(
    distilled_tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CATALOGUE["tiny-sd"]
    flow = CATALOGUE["flux2-dev"].few_steps[0]
    own = flow.model_copy(
        update={"lora": str(distilled_tiny_sd), "steps": (4,), "call": {"sigmas": [14.0, 9.0, 5.0, 1.0]},
                "scheduler": SamplerEntry(class_name="EulerDiscreteScheduler")}
    )  # fmt: skip
    monkeypatch.setitem(CATALOGUE, "tiny-sd", entry.model_copy(update={"few_steps": (own,)}))
    session = vivace.load("tiny-sd", "distilled(turbo)", device="cpu")
    session("a red circle", output_type="latent")
    assert session.pipe.scheduler.sigmas.tolist() == [14.0, 9.0, 5.0, 1.0]
    with pytest.raises(WorkloadError, match="for 4 steps, not 6"):
        session("a red circle", num_inference_steps=6)


@pytest.mark.parametrize("steps", [4, 2, 8])
@pytest.mark.quick("4")
def test_tiny_sd_draws_in_few_steps_without_guidance(steps: int) -> None:
    made = vivace.load("tiny-sd", f"distilled(lcm, steps={steps})", device="cpu")
    assert (made.defaults["num_inference_steps"], made.defaults["guidance_scale"]) == (steps, 1.0)
    assert made.effects["distilled@denoiser"]["lora"] == CATALOGUE["tiny-sd"].few_steps[0].lora
    rows: list[int] = []
    made.pipe.unet.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    picture = np.asarray(made("a red circle", output_type="np").images)
    assert rows == [1] * steps
    assert np.isfinite(picture).all()


def test_a_script_of_tiny_sds_takes_the_file_that_ships() -> None:
    text = write_script(find_model("tiny-sd"), resolve("distilled(lcm)"), "cpu", prompt="a red circle").text
    lines = text.split("pipe.load_lora_weights(")[1].split(")")[0]
    assert 'WEIGHTS / "tiny-sd-lcm",' in lines
    assert 'weight_name="pytorch_lora_weights.safetensors",' in lines
    assert "from vivace.models.find import WEIGHTS" in text
    assert "vivace.apply" not in text


@pytest.mark.long
def test_a_plan_has_fewer_steps_and_no_larger_model() -> None:
    plain, few = (
        predict(find_weightless("sd15"), resolve(text)) for text in ("baseline", "distilled(hyper, steps=2)")
    )
    assert few.model_bytes == plain.model_bytes
    assert few.stages["denoiser"] < plain.stages["denoiser"], "no guidance: half the batch"


def test_a_script_merges_it_through_diffusers(
    distilled_tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = StoredPart(repo="somebody/some-lora", revision="abc", files=("it.safetensors",))
    entry = CATALOGUE["tiny-sd"]
    hub = entry.few_steps[1].model_copy(update={"lora": part, "kind": "hyper"})
    monkeypatch.setitem(CATALOGUE, "tiny-sd", entry.model_copy(update={"few_steps": (hub,)}))
    monkeypatch.setattr("vivace.machinery.lora.read_lora.fetch_part", lambda _: distilled_tiny_sd)
    text = write_script(find_model("tiny-sd"), resolve("distilled(hyper)"), "cpu", prompt="a red circle").text
    for words in ('"somebody/some-lora",', 'weight_name="it.safetensors",', 'revision="abc",'):
        assert words in text.split("pipe.load_lora_weights(")[1].split(")")[0]
    assert "pipe.fuse_lora(lora_scale=0.5)" in text
    assert "pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)" in text
    assert "num_inference_steps=8" in text
    assert "apply(" not in text, "in public calls alone"
