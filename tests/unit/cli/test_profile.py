"""`vivace profile` on an embedded model, and what it refuses."""

import gzip
import json
from pathlib import Path

import pytest

import vivace
from tests.typed import run_vivace
from vivace.benchmark.profiles import _steady_trace
from vivace.errors import Unsupported
from vivace.measure.profiling.trace import Trace
from vivace.report.profile_answer import answer_of, changes

SHORT = ("--steps", "2", "--warmup", "2", "--calls", "2", "--device", "cpu")


@pytest.mark.long
def test_two_recipes_side_by_side_with_traces(tmp_path: Path) -> None:
    done = run_vivace(
        tmp_path, "profile", *SHORT, "--recipe", "tiny_vae", "--against", "baseline", "--trace", "t.json.gz",
        "--format", "json",
    )  # fmt: skip
    answer = json.loads(done.stdout)
    for profile in (answer["profile"], answer["against"]):
        assert 99.9 < sum(row["self_cpu_percent"] for row in profile["operators"]) < 100.0001
        assert max(row["cpu_total_percent"] for row in profile["operators"]) < 100.0001
        assert {share["name"] for share in profile["components"]} == {
            "text_encoder",
            "denoiser",
            "vae",
            "other",
        }
        assert profile["num_denoiser_calls"] == 2
        assert profile["memory"]["peak_bytes"] >= max(held for _, held in profile["memory"]["points"])
        assert {wait["function"] for wait in profile["waits"]} == {"index_for_timestep"}
    vae = [
        next(share["cpu_s"] for share in profile["components"] if share["name"] == "vae")
        for profile in (answer["profile"], answer["against"])
    ]
    peaks = [profile["memory"]["peak_bytes"] for profile in (answer["profile"], answer["against"])]
    assert peaks[0] < peaks[1]
    assert min(vae) > 0
    assert {"gone", "new", "same", "shrank", "grew"} >= {change["kind"] for change in answer["changes"]}
    assert any(change["kind"] == "gone" for change in answer["changes"]), "attention in the VAE"
    for name in ("t.json.gz", "t-against.json.gz"):
        events = json.loads(gzip.decompress((tmp_path / name).read_bytes()))["traceEvents"]
        assert any(event["name"] == "vivace component denoiser" for event in events)


@pytest.mark.long
def test_prompts_count_as_new_unless_they_are_repeated(tmp_path: Path) -> None:
    arguments = ("profile", *SHORT, "--calls", "1", "--recipe", "prompt_cache", "--format", "json")
    new = run_vivace(tmp_path, *arguments)
    profile = json.loads(new.stdout)["profile"]
    assert "text_encoder" in {share["name"] for share in profile["components"]}
    assert any("no effect: prompt_cache" in warning for warning in profile["warnings"])
    parts = [part.rsplit(" ", 2)[0] for part in new.stderr.split("took: ")[1].splitlines()[0].split(", ")]
    assert parts == [
        "start", "load", "apply", "first call", "warm-up", "profiled call", "synchronisations", "evidence", "tables",
    ]  # fmt: skip
    profile = json.loads(run_vivace(tmp_path, *arguments, "--text", "repeated").stdout)["profile"]
    assert "text_encoder" not in {share["name"] for share in profile["components"]}
    assert not any("no effect" in warning for warning in profile["warnings"])


def test_an_existing_trace_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("mine")
    done = run_vivace(tmp_path, "profile", *SHORT, "--trace", "t.json", code=3)
    assert "t.json exists and was not changed" in done.stderr
    assert (tmp_path / "t.json").read_text() == "mine"


def test_a_recipe_that_cannot_run_says_so(tmp_path: Path) -> None:
    done = run_vivace(tmp_path, "profile", *SHORT, "--recipe", "cuda_graph", code=3)
    assert "cuda_graph cannot be profiled" in done.stderr


@pytest.mark.long
def test_a_recipe_without_effect_is_profiled_with_a_warning(tmp_path: Path) -> None:
    arguments = ("--model", "tiny-flux", "--recipe", "first_block_cache(0.0001)", "--format", "json")
    done = run_vivace(tmp_path, "profile", *SHORT, *arguments)
    assert any(
        "no effect: first_block_cache" in warning
        for warning in json.loads(done.stdout)["profile"]["warnings"]
    )


@pytest.fixture(scope="module")
def profiled() -> vivace.Profiled:
    timing = vivace.Timing(max_warmup=1)
    return vivace.profile("tiny-sd", num_inference_steps=2, device="cpu", timing=timing, calls=1)


def test_the_object_prints_and_has_dicts(profiled: vivace.Profiled) -> None:
    text = str(profiled)
    assert "Self CPU %" in text
    assert "Self CUDA" not in text, "there is no GPU"
    assert "index_for_timestep" in text
    assert any("not" not in note and "steady" in note for note in answer_of(profiled.profile).notes)
    assert profiled.to_dicts()[0]["name"] == "aten::mkldnn_convolution"
    assert all(change.kind == "same" for change in profiled.against(profiled))


def test_what_went_what_shrank_and_what_came(profiled: vivace.Profiled) -> None:
    before = profiled.profile
    rows = list(before.operators)
    half = rows[0].model_copy(
        update={name: getattr(rows[0], name) / 2 for name in ("self_cpu_s", "least_s", "most_s")}
    )
    new = rows[1].model_copy(update={"name": "fused"})
    after = before.model_copy(update={"operators": (half, new, *rows[2:])})
    changed = {change.name: change for change in changes(before, after)}
    assert changed[rows[0].name].kind == "shrank"
    assert changed[rows[1].name].kind == "gone"
    assert changed["fused"].kind == "new"
    assert changed[rows[2].name].kind == "same"
    assert changed["fused"].difference_s == rows[1].self_cpu_s


def test_a_call_that_compiles_is_discarded_and_one_that_goes_on_is_refused() -> None:
    traces = iter([Trace(0, 1, compiling=["CachingAutotuner.benchmark_all_configs"]), Trace(0, 2)])
    trace, discarded = _steady_trace(lambda: next(traces))
    assert (trace.end, discarded) == (2, 1)
    with pytest.raises(Unsupported, match=r"compiled or tuned in each of 4 calls \(CachingAutotuner"):
        _steady_trace(lambda: Trace(0, 1, compiling=["CachingAutotuner.benchmark_all_configs"]))
