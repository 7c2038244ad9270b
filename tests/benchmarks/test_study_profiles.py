"""The script that profiles the runs of study 002, and its section of the page."""

from pathlib import Path

import pytest

from benchmarks import study_profiles as script
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.study_profiles import OTHERS, read_profiles, shortened
from tests.make import make_environment, make_trial
from vivace.foundation.spec.profiling import OperatorTime, Profile, Share


def profile(recipe: str, operators: dict[str, float], device: str = "Test GPU") -> Profile:
    """A profile on a GPU whose operators take these seconds."""
    total = sum(operators.values())
    return Profile(
        trial=make_trial(recipe),
        environment=make_environment().model_copy(update={"device_name": device}),
        warmup_s=(total,),
        steady=True,
        plain_s=total,
        traced_s=total,
        gpu_busy_s=total,
        gpu_idle_s=0.0,
        host_late_s=0.0,
        num_calls=1,
        num_discarded=0,
        num_denoiser_calls=4,
        operators=tuple(
            OperatorTime(
                name=name,
                family="GEMM",
                self_cpu_s=s,
                cpu_s=s,
                self_cuda_s=s,
                cuda_s=s,
                num_calls=2,
                least_s=s,
                most_s=s,
            )
            for name, s in operators.items()
        ),
        kernels=(),
        families=(
            Share(name="GEMM", cpu_s=total, cuda_s=total * 0.75),
            Share(name="copy", cpu_s=0, cuda_s=total / 4),
        ),
        components=(Share(name="denoiser", cpu_s=total, cuda_s=total),),
        gaps=(),
        waits=(),
        memory=None,
    )


def test_a_shortened_profile_has_the_same_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "NUM_OPERATORS", 2)
    whole = profile("baseline", {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0})
    short = shortened(whole)
    assert [operator.name for operator in short.operators] == ["a", "b", f"{OTHERS} (2)"]
    assert (short.self_cpu_s, short.self_cuda_s) == (whole.self_cpu_s, whole.self_cuda_s)
    assert short.operators[-1].num_calls == 4


@pytest.mark.soak
def test_an_embedded_model_is_profiled_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = ["--tiny", "--record", str(tmp_path / "r.jsonl"), "--warmup", "1"]
    assert run(script.command, [*place, "--limit-s", "0"]) == MEASURED_IN_PART
    assert run(script.command, [*place, "--only", "Initial", "--only", "FlashAttention"]) == MEASURED_IN_PART
    out = capfd.readouterr().out
    assert "Initial: " in out
    assert "FlashAttention: " in out
    assert "no efficient attention kernel for CPUs" in out
    (written,) = read_profiles(tmp_path / "r.jsonl")
    assert written.trial.model.name == "tiny-sd"
    assert run(script.command, [*place, "--only", "Initial"]) == 0
    assert capfd.readouterr().out == "", "it is in the record"
