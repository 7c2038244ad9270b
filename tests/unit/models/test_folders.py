"""A folder with a known model's weights is that model: its defaults, its threads, its records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import shrunken
from tests.hub_server import Hub, Repository
from tests.typed import run_vivace
from tinyworld import flux
from vivace.errors import UnusableModel, UsageError
from vivace.evidence.recommendation import recommend
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.models.export_embedded import export
from vivace.models.reading_limits import is_trusted
from vivace.models.saved_folder import NAME
from vivace.runtime.workloads import checked_request, default_threads


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export("tiny-sd", tmp_path / "mysd").folder


def changed(folder: Path) -> Path:
    """Change one weight of a folder's denoiser, as training does."""
    path = next((folder / "unet").glob("*.safetensors"))
    state = load_file(path)
    state["conv_out.bias"] = state["conv_out.bias"] + 0.01
    save_file(state, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["tiny-sd", "tiny-flux", "tiny-flux-schnell"])
@pytest.mark.parametrize("has_defaults", [True, False])
def test_an_export_runs_as_it_does_by_name(tmp_path: Path, name: str, has_defaults: bool) -> None:
    folder = export(name, tmp_path / "model").folder
    if not has_defaults:
        (folder / NAME).unlink()
    own, named = find_model(str(folder)), find_model(name)
    assert (own.model.source, own.same_as) == ("folder", name)
    assert (own.defaults, own.call, own.prompt_set) == (named.defaults, named.call, named.prompt_set)
    assert default_threads(own) == default_threads(named) == 1
    assert own.pipeline == named.pipeline
    assert own.tiny_vae == folder / "tiny_vae"
    assert not is_trusted(own), "it is still read with limits"
    mine, theirs = (checked_request(model, "baseline").workload for model in (str(folder), name))
    assert mine == theirs


def test_a_trained_export_keeps_its_defaults_and_they_can_be_changed(exported: Path) -> None:
    located = find_model(str(changed(exported)))
    assert located.same_as is None, "its weights are others"
    assert located.defaults == find_model("tiny-sd").defaults
    content = json.loads((exported / NAME).read_text())
    (exported / NAME).write_text(json.dumps(content | {"num_inference_steps": 9}))
    assert find_model(str(exported)).defaults["num_inference_steps"] == 9
    (exported / NAME).unlink()
    assert find_model(str(exported)).defaults["num_inference_steps"] == 25, "its denoiser is known"
    config = exported / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_per_block": 9}))
    located = find_model(str(exported))
    assert located.entry is None
    assert located.defaults["num_inference_steps"] == 50, "the class's own"
    assert default_threads(located) == 1, "it is as small as by name"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model": "tiny-ds"},
            "names 'tiny-ds', which this vivace does not have; did you mean 'tiny-sd'?",
        ),
        (
            {"model": "tiny-flux"},
            "names tiny-flux, a FluxPipeline, but the folder holds a StableDiffusionPipeline",
        ),
        ({"num_inference_steps": 10**9}, "cannot be read"),
        ({"steps": 3}, "cannot be read"),
    ],
)
def test_defaults_that_cannot_be(exported: Path, change: dict[str, object], says: str) -> None:
    content = json.loads((exported / NAME).read_text())
    (exported / NAME).write_text(json.dumps(content | change))
    with pytest.raises(UnusableModel, match=says) as caught:
        find_model(str(exported))
    assert str(exported / NAME) in str(caught.value)


def test_a_copy_draws_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    (exported / NAME).unlink()
    paths = []
    for model in ("tiny-sd", str(exported)):
        few = ["--num-inference-steps", "2", "--device", "cpu", "--out", str(tmp_path / Path(model).name)]
        done = run_vivace(tmp_path, "generate", "a red circle", "--model", model, *few)
        paths.append(Path(done.stdout.strip()))
    from PIL import Image

    first, second = (Image.open(path) for path in paths)
    assert first.tobytes() == second.tobytes()
    assert first.info["num_threads"] == second.info["num_threads"] == "1"


def test_other_models_of_a_class_are_told_by_their_configuration(flux_weights: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(flux_weights / flux.FOLDER, tmp_path / "flux"))
    config = folder / "transformer" / "config.json"
    content = json.loads(config.read_text())
    assert find_model(str(folder)).defaults["num_inference_steps"] == 28
    config.write_text(json.dumps(content | {"guidance_embeds": False}))
    located = find_model(str(folder))
    assert (located.defaults["num_inference_steps"], located.defaults["guidance_scale"]) == (4, 0.0)
    playground = find_model(str(shrunken.save(shrunken.playground(), tmp_path / "playground")))
    assert playground.defaults["guidance_scale"] == CATALOGUE["playground"].guidance_scale


def test_a_repository_of_the_catalogue_runs_as_by_name(client: Hub, tmp_path: Path) -> None:
    folder = shrunken.save(shrunken.sdxl(), tmp_path / "turbo", variants=("fp16",))
    client.repositories["stabilityai/sdxl-turbo"] = Repository({"main": folder})
    located = find_model("stabilityai/sdxl-turbo")
    assert located.entry is CATALOGUE["sdxl-turbo"]
    assert located.defaults["num_inference_steps"] == CATALOGUE["sdxl-turbo"].num_inference_steps
    assert not is_trusted(located), "its commit is not pinned"


def test_recommend_reads_a_folder_by_its_weights(exported: Path) -> None:
    assert recommend(str(exported), gpu="RTX 4060", store=()).model == "tiny-sd"
    (exported / NAME).unlink()
    answer = recommend(str(changed(exported)), gpu="RTX 4060", store=())
    assert answer.recipe is None, "times of full models say nothing of it"


@pytest.mark.parametrize("model", ["sd15", "full"])
def test_times_under_a_profiler_are_never_seconds_an_image(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model == "full":
        model = str(shrunken.save(shrunken.sd15(), tmp_path / "full"))
        monkeypatch.setattr("vivace.models.find.SMALL_BYTES", 0)
    answer = recommend(model, gpu="RTX 4060", store=())
    assert "91.8 s" not in str(answer)
    from vivace.evidence.studies.published_tables import published_tables

    (profiled,) = [table for table in published_tables() if table.profiled]
    assert profiled.model == "sd15"
    assert all(row.latency is None and row.spread is None for row in profiled.rows)
    assert all(row.gain is not None for row in profiled.rows if row.outcome == "measured")
    assert "under a profiler" in profiled.note


@pytest.mark.long
def test_tune_refuses_too_few_minutes_after_the_first_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vivace
    from vivace.benchmark.store import Store
    from vivace.tuning import ImageRequest

    with pytest.raises(UsageError, match=r"--minutes 0\.1 cannot be met: .* give --minutes"):
        vivace.tune(
            "tiny-sd",
            minutes=0.1,
            request=ImageRequest(num_inference_steps=400),
            store=tmp_path,
            device="cpu",
        )
    with Store.read_only(tmp_path) as store:
        assert [store.rounds(key) for run in store.runs() for key in run.keys] == [{}], "none ran to its end"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: shutil.rmtree(folder), "its files are missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "its files are missing"),
        (lambda folder: _edit(folder / "tokenizer.json", _with_more_words), "ids up to 600"),
        (lambda folder: _edit(folder / "tokenizer_config.json", _of_length(77)), "model_max_length 77"),
        (
            lambda folder: _edit(folder / "tokenizer_config.json", _of_length(None)),
            "model_max_length no length",
        ),
        (lambda folder: _edit(folder / "tokenizer_config.json", _of_length(1)), "model_max_length 1 "),
    ],
    ids=["no folder", "no vocabulary", "more words", "longer", "no length", "too short"],
)
def test_a_tokenizer_that_does_not_fit_its_encoder_is_named(exported: Path, spoil: Any, reason: str) -> None:
    spoil(exported / "tokenizer")
    with pytest.raises(UnusableModel, match="tokenizer does not fit its text_encoder") as caught:
        load_pipeline(find_model(str(exported)), "cpu")
    assert reason in str(caught.value)


def _edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _with_more_words(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["surplus</w>"] = 600


def _of_length(length: int | None) -> Any:
    def change(content: dict[str, Any]) -> None:
        del content["model_max_length"]
        content |= {} if length is None else {"model_max_length": length}

    return change


def test_advice_for_a_folder_names_only_what_is_read(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"has no model_index\.json"):
        find_model(str(exported / "unet"))
