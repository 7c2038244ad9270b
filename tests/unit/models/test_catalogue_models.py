"""Every catalogue entry on a hub, its pipeline in miniature: from its pinned commits, with its own way of drawing."""

import importlib.util
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vivace
from tests import shrunken
from tests.hub_server import Hub, Repository
from tests.narrow import FLOW
from tinyworld import flux
from vivace.architectures.entry import StoredPart
from vivace.errors import Unsupported
from vivace.machinery.lora.read_lora import merge
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.models import Hub as Origin
from vivace.models.prompts import NUM_DEFAULT, PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.runtime.opening import open_session
from vivace.runtime.workloads import checked_request, default_threads

NAMES = [
    entry.name
    for entry in CATALOGUE.values()
    # Language models' tokenizers have no miniature: test_flow_models builds those models without files. Kontext's
    # commit is not known.
    if isinstance(entry.origin, Origin) and entry.name not in (*FLOW, "flux-kontext")
]
LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def origin_of(name: str) -> Origin:
    origin = CATALOGUE[name].origin
    assert isinstance(origin, Origin)
    return origin


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, flux_weights: Path) -> dict[str, Path]:
    """A folder for each repository that the catalogue names."""
    made = tmp_path_factory.mktemp("repositories")
    both = (None, "fp16")
    sdxl = shrunken.save(shrunken.sdxl(), made / "sdxl", both)
    (sdxl / "sd_xl_base_1.0.safetensors").write_bytes(b"never to be fetched")
    sd15 = shrunken.save(shrunken.sd15(), made / "sd15", both)
    index = (sd15 / "model_index.json").read_text()
    checker = '"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]'
    (sd15 / "model_index.json").write_text(
        index.replace('"safety_checker": [\n    null,\n    null\n  ]', checker)
    )
    assert checker in (sd15 / "model_index.json").read_text()
    (sd15 / "safety_checker").mkdir()
    (sd15 / "safety_checker" / "model.fp16.safetensors").write_bytes(b"never to be fetched")
    turbo = Path(shutil.copytree(sdxl, made / "turbo"))
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        text = (turbo / name).read_text().replace("EulerDiscrete", "EulerAncestralDiscrete")
        (turbo / name).write_text(text.replace("leading", "trailing"))
    pony = shrunken.save(shrunken.sdxl(), made / "pony")

    torch.manual_seed(1)
    (made / "lightning").mkdir()
    for steps in (2, 4):
        state = shrunken.sdxl_unet().half().state_dict()
        save_file(state, made / "lightning" / f"sdxl_lightning_{steps}step_unet.safetensors")
    shrunken.sdxl_unet(time_cond_proj_dim=8).half().save_pretrained(made / "lcm", variant="fp16")
    (made / "hyper").mkdir()
    width = shrunken.sdxl_unet().get_submodule(LAYER).weight.shape[0]
    prefix = "lora_unet_" + LAYER.replace(".", "_")
    save_file(
        {
            f"{prefix}.lora_down.weight": torch.randn(4, width),
            f"{prefix}.lora_up.weight": torch.randn(width, 4),
            f"{prefix}.alpha": torch.tensor(2.0),
        },
        made / "hyper" / "Hyper-SDXL-4steps-lora.safetensors",
    )
    schnell = Path(shutil.copytree(flux_weights / flux.FOLDER, made / "schnell"))
    shutil.copytree(
        flux_weights / flux.SCHNELL_FOLDER / "transformer", schnell / "transformer", dirs_exist_ok=True
    )
    return {
        "stable-diffusion-v1-5/stable-diffusion-v1-5": sd15,
        "stabilityai/stable-diffusion-xl-base-1.0": sdxl,
        "stabilityai/sdxl-turbo": turbo,
        "ByteDance/SDXL-Lightning": made / "lightning",
        "ByteDance/Hyper-SD": made / "hyper",
        "latent-consistency/lcm-sdxl": made / "lcm",
        "kitty7779/ponyDiffusionV6XL": pony,
        "playgroundai/playground-v2.5-1024px-aesthetic": shrunken.save(
            shrunken.playground(), made / "pg", both
        ),
        "black-forest-labs/FLUX.1-dev": flux_weights / flux.FOLDER,
        "black-forest-labs/FLUX.1-schnell": schnell,
        "madebyollin/taesd": shrunken.save_tiny_vae(made / "taesd"),
        "madebyollin/taesdxl": shrunken.save_tiny_vae(made / "taesdxl"),
        "madebyollin/taef1": shrunken.save_tiny_vae(made / "taef1", flux.CHANNELS),
    }


@pytest.fixture
def served(client: Hub, folders: dict[str, Path]) -> Hub:
    revisions: dict[str, set[str]] = {}
    for name in NAMES:
        origin = origin_of(name)
        parts = [*origin.parts.values(), origin.lora, origin.tiny_vae]
        for part in (
            StoredPart(repo=origin.repo, revision=str(origin.revision), files=("-",)),
            *filter(None, parts),
        ):
            revisions.setdefault(part.repo, set()).add(part.revision)
    assert revisions.keys() == folders.keys()
    for repo, commits in revisions.items():
        # The main branch is empty: nothing is taken from there.
        client.repositories[repo] = Repository(dict.fromkeys(commits, folders[repo]))
    return client


def draw(session: Any, **call: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "output_type": "np",
        "generator": generator,
    }
    return np.asarray(session("a red circle", **arguments | call).images)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("sd15", "sdxl", "sdxl-lightning-2step", "playground", "flux-*")
@pytest.mark.slow("sdxl", "playground", "flux-schnell")
def test_it_loads_and_draws(name: str, served: Hub) -> None:
    prepared = checked_request(name, "baseline")
    entry = CATALOGUE[name]
    assert prepared.workload.num_inference_steps == entry.num_inference_steps
    assert prepared.workload.prompts == PROMPT_SETS[entry.prompt_set][:NUM_DEFAULT]
    assert default_threads(prepared.located) >= 1
    commits = [p[:12] for p in prepared.located.model.revision.split("+")]
    assert commits[0] == str(origin_of(name).revision)[:12]
    assert len(commits) == 1 + len(origin_of(name).parts) + (origin_of(name).lora is not None)
    session = vivace.load(name, device="cpu")
    picture = draw(session)
    assert picture.shape == (1, 32, 32, 3)
    assert np.isfinite(picture).all()
    assert type(session.pipe).__name__ == entry.pipeline
    assert session.pipe.dtype == torch.float32
    if entry.scheduler is not None:
        assert type(session.pipe.scheduler).__name__ == entry.scheduler.class_name
        assert entry.scheduler.overrides.items() <= dict(session.pipe.scheduler.config).items()
        assert session.pipe.scheduler.config.beta_schedule == "scaled_linear", (
            "the repository's own otherwise"
        )
    fetched = {file for file in served.files if file.endswith(".safetensors")}
    assert not {file for file in fetched if "safety" in file or file.startswith("sd_xl")}
    if "fp16" in (origin_of(name).variants or ()):
        doubled = {file for file in fetched if file.replace(".safetensors", ".fp16.safetensors") in fetched}
        assert not doubled, "never both precisions"


@pytest.mark.parametrize("name", [name for name in NAMES if origin_of(name).tiny_vae is not None])
@pytest.mark.quick("sd15", "sdxl", "flux-dev")
def test_its_tiny_vae_is_fetched_when_it_is_asked_for(name: str, served: Hub) -> None:
    checked_request(name, "baseline")
    decoder_files = {file for file in served.files if "/" not in file and file != "model_index.json"}
    session = vivace.load(name, "tiny_vae", device="cpu")
    assert type(session.pipe.vae).__name__ == "AutoencoderTiny"
    # FLUX's in miniature has fewer levels than the tiny one, which doubles the size three times.
    assert np.isfinite(draw(session)).all()
    assert {"config.json", "diffusion_pytorch_model.safetensors"} <= served.files
    assert "diffusion_pytorch_model.safetensors" not in decoder_files


def test_a_tiny_vae_that_cannot_be_had(served: Hub) -> None:
    del served.repositories["madebyollin/taesdxl"]
    with pytest.raises(Unsupported, match="no repository of that name"):
        vivace.load("sdxl", "tiny_vae", device="cpu")


def test_lightning_is_its_own_unet_in_sdxl(served: Hub, folders: dict[str, Path]) -> None:
    for steps in (2, 4):
        pipe = load_pipeline(find_model(f"sdxl-lightning-{steps}step"), "cpu")
        file = folders["ByteDance/SDXL-Lightning"] / f"sdxl_lightning_{steps}step_unet.safetensors"
        theirs = load_file(file)
        assert all(torch.equal(value, theirs[key].float()) for key, value in pipe.unet.state_dict().items())
    assert (
        "unet/config.json" not in served.sent
        or "unet/diffusion_pytorch_model.fp16.safetensors" not in served.sent
    )


def test_lcm_takes_guidance_as_an_input(served: Hub) -> None:
    session = vivace.load("lcm-sdxl", device="cpu")
    batches = []
    session.pipe.unet.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    draw(session)
    assert session.defaults["guidance_scale"] == 8.0
    assert set(batches) == {1}, "no second half for guidance"
    assert session.pipe.unet.config.time_cond_proj_dim == 8


def test_hypers_lora_is_merged(served: Hub, folders: dict[str, Path]) -> None:
    base = load_pipeline(find_model("sdxl"), "cpu").unet.state_dict()
    merged = load_pipeline(find_model("hyper-sdxl-4step"), "cpu", merge=merge).unet.state_dict()
    assert {key for key in base if not torch.equal(base[key], merged[key])} == {f"{LAYER}.weight"}
    lora = load_file(folders["ByteDance/Hyper-SD"] / "Hyper-SDXL-4steps-lora.safetensors")
    down, up = (next(v for k, v in lora.items() if f"lora_{role}" in k) for role in ("down", "up"))
    expected = base[f"{LAYER}.weight"] + (2.0 / 4) * up @ down
    assert torch.allclose(merged[f"{LAYER}.weight"], expected, atol=1e-5)


def test_ponys_clip_skip_is_the_last_layer_but_one(served: Hub) -> None:
    session = vivace.load("pony", device="cpu")
    assert session.defaults["clip_skip"] == 0
    picture = draw(session)
    assert np.array_equal(picture, draw(session, clip_skip=None)), "what SDXL pipelines take by themselves"
    assert not np.array_equal(picture, draw(session, clip_skip=1))


def test_playground_keeps_its_scheduler_and_its_latents_statistics(served: Hub) -> None:
    session = vivace.load("playground", device="cpu")
    assert type(session.pipe.scheduler).__name__ == "EDMDPMSolverMultistepScheduler"
    assert session.pipe.vae.config.latents_std == [8.4927, 5.9022, 6.5498, 5.2299]
    with pytest.raises(Unsupported, match="no tiny VAE is known for this model's latents"):
        vivace.load("playground", "tiny_vae", device="cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("sd15")
def test_a_script_of_a_catalogue_model_draws_the_same(
    name: str, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = origin_of(name)
    if origin.lora is not None and importlib.util.find_spec("peft") is None:
        pytest.skip("diffusers merges LoRAs with peft, which is not installed")
    located = checked_request(name, "baseline").located
    recipe = resolve("baseline" if origin.tiny_vae is None else "tiny_vae")
    call = {"height": 32, "width": 32, "num_inference_steps": 2}
    session = open_session(located, recipe, "cpu", call)
    drawn = np.asarray(session("a red circle", generator=torch.Generator().manual_seed(0)).images[0])
    text = write_script(located, recipe, "cpu", prompt="a red circle", call=call).text
    assert "import vivace" not in text
    assert str(served.url) not in text
    assert str(tmp_path) not in text, "nothing of this machine"
    (tmp_path / "draw.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    served.requests.clear()
    runpy.run_path("draw.py")
    with Image.open("picture.png") as picture:
        assert np.array_equal(np.asarray(picture), drawn), np.abs(
            np.asarray(picture).astype(int) - drawn
        ).max()
    commits = {
        str(part.revision) for part in (origin, *origin.parts.values(), origin.lora, origin.tiny_vae) if part
    }
    assert {commit for commit in commits if commit in text} == commits
