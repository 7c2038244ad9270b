"""Write a model's denoiser, with the weights that a recipe makes, as one file that ComfyUI reads.

Weights in fp8 have one scale each, whatever the recipe's granularity, because the format has one, and with `fp8_static`
one for their inputs. Everything but the denoiser's weights is left out and reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vivace import __version__
from vivace.errors import OutputError, Unsupported, UsageError
from vivace.foundation.untrusted.destinations import check_writable, fill_new, is_stream, would_overwrite
from vivace.foundation.untrusted.files import user_path
from vivace.machinery.quantization.calibration import calibrate
from vivace.machinery.quantization.layers import summarise
from vivace.machinery.technique import Placement, Target, Technique, component_of
from vivace.measure.machine import check_works, this_machine
from vivace.models.checkpoints.headers import read_header, read_metadata
from vivace.models.checkpoints.metadata import MARKERS
from vivace.models.checkpoints.read_denoiser import OriginalTensor, check_tensors, original_layout
from vivace.models.checkpoints.weight_scales import DESCRIPTION, FP8, INPUT_SCALE, codes_of, is_marker
from vivace.models.find import LocatedModel, obtain
from vivace.models.load import precision
from vivace.recipes.recipe import Recipe
from vivace.runtime.opening import target_of
from vivace.runtime.saving import check_source, session_with, without_places
from vivace.runtime.session import Session
from vivace.techniques.distilled import Distilled
from vivace.techniques.dtype import Dtype
from vivace.techniques.fuse_qkv import FuseQkv
from vivace.techniques.lora import Lora
from vivace.techniques.prune import Prune
from vivace.techniques.quantize import Quantize

if TYPE_CHECKING:
    import torch

_PREFIX_OF_UNETS = "model.diffusion_model."
_LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
_WEIGHT = ".weight"
_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}
_ALIGNED = 8  # bytes


@dataclass(frozen=True)
class DenoiserFile:
    """The tensors of a denoiser's file.

    Attributes:
        quantised: the authors' names of weights that are written in fp8.
        divided: of weights that are not, because only some of the layers that they join are quantised.
        input_scales: by weight that is written in fp8, if its layer's inputs have one scale.
    """

    denoiser: Any
    layout: Mapping[str, OriginalTensor]
    quantised: tuple[str, ...]
    divided: tuple[str, ...]
    input_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, denoiser: Any, layers: Collection[str], input_scales: Mapping[str, torch.Tensor] | None = None
    ) -> DenoiserFile:
        """Return the file of a denoiser.

        Args:
            layers: diffusers' names of the layers that are quantised.
            input_scales: of the inputs of all these layers, by diffusers' name; None where they have none. Layers that
                one weight joins get the largest of theirs.
        """
        layout = original_layout(denoiser)
        quantised, divided = [], []
        for name, tensor in layout.items():
            if not name.endswith(_WEIGHT) or len(tensor.shape) != 2:
                continue
            chosen = [part.removesuffix(_WEIGHT) in layers for part in tensor.parts]
            if all(chosen):
                quantised.append(name)
            elif any(chosen):
                divided.append(name)
        scales = {
            name: max(
                input_scales[part.removesuffix(_WEIGHT)].detach().float().cpu().reshape(())
                for part in layout[name].parts
            )
            for name in quantised
            if input_scales is not None
        }
        return cls(denoiser, layout, tuple(quantised), tuple(divided), scales)

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names."""
        return _PREFIX_OF_UNETS if type(self.denoiser).__name__.startswith("UNet") else ""

    def write(
        self,
        file: BinaryIO,
        dtype: torch.dtype,
        *,
        in_sixteen_bits: bool,
        markers: Collection[str],
        metadata: Mapping[str, str],
    ) -> None:
        """Write the file.

        Args:
            dtype: of weights that are not quantised.
            in_sixteen_bits: whether ComfyUI is to multiply in 16 bits.
            markers: names of empty tensors, which say what a UNet predicts.
            metadata: of the header.
        """
        import torch

        assert set(markers) <= set(MARKERS)
        content = list(self._tensors(dtype, in_sixteen_bits))
        content += [WrittenTensor(name, torch.float32, (0,), partial(torch.zeros, 0)) for name in markers]
        write_tensors(file, content, {"format": "pt", **metadata})

    def _tensors(self, dtype: torch.dtype, in_sixteen_bits: bool) -> Iterator[WrittenTensor]:
        import torch

        state = self.denoiser.state_dict()
        description = {"format": FP8} | ({"full_precision_matrix_mult": True} if in_sixteen_bits else {})
        text = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
        for name, tensor in self.layout.items():
            written = self.prefix + name
            join = partial(tensor.join, state)
            if name not in self.quantised:
                yield WrittenTensor(written, dtype, tensor.shape, join)
                continue
            scale = scale_of(join())
            layer = written.removesuffix(_WEIGHT)
            yield WrittenTensor(written, torch.float8_e4m3fn, tensor.shape, partial(_in_fp8, join, scale))
            yield WrittenTensor(f"{written}_scale", torch.float32, (), partial(torch.clone, scale))
            if name in self.input_scales:
                of_inputs = partial(self.input_scales.__getitem__, name)
                yield WrittenTensor(f"{layer}.{INPUT_SCALE}", torch.float32, (), of_inputs)
            yield WrittenTensor(f"{layer}.{DESCRIPTION}", torch.uint8, tuple(text.shape), lambda: text)

    def check(self, path: Path) -> None:
        """Check the written file's header with the code that reads foreign files."""
        header = read_header(path)
        codes = codes_of(path, header, read_metadata(path))
        names = {name: name.removeprefix(self.prefix) for name in header if name not in MARKERS}
        check_tensors(
            path, {own: name for name, own in names.items() if not is_marker(name)}, self.layout, codes
        )
        assert len(codes) == len(self.quantised), f"{path} has {len(codes)} weights in fp8"
        num_scales = sum(name.endswith(f".{INPUT_SCALE}") for name in header)
        assert num_scales == len(self.input_scales), f"{path} has {num_scales} scales of inputs"


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of a weight in fp8: its largest value becomes the largest of the format. It is rounded to the
    weight's precision, as torchao and comfy-kitchen do, so that values are theirs bit by bit."""
    import torch

    # A weight of zeros would be divided by zero.
    largest = weight.abs().max().clamp(min=_LARGEST * torch.finfo(weight.dtype).tiny)
    return (largest / _LARGEST).float()


def _in_fp8(join: Any, scale: torch.Tensor) -> torch.Tensor:
    import torch

    return (join().float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to be written: `make` computes it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def write_tensors(file: BinaryIO, tensors: Sequence[WrittenTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor, so that the whole is never in memory beside the model.

    The format is eight bytes of length, a JSON object of that length, then the tensors' bytes in the order of the
    object (github.com/huggingface/safetensors). Tensors of wide types come first: readers map them where they lie, and
    want their addresses to be multiples of their size.
    """
    import torch

    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        dtype = _NAMES[str(tensor.dtype).removeprefix("torch.")]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for tensor in ordered:
        values = tensor.make().detach().to("cpu", tensor.dtype).contiguous()
        assert tuple(values.shape) == tensor.shape, f"{tensor.name} is {tuple(values.shape)}"
        file.write(values.reshape(-1).view(torch.uint8).numpy().data)


SUFFIX = ".safetensors"
_SCHEMES = ("fp8", "fp8_static", "fp8_weight")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class WrittenDenoiser:
    """A file that was written."""

    path: Path
    num_bytes: int
    num_quantised: int
    notes: tuple[str, ...]


@dataclass
class _Parts:
    """A recipe, divided by the treatment of its techniques."""

    applied: list[Technique] = field(default_factory=list)
    quantize: Quantize | None = None
    dtype: str | None = None
    notes: list[str] = field(default_factory=list)


def write_denoiser(
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    destination: Path,
    is_read: Callable[[], None] = lambda: None,
) -> WrittenDenoiser:
    """Load a model, apply the techniques that change its denoiser's weights, and write it in the authors' names."""
    import torch

    path = user_path(destination)
    _check_destination(path)
    check_source(located)
    parts = _divided(recipe)
    check_works(device)
    located = obtain(located)
    applied = Recipe(tuple(parts.applied))
    session = session_with(located, applied, device)
    is_read()
    denoiser = component_of(session.pipe, "denoiser")
    layers = _quantised_layers(session, parts.quantize)
    scales = None
    if parts.quantize is not None and parts.quantize.scheme == "fp8_static":
        target = target_of(session.pipe, located, Recipe(), device)
        scales = _calibrated(
            replace(target, request=replace(target.request, earlier=applied.techniques)), parts, layers
        )
        layers = tuple(scales)
    file = DenoiserFile.of(denoiser, layers, scales)
    dtype = getattr(torch, _DTYPES[parts.dtype or precision(located, "cuda")])
    described = {
        "model": located.entry.name if located.entry else type(session.pipe).__name__,
        "recipe": without_places(recipe.pinned())[0].text,
    }
    is_new = fill_new(
        path,
        lambda stream: file.write(
            stream,
            dtype,
            in_sixteen_bits=parts.quantize is None or parts.quantize.scheme == "fp8_weight",
            markers=_markers(session.pipe),
            metadata={"vivace": json.dumps(described | {"version": __version__})},
        ),
    )
    if not is_new:
        raise _exists(path)
    file.check(path)
    notes = [*session.warnings, *parts.notes, *_notes_of(file)]
    return WrittenDenoiser(path, path.stat().st_size, len(file.quantised), tuple(notes))


def _check_destination(path: Path) -> None:
    if path.suffix != SUFFIX or is_stream(path):
        raise UsageError(f"{path} does not end in {SUFFIX}, which ComfyUI's loaders look for")
    if would_overwrite(path):
        raise _exists(path)
    check_writable(path)


def _exists(path: Path) -> OutputError:
    return OutputError(f"{path} exists and was not changed; give another name")


def _divided(recipe: Recipe) -> _Parts:
    parts = _Parts()
    left: list[str] = []
    for technique in recipe.pinned():
        if isinstance(technique, Quantize) and "denoiser" in technique.targets:
            parts.quantize = _expressible(technique)
            left += [f"{technique.name}@{target}" for target in technique.targets if target != "denoiser"]
        elif isinstance(technique, Lora | Dtype | Distilled) and technique.facts.is_stored:
            parts.applied.append(technique)
            if isinstance(technique, Dtype) and "denoiser" in technique.targets:
                parts.dtype = technique.dtype
            if isinstance(technique, Distilled):
                parts.notes.append(f"{technique.text}: set its steps, guidance and sampler in ComfyUI")
        elif isinstance(technique, Lora):
            raise Unsupported(
                f"{technique.text}: a hot LoRA is not part of the weights; merge it (without hot)"
            )
        elif isinstance(technique, Prune):
            raise Unsupported(
                f"{technique.text}: ComfyUI builds the model with all of its blocks; leave it out"
            )
        elif not isinstance(technique, FuseQkv):  # its weights are the same
            left.append(technique.text)
    if parts.quantize is not None and parts.quantize.scheme == "fp8":
        parts.notes.append(
            "ComfyUI multiplies these weights in fp8 by inputs without a scale, clipped at 448; "
            "quantize(fp8_static) writes their scales, quantize(fp8_weight) makes it multiply in 16 bits"
        )
    if left:
        parts.notes.append(f"not in a file of the denoiser's weights: {', '.join(left)}")
    return parts


def _expressible(technique: Quantize) -> Quantize:
    if technique.backend != "torchao" or technique.scheme not in _SCHEMES:
        raise Unsupported(
            f"{technique.text}: files for ComfyUI are written in fp8 only; take quantize(fp8_weight), "
            "or quantize(fp8_static) to multiply in fp8 too"
        )
    if "auto" in technique.skip:
        raise Unsupported(
            f"{technique.text}: skip=auto is measured by `vivace bench`, whose record names the layers; name them, "
            "e.g. skip='proj_out, *.ff.*'"
        )
    return technique


def _quantised_layers(session: Session, technique: Quantize | None) -> tuple[str, ...]:
    if technique is None:
        return ()
    # Limits of kernels on this machine do not apply to the file.
    target = Target(Placement(this_machine("cpu")), session.pipe)
    choice = technique.layers(target)["denoiser"]
    if not choice.chosen:
        reasons = ", ".join(sorted(set(choice.skipped.values())))
        raise Unsupported(f"{technique.text} quantises no layer of the denoiser ({reasons})")
    return tuple(choice.chosen)


def _calibrated(target: Target, parts: _Parts, layers: tuple[str, ...]) -> dict[str, torch.Tensor]:
    assert parts.quantize is not None
    denoiser = component_of(target.pipe, "denoiser")
    modules = {f"denoiser.{name}": denoiser.get_submodule(name) for name in layers}
    scales = calibrate(target, modules, parts.quantize.pictures)
    parts.notes.append(f"scales of inputs: {scales.origin}, at the model's own steps and size")
    for name, reason in scales.missing.items():
        parts.notes.append(f"not in fp8: {name.removeprefix('denoiser.')} ({reason})")
    return {name.removeprefix("denoiser."): scale for name, scale in scales.by_layer.items()}


def _markers(pipe: Any) -> tuple[str, ...]:
    config = pipe.scheduler.config
    if getattr(pipe, "unet", None) is None or config.get("prediction_type") != "v_prediction":
        return ()
    return ("v_pred", "ztsnr") if config.get("rescale_betas_zero_snr") else ("v_pred",)


def _notes_of(file: DenoiserFile) -> list[str]:
    notes = []
    if file.quantised:
        notes.append("each weight in fp8 has one scale, as the format wants: like granularity=tensor")
    if joined := [name for name in file.quantised if len(file.layout[name].parts) > 1]:
        number = f"{len(joined)} weights join layers of diffusers and have one scale together"
        notes.append(f"{number}: {', '.join(summarise(joined))}")
    if file.divided:
        names = ", ".join(summarise(file.divided))
        notes.append(f"not in fp8, since only some of the layers that they join are quantised: {names}")
    return notes
