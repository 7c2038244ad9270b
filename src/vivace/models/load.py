"""Load a pipeline from local files (safetensors only, never code from models), or build it from an architecture."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from vivace.architectures.components import Architecture, ComponentConfig
from vivace.architectures.entry import StoredPart
from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.spec.workload import Task
from vivace.foundation.untrusted.files import reading
from vivace.machinery.technique.script import literal
from vivace.models.checkpoints.gguf_file import SUFFIX
from vivace.models.checkpoints.headers import check_whole, main_dtype, read_header
from vivace.models.checkpoints.read_denoiser import check_tensors, original_layout, read_denoiser
from vivace.models.checkpoints.single_file import Contents, check_parts
from vivace.models.checkpoints.weight_scales import is_marker
from vivace.models.find import LocatedModel, obtain
from vivace.models.hub import fetch_part
from vivace.models.model_files import component_class
from vivace.models.quiet import quiet
from vivace.models.repository import INDEX, components_of, read_config
from vivace.models.tasks import check_installed, for_task, own_task, pipeline_of

# diffusers reads this when it is imported; it disables the loading of custom pipelines everywhere.
os.environ.setdefault("DIFFUSERS_DISABLE_REMOTE_CODE", "1")


def load_pipeline(
    located: LocatedModel,
    device: str,
    *,
    keep_on_host: bool = False,
    task: Task | None = None,
    controlnet: str | None = None,
    merge: Callable[[Any, Path], object] | None = None,
) -> Any:
    """Load the diffusers pipeline as published, on `device` (torch's type of device), in evaluation mode.

    CPUs run fp32, whatever the weights are stored in. A GPU runs the catalogue's precision or, for other models, the
    precision of the stored weights.

    Args:
        keep_on_host: leave the pipeline in host memory, in the device's precision, for techniques that onload it
            themselves. Random weights are always created on the device.
        task: what the pipeline is to do with the model's weights; None for what they are published for.
        controlnet: for the task "control", as `find_controlnet` returns it; None for random weights.
        merge: merges a LoRA into a pipeline (`lora.read_lora`), for models that have one of their own.
    """
    import diffusers
    import torch

    kind = pipeline_of(located.pipeline, task or own_task(located.pipeline), located.model.name)
    if located.architecture is None:
        check_installed(located.pipeline, located.model.name)
    located = obtain(located)
    dtype = getattr(
        torch, {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[precision(located, device)]
    )
    if located.architecture is not None:
        from vivace.models.synthetic import build

        if device == "cpu":
            _check_memory(located.model.name, located.architecture, dtype)
        return for_task(build(located.architecture, device, dtype), kind, controlnet)
    with (
        quiet(),
        reading(located.model.name, problem=f"does not load as a {located.pipeline}"),
        _lacking(located),
    ):
        pipe = _from_files(located, dtype)
        if located.contents is not None:
            _check_all_used(located, located.contents, pipe)
        _check_networks(located, pipe)
        _check_tokenizers(pipe, located.model.name)
        if located.entry is not None and located.entry.scheduler is not None:
            scheduler = located.entry.scheduler
            sampler = getattr(diffusers, scheduler.class_name)
            pipe.register_modules(scheduler=sampler.from_config(pipe.scheduler.config, **scheduler.overrides))
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            _convert(component, dtype)
            component.eval().requires_grad_(False)
    if getattr(pipe, "watermark", None) is not None:
        pipe.watermark = None  # SDXL adds a watermark if the watermarking library happens to be installed
    if not keep_on_host:
        pipe.to(device)
    if located.lora is not None:
        assert merge is not None, f"{located.model.name} has a LoRA"
        with quiet(), reading(located.model.name, problem=f"does not load as a {located.pipeline}"):
            merge(pipe, located.lora)
    pipe.set_progress_bar_config(disable=True)
    return for_task(pipe, kind, controlnet)


def load_tiny_vae(source: Path | StoredPart | ComponentConfig) -> Any:
    """Load a tiny VAE from a folder, from the hub, or with random weights; fp32, on the CPU."""
    import torch

    if isinstance(source, ComponentConfig):
        from vivace.models.synthetic import build_component

        return build_component(source, "cpu", torch.float32)
    path = source if isinstance(source, Path) else fetch_part(source)
    with quiet(), reading(path):
        from diffusers import AutoencoderTiny

        if isinstance(source, StoredPart) and source.class_name is not None:
            return read_tiny_vae(path, source.class_name)
        check_whole(path.glob("*.safetensors"))
        vae = AutoencoderTiny.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    return vae.eval().requires_grad_(False)


def read_tiny_vae(path: str | Path, class_name: str, dtype: Any = None) -> Any:
    """Read a VAE of `vivace.machinery.tiny_vaes` from its published file, in evaluation mode, on the CPU.

    Args:
        dtype: of its weights; None for fp32.

    Raises:
        UnusableModel: the file is incomplete, or its tensors are not those of the class.
    """
    import torch
    from safetensors.torch import load_file

    import vivace.machinery.tiny_vaes as tiny_vaes

    path = Path(path)
    check_whole([path])
    vae = getattr(tiny_vaes, class_name)()
    # TAEW2.1's names are "decoder.3.conv.0.weight".
    names = {
        name: name if ".layers." in name else name.replace(".", ".layers.", 1) for name in read_header(path)
    }
    found = {names[name]: f"of the shape {about['shape']}" for name, about in read_header(path).items()}
    expected = {name: f"of the shape {list(tensor.shape)}" for name, tensor in vae.state_dict().items()}
    for name in expected | found:
        if expected.get(name) != found.get(name):
            raise UnusableModel(
                f"{path} is no {class_name}: its tensor {name[:80]} is {found.get(name, 'not there')}, and should be "
                f"{expected.get(name, 'not there')}; delete the file, so that it is downloaded again, or update vivace"
            )
    vae.load_state_dict({names[name]: tensor for name, tensor in load_file(path).items()})
    return torch.nn.Module.to(vae, dtype or torch.float32).eval().requires_grad_(False)


def _check_memory(name: str, architecture: Architecture, dtype: Any) -> None:
    """Raise Unsupported if memory is too small, before the machine swaps or the process is killed silently."""
    import psutil

    from vivace.models.synthetic import num_parameters

    number = sum(num_parameters(component) for component in architecture.components.values())
    needed, free = number * dtype.itemsize, psutil.virtual_memory().available
    if needed > free:
        raise Unsupported(
            f"{name} takes {needed / 1e9:.1f} GB on a CPU, which runs fp32, and {free / 1e9:.1f} GB are free; run it "
            f"on a GPU, or use a smaller model"
        )


def _from_files(located: LocatedModel, dtype: Any) -> Any:
    import diffusers

    assert located.folder is not None
    arguments: dict[str, Any] = dict.fromkeys(located.without)
    if "safety_checker" in located.without:
        arguments["requires_safety_checker"] = False
    for name, path in located.components.items():
        arguments[name] = _load_component(located, name, path, dtype)
    if located.checkpoint is not None:
        kind = getattr(diffusers, located.pipeline)
        return kind.from_single_file(
            str(located.checkpoint),
            config=str(located.folder),
            dtype=dtype,
            local_files_only=True,
            **arguments,
        )
    if located.model.source != "embedded":
        arguments |= _load_text_encoders(located.folder, dtype, located.variant, arguments)
    return diffusers.DiffusionPipeline.from_pretrained(
        str(located.folder),
        dtype=dtype,
        variant=located.variant,
        local_files_only=True,
        use_safetensors=True,
        **arguments,
    )


@contextlib.contextmanager
def _lacking(located: LocatedModel) -> Iterator[None]:
    """Name the file and the tensor that is lacking, or has another shape; diffusers has other advice."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        is_lacking, contents = "meta tensor" in str(error), located.contents
        if contents is None:
            _check_shape(located.weights, str(error))
        if contents is None or not (is_lacking or isinstance(error, ValueError)):
            raise
        _check_names(located, contents)
        if not is_lacking:
            raise
        raise UnusableModel(
            f"{located.model.name} lacks weights that {contents.entry}'s configuration has; it is a smaller or another "
            "model, or only part of one: give it as a folder in diffusers' format"
        ) from error


def _without_values(folder: Path, name: str, kind: Any) -> Any:
    """Return a network of diffusers as its configuration makes it."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return kind.from_config(kind.load_config(str(folder), subfolder=name, local_files_only=True))


def _check_names(located: LocatedModel, contents: Contents) -> None:
    """Raise UnusableModel, with the tensor's name, if a file's denoiser has other tensors than its configuration."""
    import diffusers

    assert located.folder is not None
    name = contents.denoiser_name
    kind = getattr(diffusers, components_of(read_config(located.folder / INDEX))[name][1])
    layout = original_layout(_without_values(located.folder, name, kind))
    files = {own: file for file, own in contents.denoiser.items() if not is_marker(file)}
    check_tensors(located.checkpoint or located.weights[-1], files, layout, contents.codes)


def _check_networks(located: LocatedModel, pipe: Any) -> None:
    """Raise UnusableModel for weights that libraries left without values, or left out of a folder's files."""
    import diffusers
    import torch

    for part, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for name, tensor in component.state_dict().items():
            if tensor.is_meta:
                raise UnusableModel(
                    f"{located.model.name} lacks {name} of its {part}; copy or download it again, or give a model that "
                    "has all its weights"
                )
        if isinstance(component, diffusers.ModelMixin):
            for path in located.weights:
                if path.parent.name == part and path != located.components.get(part):
                    _check_file_used(path, part, component)


def _check_all_used(located: LocatedModel, contents: Contents, pipe: Any) -> None:
    """Raise UnusableModel if a single file has more weights than its model; diffusers would leave them out."""
    if contents.component is None:
        assert located.checkpoint is not None
        check_parts(located.checkpoint, contents.signature.parts, pipe.components)
    num_loaded = sum(tensor.numel() for tensor in getattr(pipe, contents.denoiser_name).state_dict().values())
    if contents.num_values is not None and contents.num_values > num_loaded:
        _check_names(located, contents)
        raise UnusableModel(
            f"{located.model.name} has {contents.num_values:,} weights in its {contents.denoiser_name}, of which "
            f"{contents.entry}'s configuration takes {num_loaded:,}; it is another model: give it as a folder in "
            "diffusers' format"
        )


def _load_component(located: LocatedModel, name: str, path: Path, dtype: Any) -> Any:
    """Load a component from its folder or from a single file. Its class must be a model class of diffusers."""
    import diffusers

    assert located.folder is not None
    if path.is_dir():
        class_name = component_class(path)
        where = path / "config.json"
    else:
        class_name = components_of(read_config(located.folder / INDEX))[name][1]
        where = located.folder / INDEX
    kind = getattr(diffusers, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ValueError(f"{where} names {class_name!r}, which is not a model class of diffusers")
    model: Any = kind
    if path.is_file():
        stored: dict[str, Any] = {}
        if path.suffix == SUFFIX:
            # Weights stay quantised; each layer dequantises its own in every call.
            stored["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
        source: Any = str(path)
        contents = located.contents
        if contents is not None and not contents.is_plain:
            skeleton = _without_values(located.folder, name, model)
            source = read_denoiser(path, contents.denoiser, contents.codes, skeleton, dtype)
        return model.from_single_file(
            source, config=str(located.folder), subfolder=name, dtype=dtype, local_files_only=True, **stored
        )
    variant = "fp16" if any(path.glob("*.fp16.safetensors")) else None
    return model.from_pretrained(
        str(path), dtype=dtype, variant=variant, local_files_only=True, use_safetensors=True
    )


def explained(
    located: LocatedModel, problem: str = "does not load"
) -> contextlib.AbstractContextManager[None]:
    """Turn libraries' errors about a model into UnusableModel; out of memory stays as it is. Failures of a model that
    ships with vivace, or of one with random weights, are vivace's own, and stay too."""
    if located.model.source == "embedded" or located.model.is_synthetic:
        return contextlib.nullcontext()
    return reading(located.model.name, problem=f"{problem} as a {located.pipeline}")


def precision(located: LocatedModel, device: str) -> str:
    """Return the precision in which the model is loaded: "fp32", "fp16" or "bf16"."""
    if device == "cpu":
        return "fp32"
    if located.entry is not None:
        return located.entry.cuda_dtype
    assert located.folder is not None
    largest = max(located.weights, key=lambda path: path.stat().st_size)
    stored = main_dtype(largest)
    if stored in ("F16", "BF16"):
        return {"F16": "fp16", "BF16": "bf16"}[stored]
    # UNets run in fp16; transformers and their T5 overflow in it.
    return "bf16" if "transformer" in components_of(read_config(located.folder / INDEX)) else "fp16"


def _convert(component: Any, dtype: Any) -> None:
    """Convert all parameters to one precision, since libraries disagree about fp16 files on disk. Excepted are modules
    that their authors keep in fp32 because they overflow otherwise (T5's output projections)."""
    import torch

    kept: list[str] = []
    if dtype != torch.float32:
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            kept += getattr(component, attribute, None) or ()
    for name, parameter in component.named_parameters():
        is_kept = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.is_floating_point() and parameter.dtype != dtype and not is_kept:
            parameter.data = parameter.data.to(dtype)


def tiny_vae_arguments(located: LocatedModel) -> tuple[str, ...]:
    """Return the source text of the arguments that load this model's tiny VAE: of `AutoencoderTiny.from_pretrained`, or
    of `hf_hub_download` if it is of a class of vivace. Empty if it has none."""
    tiny = located.tiny_vae
    if isinstance(tiny, Path):
        is_embedded = located.model.source == "embedded"
        return (f"WEIGHTS / {literal(tiny.name)}",) if is_embedded else (literal(str(tiny)),)
    if isinstance(tiny, StoredPart):
        files = () if tiny.class_name is None else map(literal, tiny.files)
        return literal(tiny.repo), *files, f"revision={literal(tiny.revision)}"
    return ()


_LEAST_LENGTH = 3
"""Tokens of a prompt of one word, with start and end."""
_OLDER = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names of VAEs' attention in older folders, which diffusers reads."""
_OTHER_SHAPE = re.compile(
    r"because (\S+) expected shape torch\.Size\((\[[\d, ]*\])\), but got torch\.Size\((\[[\d, ]*\])\)"
)
"""diffusers' message."""
_NUMBERED = re.compile(r"(.+?)\.\d+\.")


class UnusedWeightsWarning(UserWarning):
    """A model's files have weights that are not used."""


def _load_text_encoders(
    folder: Path, dtype: Any, variant: str | None, without: Collection[str]
) -> dict[str, Any]:
    """Return the models of transformers that a folder's pipeline has, by component, as diffusers loads them."""
    import transformers

    models: dict[str, Any] = {}
    for name, (library, class_name) in components_of(read_config(folder / INDEX)).items():
        kind: Any = getattr(transformers, class_name, object) if library == "transformers" else object
        if name in without or not issubclass(kind, transformers.PreTrainedModel):
            continue
        own = folder / name
        has_variant = variant is not None and any(own.glob(f"*.{variant}*.safetensors"))
        models[name], loading = kind.from_pretrained(
            str(own),
            dtype=dtype,
            variant=variant if has_variant else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
        for key, stored, expected in sorted(loading["mismatched_keys"]):
            raise UnusableModel(
                f"{own} has {key} with the shape {list(stored)}, and its config.json means {list(expected)}; it is "
                "another model's"
            )
        if missing := sorted(loading["missing_keys"]):
            raise UnusableModel(
                f"{own} lacks {missing[0]}"
                + (f" and {len(missing) - 1} more weights" if missing[1:] else "")
                + "; copy or download it again"
            )
        _report_unused(own, name, models[name], loading["unexpected_keys"])
    return models


def _check_tokenizers(pipe: Any, model: str) -> None:
    """Raise UnusableModel if a tokenizer is empty, has ids that its encoder lacks, or reads more than its encoder."""
    for name, tokenizer in pipe.components.items():
        encoder: Any = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
        if (
            not name.startswith("tokenizer")
            or tokenizer is None
            or not hasattr(encoder, "get_input_embeddings")
        ):
            continue
        words = getattr(encoder.get_input_embeddings(), "num_embeddings", None)
        vocabulary = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else ()
        positions = getattr(encoder.config, "max_position_embeddings", None)
        has_positions = encoder.config.model_type.startswith("clip") and positions is not None
        length = tokenizer.model_max_length if has_positions else None
        problem = None
        if words and vocabulary and len(vocabulary) < words // 2:
            problem = f"knows {len(vocabulary):,} tokens: its files are missing, or another model's"
        elif words and vocabulary and max(vocabulary) >= words:
            problem = f"has ids up to {max(vocabulary):,}: it is another model's"
        elif length is not None and not _LEAST_LENGTH <= length <= positions:
            shown = f"{length:,}" if length < 1e6 else "no length"
            problem = (
                f"has the model_max_length {shown} in its tokenizer_config.json; it takes at most {positions}"
            )
        if problem is not None:
            raise UnusableModel(
                f"{model}'s {name} does not fit its {name.replace('tokenizer', 'text_encoder')}, which has "
                f"{words:,} tokens: it {problem}; copy the model's own {name} folder again"
            )


def _check_file_used(file: Path, part: str, component: Any) -> None:
    """Check that a network of diffusers has every tensor of a file; see `_report_unused`."""
    names = component.state_dict().keys()
    ignored = getattr(component, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = []
    for name in read_header(file):
        own = name
        for older, newer in _OLDER.items():
            own = own.replace(older, newer)
        if not {name, own} & names and not any(re.search(pattern, name) for pattern in ignored):
            more.append(name)
    _report_unused(file, part, component, more)


def _report_unused(where: Path, part: str, component: Any, names: Iterable[str]) -> None:
    """Say which weights are not used, or refuse them where they are more layers than the network has."""
    modules = {name for name, _ in component.named_modules()}
    names = sorted(name for name in names if not name.endswith(".position_ids"))
    for name in names:
        match = _NUMBERED.match(name)
        if match is not None and any(module.endswith(match[1]) for module in modules):
            raise UnusableModel(
                f"{where} has {name}, and its {part} has no such layer by its config.json; it is "
                "another model's, or its configuration is"
            )
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = f"{where} has weights that its {part} does not use: {', '.join(names[:3])}{more}"
        warnings.warn(text, UnusedWeightsWarning, stacklevel=2)


def _check_shape(files: Iterable[Path], problem: str) -> None:
    """Raise UnusableModel with the file whose tensor has another shape, if that is the problem."""
    match = _OTHER_SHAPE.search(problem)
    if match is None:
        return
    name, expected, stored = match.groups()
    for file in files:
        about = read_header(file).get(name)
        if about is not None and str(about["shape"]) == stored:
            raise UnusableModel(
                f"{file} has {name} with the shape {stored}, and its config.json means {expected}; it is another "
                "model's"
            )
