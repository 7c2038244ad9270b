"""Settings of the whole process: they hold during a call, and not a moment longer."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, STEPS, build, draw, drawn, session
from tests.targets import target_of
from vivace.errors import NoEffect
from vivace.machinery.technique import Machine
from vivace.runtime.calls import encode
from vivace.techniques.tf32 import Tf32

pytestmark = pytest.mark.usefixtures("short_calls")

AMPERE = Machine("cuda", "a GPU", (8, 0), None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("flux")
def test_inference_mode_keeps_every_bit(family: str) -> None:
    reference = drawn(family)
    made = session(family, "inference_mode")
    for _ in range(2):
        assert np.array_equal(draw(made), reference)
    assert not torch.is_inference_mode_enabled()
    calls = 2 * STEPS[family]
    assert made.evidence() == {"denoiser_calls": calls, "denoiser_calls_in_inference_mode": calls}
    assert made.refuted({}) is None
    assert draw(made, output_type="pt") is not None


def test_a_call_past_the_session_is_seen() -> None:
    made = session("sd", "inference_mode")
    made.pipe("a red circle", num_inference_steps=2, height=64, width=64)
    assert "2 denoiser calls ran outside inference mode" in (made.refuted({}) or "")


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    made = session("sd", "inference_mode")
    with pytest.raises(TypeError, match="same type"):
        made("a red circle", negative_prompt=["one", "two"])
    assert not torch.is_inference_mode_enabled()


def test_prompts_that_are_encoded_ahead_are_encoded_in_it_too() -> None:
    made = session("sd", "inference_mode")
    assert encode(made, ["a red circle"])["prompt_embeds"].is_inference()


def tf32(pipe: Any) -> Any:
    return Tf32().apply(target_of(machine=AMPERE, pipe=pipe))


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def set_flags(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.fixture
def _flags_kept() -> Iterator[None]:
    before = flags()
    yield
    set_flags(*before)


@pytest.mark.usefixtures("_flags_kept")
@pytest.mark.parametrize("before", [(False, True), (False, False), (True, False)])
def test_tf32_holds_inside_and_is_set_back(before: tuple[bool, bool]) -> None:
    set_flags(*before)
    pipe = build("sd")
    effect = tf32(pipe)
    assert flags() == before, "applying alone changes nothing"
    with pytest.raises(RuntimeError, match="no"), effect.around():
        assert flags() == (True, True)
        assert torch.get_float32_matmul_precision() == "high", "what the compiler asks can be answered"
        vivace.apply(pipe)("a red circle", num_inference_steps=2, height=64, width=64)
        raise RuntimeError("no")
    assert flags() == before
    assert effect.evidence() == {"tf32_denoiser_calls": 2}
    assert all(effect.changed[f"{c}.fp32_layers"] > 0 for c in ("denoiser", "vae", "text_encoder"))


@pytest.mark.usefixtures("_flags_kept")
def test_tf32_needs_something_in_fp32() -> None:
    pipe = build("sd")
    vivace.apply(pipe, "bf16@denoiser,text_encoder")
    assert list(tf32(pipe).changed) == ["vae.fp32_layers"]
    vivace.apply(pipe, "bf16@vae")
    with pytest.raises(NoEffect, match="nothing computes in fp32") as caught:
        tf32(pipe)
    assert caught.value.already_so
    pipe = build("sdxl").to(torch.float16)
    assert list(tf32(pipe).changed) == ["vae.fp32_layers"], "SDXL runs it in fp32"
    set_flags(True, True)
    with pytest.raises(NoEffect, match="uses TF32 already"):
        tf32(build("sd"))


def test_tf32_is_refused_in_words_elsewhere() -> None:
    def reason(machine: Machine) -> str:
        return Tf32().unsupported(target_of(machine=machine)) or ""

    assert "a CPU does not have" in reason(Machine("cpu", "a CPU", None, None))
    assert "an old one has less" in reason(Machine("cuda", "an old one", (7, 5), None))
    assert not reason(AMPERE)
