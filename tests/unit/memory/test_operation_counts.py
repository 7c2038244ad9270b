"""What a call computes, counted while its memory is predicted: by hand, as elsewhere, as often as it really runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.flow_models import EDITING, MODELS, _small, draw, session
from tests.make import make_environment, make_trial
from tests.typed import run_vivace
from vivace.architectures import ARCHITECTURES
from vivace.benchmark.rounds.work import count_work
from vivace.errors import UsageError
from vivace.evidence.lint.model_limits import least_seconds
from vivace.foundation.hardware import Chip, named_gpu
from vivace.foundation.spec.ceilings import ComponentWork
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.weightless import find_weightless

RECORD = json.loads((Path(__file__).parents[3] / "results" / "model-flops.json").read_text())


def part(prediction: Prediction, name: str = "denoiser") -> ComponentWork:
    return next(component for component in prediction.work.components if component.component == name)


def flop(work: ComponentWork) -> int:
    return work.gemm_flop + work.conv_flop + work.attention_flop


def recorded(model: str, name: str) -> tuple[int, int, int, int]:
    component = RECORD[model]["components"][name]
    return component["calls"], component["gemm"], component["conv"], component["attention"]


def test_the_language_model_of_flux2_klein_by_hand() -> None:
    """Qwen3-4B on 512 tokens: 36 layers, eight heads of keys and values for 32 of queries, and its vocabulary."""
    width, heads, mlp, tokens, words = 2560, 32 * 128, 9728, 512, 151936
    layer = width * heads + 2 * width * 8 * 128 + heads * width + 3 * width * mlp
    calls, gemm, conv, attended = recorded("flux2-klein-4b", "text_encoder")
    rotary = 2 * 64 * tokens  # its angles are a matmul
    assert (calls, conv) == (1, 0)
    assert gemm + attended == pytest.approx(
        2 * tokens * (36 * layer + words * width) + 36 * 4 * tokens**2 * heads + rotary, rel=1e-6
    )


@pytest.mark.parametrize("model", ["flux2-klein-4b", "sana-sprint-1600m"])
@pytest.mark.slow("flux2*")
def test_the_record_is_what_is_counted(model: str) -> None:
    weightless = predict(find_weightless(model), resolve("baseline"))
    for component in weightless.work.components:
        assert recorded(model, component.component) == (
            component.calls,
            component.gemm_flop,
            component.conv_flop,
            component.attention_flop,
        ), component.component


@pytest.mark.parametrize("recipe", ["baseline", "cfg_cutoff(0.4)", "tiny_vae+steps(7)", "scheduler(heun)"])
@pytest.mark.quick("baseline")
@pytest.mark.exhaustive("tiny_vae*")
def test_the_count_is_that_of_the_benchmark(recipe: str) -> None:
    """Which runs every step, and counts with PyTorch's own counter."""
    trial = make_trial(recipe)
    trial = trial.model_copy(
        update={"workload": trial.workload.model_copy(update={"num_inference_steps": 5})}
    )
    call = {name: value for name, value in trial.workload.call.items() if name not in ("height", "width")}
    mine = predict(find_weightless("tiny-sd"), resolve(recipe), call=call)
    calls = part(mine).calls
    theirs = count_work(trial, make_environment(), None, calls)
    assert theirs.reason is None
    for component in theirs.components:
        counted = part(mine, component.component)
        assert (counted.calls, flop(counted)) == (
            component.calls,
            component.gemm_flop + component.conv_flop + component.attention_flop,
        )
        assert counted.attention_flop == component.attention_flop


@pytest.mark.parametrize("model", [*MODELS, *EDITING, "flux2-klein-9b-kv"])
@pytest.mark.quick("sana-sprint-1600m", "flux2-klein-9b-kv")
def test_calls_are_as_many_as_when_it_runs(model: str) -> None:
    opened = session(model)
    calls: list[int] = []
    opened.pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    draw(opened)
    with _small(model):
        weightless = predict(find_weightless(model), resolve("baseline"), height=128, width=128)
    assert part(weightless).calls == len(calls)


@pytest.mark.long
def test_precision_follows_the_recipe_and_sets_the_limit() -> None:
    chip = named_gpu("NVIDIA H100 80GB HBM3").chip

    blackwell = named_gpu("B200").chip

    def least(recipe: str, chip: Chip = chip) -> tuple[Any, ...]:
        weightless = predict(find_weightless("tiny-flux"), resolve(recipe))
        denoiser = part(weightless)
        return (
            (denoiser.gemm, denoiser.attention),
            least_seconds(weightless.work, chip),
            weightless.work_is_bound,
        )

    half, half_s, _ = least("bf16")
    eight, eight_s, _ = least("bf16+quantize(fp8)")
    assert (half, eight) == (("bf16", "bf16"), ("fp8", "bf16"))
    assert 0.5 * half_s < eight_s < half_s, "attention and the VAE stay in bf16"
    mine = [least(f"bf16+quantize({scheme})", blackwell) for scheme in ("fp8", "mxfp8", "nvfp4")]
    assert [kinds[0] for kinds, _, _ in mine] == ["fp8", "mxfp8", "nvfp4"]
    assert mine[0][1] == mine[1][1] > mine[2][1]
    assert least("bf16+taylorseer(hits=0.5)")[2], "hits are not known"


def test_the_command_prints_it(tmp_path: Path) -> None:
    out = run_vivace(tmp_path, "plan", "tiny-flux", "--gpu", "h100", "--why").stdout
    (compute,) = (line for line in out.splitlines() if line.startswith("compute"))
    assert "28 steps (denoiser 28 x " in compute
    assert "by the data sheet of H100: 989.5 TFLOP/s in 16 bits, 1979 in 8" in " ".join(out.split())
    answer = json.loads(run_vivace(tmp_path, "plan", "tiny-flux", "--gpu", "H100", "--json").stdout)
    assert answer["least_s"] > 0
    assert answer["work"]["components"][0]["component"] == "denoiser"
    wrong = run_vivace(tmp_path, "plan", "tiny-flux", "--gpu", "H10", code=UsageError.exit_code)
    assert "--gpu 'H10': no such GPU is known; did you mean 'H100'?" in wrong.stderr


def test_every_architecture_is_in_the_record() -> None:
    assert list(RECORD) == list(ARCHITECTURES)
