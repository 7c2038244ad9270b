"""The FLUX family as it will be embedded (true shapes, untrained weights, shared components); a hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.hub_server import Hub, serve
from tinyworld import flux, networks
from vivace.models import CATALOGUE, Embedded, find


@pytest.fixture(scope="session")
def flux_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies below models/weights: tiny-flux whole, tiny-flux-schnell with its transformer alone."""
    torch.manual_seed(0)
    weights = tmp_path_factory.mktemp("weights")
    vae, transformer = networks.build_vae(flux.CHANNELS), flux.build_transformer()
    flux.save(weights / flux.FOLDER, vae, transformer, flux.build_clip_text(), flux.build_t5())
    flux.save_schnell(weights / flux.SCHNELL_FOLDER, flux.build_transformer(guidance=False))
    return weights


@pytest.fixture
def flux_family(flux_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of weights, with both models in the catalogue, and nothing else in it."""
    shared = {
        "pipeline": "FluxPipeline",
        "cuda_dtype": "bf16",
        "max_sequence_length": flux.CALL["max_sequence_length"],
    }
    student = {"name": flux.FOLDER, "num_inference_steps": 4, "guidance_scale": 3.5}
    student |= {"origin": Embedded(folder=flux.FOLDER)}
    fast = {"name": flux.SCHNELL_FOLDER, "num_inference_steps": 2, "guidance_scale": 0.0}
    fast |= {"origin": Embedded(folder=flux.SCHNELL_FOLDER, base=flux.FOLDER)}
    entries = [CATALOGUE["tiny-sd"].model_copy(update=shared | own) for own in (student, fast)]
    before = dict(CATALOGUE)
    CATALOGUE.clear()
    CATALOGUE.update({entry.name: entry for entry in entries})
    monkeypatch.setattr(find, "WEIGHTS", flux_weights)
    yield flux_weights
    CATALOGUE.clear()  # the old order too
    CATALOGUE.update(before)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the hub's client keeps its cache."""
    return tmp_path / "home"


@pytest.fixture
def client(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub that this process's client asks, though it read its environment before: its cache is empty."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return hub


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
