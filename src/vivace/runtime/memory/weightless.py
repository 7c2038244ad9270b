"""Pipelines without weights: every component as published, with its tensors on the meta device. Only configuration
files and tokenizers are downloaded or read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vivace.architectures import ARCHITECTURES, CATALOGUE, pipeline_named
from vivace.architectures.components import Architecture, ComponentConfig, Library
from vivace.architectures.family import move_to_meta
from vivace.errors import UnknownModel, nearest
from vivace.foundation.untrusted.files import read_object, reading, user_path
from vivace.machinery.technique import TEXT_ENCODERS, component_of
from vivace.models.checkpoints.gguf_file import SUFFIX, read_gguf_header
from vivace.models.checkpoints.headers import read_header
from vivace.models.checkpoints.single_file import contents_of
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.models.model_files import exists_as
from vivace.models.synthetic import assemble, on_meta
from vivace.runtime.pipelines import weightless_pipeline

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Weightless:
    """A model without weights that is built anew for each recipe.

    Attributes:
        dtype: dtype of its baseline on a GPU, "fp16", "bf16" or "fp32".
        build_tiny_vae: builds the tiny VAE for its latents in fp32, or None.
        located: the model in a folder; None for an architecture.
        gguf_bytes: of a GGUF file's tensors, which are the denoiser; None for other models.
        gguf_of: the catalogue's model whose denoiser they are.
    """

    name: str
    dtype: str
    defaults: dict[str, Any]
    build: Callable[[], Any]
    build_tiny_vae: Callable[[], Any] | None
    located: LocatedModel | None = None
    gguf_bytes: int | None = None
    gguf_of: str = ""
    note: str = ""


def find_weightless(name: str) -> Weightless:
    """Find a model by architecture (`flux-dev`, `synthetic:flux-dev`), catalogue name, folder, or file. A folder in
    diffusers' format needs only its configuration files and tokenizers."""
    plain = name.strip().lower()
    plain_name = plain.removeprefix(SYNTHETIC)
    if plain_name in ARCHITECTURES:
        return _of_architecture(plain, ARCHITECTURES[plain_name])
    if plain not in CATALOGUE and exists_as(name)[1]:
        return _of_file(name)
    if plain.startswith(SYNTHETIC) or not (plain in CATALOGUE or exists_as(name)[0]):
        names = {*ARCHITECTURES, *CATALOGUE}
        raise UnknownModel(
            f"no model '{name[:200]}'{nearest(plain_name[:200], names)} (known models: {', '.join(sorted(names))}; or "
            "give a folder with a model_index.json, or a .safetensors or .gguf file)"
        )
    return _of_folder(name, find_model(name))


def _of_architecture(name: str, architecture: Architecture) -> Weightless:
    entry = CATALOGUE.get(architecture.name)
    dtype = "fp16" if architecture.denoiser == "unet" else "bf16"
    defaults: dict[str, Any] = {"height": architecture.height, "width": architecture.width}
    if entry is not None:
        dtype = entry.cuda_dtype
        defaults |= {"num_inference_steps": entry.num_inference_steps, "guidance_scale": entry.guidance_scale}
        defaults |= entry.call

    def build() -> Any:
        return assemble(
            architecture, lambda _, component: _in_dtype(on_meta(component, with_buffers=False), dtype)
        )

    # The family's tiny VAE does not support latents with a mean and standard deviation.
    small = architecture.tiny_vae if "latents_mean" not in architecture.components["vae"].config else None
    tiny = (lambda: _in_dtype(on_meta(small), "fp32")) if small is not None else None
    return Weightless(name, dtype, defaults, build, tiny)


def _of_file(name: str) -> Weightless:
    """Return the catalogue's model of a file's family: every checkpoint of a family has the same architecture. Layers
    of a GGUF file stay as they are stored. Other files are loaded in the model's own precision."""
    path = user_path(name)
    contents = contents_of(path, is_loaded=False)
    model = _of_architecture(name, ARCHITECTURES[contents.entry])
    if path.suffix == SUFFIX:
        tensors = read_gguf_header(path, is_whole=False)
        held = sum(end - start for start, end in (about["data_offsets"] for about in tensors.values()))
        return replace(model, gguf_bytes=held, gguf_of=contents.entry)
    if number := sum(about["dtype"].startswith("F8") for about in read_header(path).values()):
        note = (
            f"{path.name} has {number} tensors in fp8, which are loaded and computed with in {model.dtype}: counted as "
            "such; the recipe quantize(fp8) keeps the denoiser's in eight bits"
        )
        return replace(model, note=note)
    return model


def _of_folder(name: str, located: LocatedModel) -> Weightless:
    files = located.files
    dtype = located.entry.cuda_dtype if located.entry is not None else "fp16"
    tiny = located.tiny_vae

    def build() -> Any:
        import diffusers

        if located.saved is not None:
            return weightless_pipeline(located)
        index = _json(files["model_index.json"])
        parts: dict[str, Any] = {}
        for part, value in index.items():
            if part.startswith("_"):
                continue
            if not isinstance(value, list):
                parts[part] = value
            elif None not in value and value[0] is not None:
                parts[part] = _part(part, value, files, dtype)
            else:
                parts[part] = None
        kind = getattr(diffusers, str(index["_class_name"]), None)
        if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
            raise UnknownModel(f"{located.folder}: {index['_class_name']} is not a pipeline of diffusers")
        with reading(located.folder, problem=f"cannot be built as a {kind.__name__}"):
            pipe = kind(**parts)
            pipe.set_progress_bar_config(disable=True)
            return pipe

    def build_tiny() -> Any:
        assert isinstance(tiny, Path)  # of a folder or an embedded model
        config = _json(tiny / "config.json")
        return _in_dtype(_component(config, "diffusers", str(config["_class_name"])), "fp32")

    return Weightless(
        name, dtype, located.defaults | located.call, build, build_tiny if tiny is not None else None, located
    )


def _part(part: str, value: list[Any], files: Mapping[str, Path], dtype: str) -> Any:
    """Build one component of a model_index.json: networks without weights, tokenizers and schedulers as they are."""
    library, class_name = str(value[0]), str(value[1])
    import diffusers
    import torch
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    if library not in libraries or not hasattr(libraries[library], class_name):
        raise UnknownModel(
            f"{part} is a {class_name} of {library}, which is not a class of diffusers or transformers; vivace runs no "
            f"code from models"
        )
    kind = getattr(libraries[library], class_name)
    with reading(f"{part} ({class_name})", UnknownModel, problem="cannot be built"):
        if issubclass(kind, torch.nn.Module):
            config = _json(files[f"{part}/config.json"])
            # A replacement folder may hold another class.
            named = str(config.get("_class_name", class_name))
            built = _in_dtype(_component(config, cast("Library", library), named), dtype)
        elif issubclass(kind, diffusers.SchedulerMixin):
            built = _scheduler(kind, _json(files[f"{part}/{kind.config_name}"]))
        else:
            folder = next(path.parent for name, path in files.items() if name.split("/")[0] == part)
            trusted = {"trust_remote_code": False} if library == "transformers" else {}
            built = kind.from_pretrained(str(folder), local_files_only=True, **trusted)
    return built


def run_without_values(pipe: DiffusionPipeline, height: int, width: int) -> None:
    """Patch a pipeline on the meta device so that its call runs, which reads values of tensors in places. Timesteps
    stay on the CPU. Where a pipeline reads masks or positions, its family knows the same from the prompts' tokens or
    the image's size. All patches are on the instance."""
    _keep_timesteps_on_cpu(pipe)
    for encoder in (component_of(pipe, component) for component in TEXT_ENCODERS):
        if encoder is not None:
            encoder.register_forward_pre_hook(_without_mask, with_kwargs=True)
    known = pipeline_named(type(pipe).__name__)
    if known is not None and known.run_without_values is not None:
        known.run_without_values(pipe, height, width)


def _keep_timesteps_on_cpu(pipe: DiffusionPipeline) -> None:
    """Patch a pipeline on the meta device so that it can read the values of the timesteps. Only the denoiser's
    arguments are moved to the meta device. The scheduler and the denoiser are patched as instances."""
    scheduler = pipe.scheduler
    set_timesteps = scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def set_on_cpu(*args: Any, **kwargs: Any) -> Any:
        return set_timesteps(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))

    scheduler.set_timesteps = set_on_cpu
    denoiser = component_of(pipe, "denoiser")
    denoiser.register_forward_pre_hook(move_to_meta, with_kwargs=True)
    if getattr(pipe, "controlnet", None) is not None:
        pipe.controlnet.register_forward_pre_hook(move_to_meta, with_kwargs=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # it reads the image's values; its weights have been counted


def _without_mask(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Drop the mask: language models check whether it masks anything, or without a key cache whether there is one."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return args, kwargs
    if kwargs.get("use_cache", True):
        return args, kwargs | {"attention_mask": None}
    rows, length = mask.shape
    return args, kwargs | {"attention_mask": mask.new_ones(rows, 1, length, length, dtype=mask.dtype).bool()}


def _scheduler(kind: type[Any], config: Mapping[str, Any]) -> Any:
    """Build a scheduler as its `from_config` does, which first imports all schedulers like it and scipy: a second."""
    expected = inspect.signature(kind.__init__).parameters.keys() - config.get("_use_default_values", ())
    return kind(**{name: value for name, value in config.items() if name in expected})


def _component(config: dict[str, Any], library: Library, class_name: str) -> Any:
    if library == "diffusers":
        import diffusers

        config = getattr(diffusers, class_name).extract_init_dict(config)[0]
    return on_meta(ComponentConfig(library=library, class_name=class_name, config=config))


def _in_dtype(module: Any, dtype: str) -> Any:
    import torch

    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    # Not diffusers' own `to`, which warns about modules that it keeps in fp32.
    return torch.nn.Module.to(module, "meta", kinds[dtype])


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        return read_object(path)
