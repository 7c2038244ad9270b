"""From what the user typed to a model: a catalogue name or a local folder in diffusers' format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import UnknownModel, nearest
from vivace.models.catalogue import CATALOGUE, Entry
from vivace.models.files import files_of, fingerprint
from vivace.spec.model import Model

WEIGHTS = Path(__file__).parent / "weights"
# Steps and guidance of the pipelines' own __call__, by class.
_CLASS_DEFAULTS: dict[str, tuple[int, float]] = {
    "StableDiffusionPipeline": (50, 7.5),
    "StableDiffusionXLPipeline": (50, 5.0),
    "FluxPipeline": (28, 3.5),
}
_FLUX_SEQUENCE_LENGTH = 512  # FluxPipeline's own max_sequence_length


@dataclass(frozen=True)
class Found:
    """A model that exists: its identity, its folder, and its catalogue entry if it has one.

    `folder` holds the model_index.json; `components` are folders elsewhere that stand in for its subfolders of the
    same names.
    """

    model: Model
    folder: Path
    entry: Entry | None
    components: tuple[Path, ...] = ()

    @property
    def files(self) -> dict[str, Path]:
        """Every file by its name in the whole model ("transformer/config.json")."""
        return files_of(self.folder, self.components)

    @property
    def tiny_vae(self) -> Path | None:
        return WEIGHTS / self.entry.tiny_vae if self.entry is not None and self.entry.tiny_vae else None

    @property
    def defaults(self) -> dict[str, Any]:
        """The call's defaults as published: height, width, num_inference_steps, guidance_scale."""
        if self.entry is None:
            return _defaults_of_folder(self.folder)
        keys = ("height", "width", "num_inference_steps", "guidance_scale")
        return {key: getattr(self.entry, key) for key in keys}

    @property
    def call(self) -> dict[str, Any]:
        """Arguments that the pipeline's call needs beside a workload's: max_sequence_length, or none."""
        if self.entry is None:
            return _call_of_folder(self.folder)
        length = self.entry.max_sequence_length
        return {} if length is None else {"max_sequence_length": length}


def find_model(name: str) -> Found:
    """A catalogue name, or the path of a folder that holds a model_index.json.

    Raises:
        UnknownModel: neither exists, or the folder is not a diffusers pipeline.
    """
    entry = CATALOGUE.get(name.strip().lower())
    if entry is not None:
        folder = WEIGHTS / (entry.base or entry.folder)
        own = (WEIGHTS / entry.folder).iterdir() if entry.base is not None else ()
        components = tuple(sorted(path for path in own if path.is_dir()))
        revision = fingerprint(files_of(folder, components))
        return Found(Model(name=entry.name, source="embedded", revision=revision), folder, entry, components)
    folder = Path(name).expanduser()
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):  # too long, or a NUL byte
        is_folder = False
    if not is_folder:
        raise UnknownModel(
            f"no model '{name[:200]}'{nearest(name, CATALOGUE)} "
            f"(in the catalogue: {', '.join(CATALOGUE)}; or give a folder with a model_index.json)"
        )
    _check_folder(folder)
    resolved = folder.resolve()
    revision = fingerprint(files_of(resolved))
    return Found(Model(name=str(resolved), source="folder", revision=revision), resolved, None)


def _defaults_of_folder(folder: Path) -> dict[str, Any]:
    """A folder's native size from its configs; steps and guidance are its pipeline class's own."""
    class_name = _config(folder / "model_index.json").get("_class_name")
    steps, guidance = _CLASS_DEFAULTS.get(str(class_name), _CLASS_DEFAULTS["StableDiffusionPipeline"])
    denoiser = _config(folder / "unet" / "config.json") or _config(folder / "transformer" / "config.json")
    cells, vae = denoiser.get("sample_size"), _config(folder / "vae" / "config.json")
    levels, pixels = vae.get("block_out_channels"), vae.get("sample_size")
    factor = 2 ** (len(levels) - 1) if isinstance(levels, list) and levels else 8
    # Transformers of the FLUX kind state no size, and their pipelines draw 128 cells a side; the VAE knows better.
    unstated = pixels if isinstance(pixels, int) else 128 * factor
    side = cells * factor if isinstance(cells, int) else unstated
    return {"height": side, "width": side, "num_inference_steps": steps, "guidance_scale": guidance}


def _call_of_folder(folder: Path) -> dict[str, Any]:
    """A FluxPipeline pads prompts to 512 tokens; its T5's tokenizer says if fewer are meant."""
    if _config(folder / "model_index.json").get("_class_name") != "FluxPipeline":
        return {}
    length = _config(folder / "tokenizer_2" / "tokenizer_config.json").get("model_max_length")
    if not isinstance(length, int) or length >= _FLUX_SEQUENCE_LENGTH:
        return {}
    return {"max_sequence_length": length}


def _config(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_folder(folder: Path) -> None:
    index = folder / "model_index.json"
    if not index.is_file():
        raise UnknownModel(
            f"{folder} has no model_index.json; give the folder that pipe.save_pretrained(...) wrote"
        )
    try:
        content = json.loads(index.read_text())
        class_name = content["_class_name"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise UnknownModel(f"{index} is not a diffusers pipeline's index: {error}") from None
    if not isinstance(class_name, str):
        # A list here names a Python file to import from the folder.
        raise UnknownModel(
            f"{index} asks for code of its own ({class_name}); vivace runs no code from models"
        )
