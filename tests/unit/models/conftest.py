"""The FLUX family as it will be embedded: true shapes, untrained weights, two folders that share components."""

from pathlib import Path

import pytest
import torch

from tinyworld import flux, networks
from vivace.models import CATALOGUE, Entry, find


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
def flux_family(flux_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of weights, with both models in the catalogue, and nothing else in it."""
    shared = {"tiny_vae": None, "cuda_dtype": "bf16", "max_sequence_length": flux.CALL["max_sequence_length"]}
    student = {"name": flux.FOLDER, "folder": flux.FOLDER, "num_inference_steps": 4, "guidance_scale": 3.5}
    fast = {"name": flux.SCHNELL_FOLDER, "folder": flux.SCHNELL_FOLDER, "base": flux.FOLDER}
    fast |= {"num_inference_steps": 2, "guidance_scale": 0.0}
    entries = [Entry(**CATALOGUE["tiny-sd"].model_dump() | shared | own) for own in (student, fast)]
    monkeypatch.delitem(CATALOGUE, "tiny-sd")
    for entry in entries:
        monkeypatch.setitem(CATALOGUE, entry.name, entry)
    monkeypatch.setattr(find, "WEIGHTS", flux_weights)
    return flux_weights


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
