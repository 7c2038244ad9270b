"""A whole pipeline as a saved folder: components, and the rest in diffusers' format.

A component whose tensors are all plain, and whose names and shapes are those of its configuration, is written as
diffusers and transformers do, under their file name. Any other one is in files of vivace's own name, which no library
takes for a whole component. What a file cannot say by itself is in its header, as JSON under the key `vivace`:

    quantised   by the weight's name: its class, attributes and plain tensors (`stored_tensors`)
    shared      names of tensors that are another one's
    orders      dimensions of tensors in memory, of those that are not in rows
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from vivace.architectures.components import ComponentConfig, Library
from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import open_plain, parse_json, read_object, reading, reason
from vivace.machinery.quantization.stored_tensors import (
    StoredTensor,
    check_shapes,
    flatten,
    is_plain,
    unflatten,
)
from vivace.models.checkpoints.headers import read_header, read_metadata
from vivace.models.find import LocatedModel
from vivace.models.quiet import quiet
from vivace.models.repository import INDEX, components_of, read_index
from vivace.models.saved_folder import check_contents
from vivace.models.synthetic import on_meta

if TYPE_CHECKING:
    from io import BufferedReader

    import torch

_OWN = "vivace"
"""The stem of files of vivace's own, and the key of their headers."""
_BUFFERS = f"{_OWN}-buffers.safetensors"
"""Buffers that are not in a state dict, such as positions: libraries compute them again, and may round them."""
_AGAIN = "save the model again with `vivace save`"
_FILE_BYTES = 4 << 30
"""Approximate bytes of a file: a writer of safetensors holds a whole file in memory."""
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}  # fmt: skip
_PIECE = 1 << 24  # bytes that are copied at a time
_THREADS = 12


# One thread copies pages of a mapped file at about 3 GB/s. A GPU takes ten times as much from pinned memory, so each
# thread reads pieces into a pinned buffer of its own and copies them from there.
@dataclass(frozen=True)
class Piece:
    """A part of a tensor: its bytes on the device, and where they are in a file."""

    path: Path
    offset: int
    target: torch.Tensor


@dataclass
class Described:
    """The description of a component in its files' headers."""

    quantised: dict[str, StoredTensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    orders: dict[str, list[int]] = field(default_factory=dict)

    def text(self) -> str:
        quantised = {name: stored.as_json() for name, stored in self.quantised.items()}
        content = {"quantised": quantised, "shared": self.shared, "orders": self.orders}
        return json.dumps({key: value for key, value in content.items() if value}, allow_nan=False)


@dataclass(frozen=True)
class ComponentFiles:
    """The checked files of a component: where each tensor is, and the headers' description."""

    places: dict[str, tuple[Path, dict[str, Any]]]
    described: Described


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers by name, shared ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def write_component(module: torch.nn.Module, folder: Path, skeleton: torch.nn.Module) -> None:
    """Write a component's tensors into a folder."""
    described = Described()
    stored: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for name, tensor in named_tensors(module):
        first = names.setdefault(id(tensor), name)
        if first != name:
            described.shared[name] = first
        elif is_plain(tensor):
            stored[name] = tensor.detach()
        else:
            described.quantised[name], parts = flatten(tensor, name)
            stored |= {f"{name}.{inner}": part for inner, part in parts.items()}
    stored = {name: _in_rows(name, tensor, described) for name, tensor in stored.items()}
    state = module.state_dict().keys()
    buffers = [name for name, _ in module.named_buffers() if name in stored and name not in state]
    apart = {name: stored.pop(name) for name in buffers}
    plain = not described.quantised and _shapes(skeleton) == _shapes(module)
    if apart:
        _write(folder / _BUFFERS, apart, Described())
    if plain and _size(stored.values()) <= _FILE_BYTES:
        _write(folder / _usual_name(module), stored, described)
        return
    groups = list(_groups(stored))
    for number, group in enumerate(groups, 1):
        about = described if number == 1 else Described()
        _write(folder / f"{_OWN}-{number:05d}-of-{len(groups):05d}.safetensors", group, about)


def check_component(folder: Path, skeleton: torch.nn.Module) -> ComponentFiles:
    """Check that a folder's files have the tensors of a component, and return their places. Only headers are read."""
    places: dict[str, tuple[Path, dict[str, Any]]] = {}
    described = Described()
    paths = sorted(folder.glob("*.safetensors"))
    about = paths[0] if len(paths) == 1 else folder
    for path in paths:
        for name, entry in read_header(path).items():
            if name in places:
                raise UnusableModel(f"{path}: the tensor {name!r} is in {places[name][0].name} too; {_AGAIN}")
            places[name] = (path, entry)
        if (text := read_metadata(path).get(_OWN)) is not None:
            about = path
            with reading(path, problem=f"has no valid key {_OWN!r}"):
                _read_description(text, described)
    files = ComponentFiles(places, described)
    left = dict(places)
    for name, tensor in named_tensors(skeleton):
        _check_tensor(name, tensor, files, left, about)
    for name, (path, _) in left.items():
        raise UnusableModel(
            f"{path}: the tensor {name[:200]!r} is none of {type(skeleton).__name__}'s; {_AGAIN}"
        )
    return files


def fill(skeleton: torch.nn.Module, files: ComponentFiles, device: str) -> None:
    """Put the values of checked files into a component without values."""
    import torch
    from safetensors import safe_open

    opened: dict[Path, Any] = {}
    on_gpu: dict[str, torch.Tensor] = {}
    if torch.device(device).type == "cuda":
        with reading(next(iter(files.places.values()))[0].parent):
            on_gpu = read_tensors(files.places, _DTYPES, device)

    def read(name: str) -> torch.Tensor:
        path, entry = files.places[name]
        if name in on_gpu:
            tensor = on_gpu.pop(name)
        elif device == "meta":
            tensor = torch.empty(entry["shape"], dtype=getattr(torch, _DTYPES[entry["dtype"]]), device="meta")
        else:
            if path not in opened:
                opened[path] = safe_open(str(path), "pt", device=device)
            tensor = opened[path].get_tensor(name)
        order = files.described.orders.get(name)
        return tensor if order is None else tensor.permute(_inverse(order))

    made: dict[str, torch.Tensor] = {}
    for name, tensor in list(named_tensors(skeleton)):
        own = files.described.shared.get(name, name)
        if own not in made:
            where = files.places.get(own, next(iter(files.places.values())))[0]
            with reading(where, problem=f"has no valid tensor {own!r}"):
                made[own] = _whole(own, tuple(tensor.shape), files.described, read)
                if isinstance(tensor, torch.nn.Parameter):
                    made[own] = torch.nn.Parameter(made[own], requires_grad=False)
        parent, _, last = name.rpartition(".")
        owner = skeleton.get_submodule(parent)
        (owner._parameters if isinstance(tensor, torch.nn.Parameter) else owner._buffers)[last] = made[own]


def _whole(name: str, shape: tuple[int, ...], described: Described, read: Any) -> torch.Tensor:
    stored = described.quantised.get(name)
    if stored is None:
        plain: torch.Tensor = read(name)
        return plain
    inner = {each: read(f"{name}.{each}") for each in stored.names}
    for each, value in inner.items():
        is_scale = value.is_floating_point() and each != "qdata" and value.device.type != "meta"
        if is_scale and not value.float().isfinite().all():
            raise ValueError(f"its {each} has values that are no finite numbers")
    return unflatten(stored, inner, shape)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    files: ComponentFiles,
    left: dict[str, tuple[Path, dict[str, Any]]],
    about: Path,
) -> None:
    own = files.described.shared.get(name, name)
    stored = files.described.quantised.get(own)
    names = [own] if stored is None else [f"{own}.{inner}" for inner in stored.names]
    for each in names:
        if each not in files.places:
            raise UnusableModel(
                f"{about}: the tensor {each!r} is missing; copy the folder again, or {_AGAIN}"
            )
        left.pop(each, None)
    path = files.places[names[0]][0]
    if stored is not None:
        shapes = {inner: tuple(files.places[f"{own}.{inner}"][1]["shape"]) for inner in stored.names}
        with reading(path, problem=f"has no valid tensor {own!r}"):
            check_shapes(stored, shapes, tuple(tensor.shape))
        return
    entry = files.places[own][1]
    shape = [
        entry["shape"][at] for at in _inverse(files.described.orders.get(own, range(len(entry["shape"]))))
    ]
    if tuple(shape) != tuple(tensor.shape):
        raise UnusableModel(
            f"{path}: the tensor {own!r} has the shape {shape}, and the model {list(tensor.shape)}; it is of "
            "another model"
        )
    if entry["dtype"].startswith(("F", "BF")) != tensor.is_floating_point():
        raise UnusableModel(f"{path}: the tensor {own!r} is {entry['dtype']}, and the model's {tensor.dtype}")


def _read_description(text: str, described: Described) -> None:
    content = parse_json(text, unique=True)
    if not isinstance(content, dict) or not content.keys() <= {"quantised", "shared", "orders"}:
        raise ValueError("it is not a description of a saved component")
    for name, stored in dict(content.get("quantised", {})).items():
        try:
            described.quantised[str(name)] = StoredTensor.of_json(stored)
        except ValueError as error:
            raise ValueError(f"{str(name)[:200]!r}: {error}") from None
    for name, other in dict(content.get("shared", {})).items():
        described.shared[str(name)] = str(other)
    for name, order in dict(content.get("orders", {})).items():
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(len(order)))):
            raise ValueError(f"{str(name)[:200]!r} has no order of dimensions")
        described.orders[str(name)] = order


def _in_rows(name: str, tensor: torch.Tensor, described: Described) -> torch.Tensor:
    """Return a row-major tensor; if it is dense in another order, note the order of its dimensions."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda at: -tensor.stride(at))
    ordered = tensor.permute(order)
    if not ordered.is_contiguous():
        return tensor.contiguous()
    described.orders[name] = order
    return ordered


def _inverse(order: Any) -> list[int]:
    places = list(order)
    return [places.index(at) for at in range(len(places))]


def _groups(stored: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if group and _size(group.values()) + _size([tensor]) > _FILE_BYTES:
            yield group
            group = {}
        group[name] = tensor
    yield group


def _write(path: Path, tensors: dict[str, torch.Tensor], described: Described) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = described.text()
    try:
        save_file(tensors, str(path), metadata={"format": "pt"} | ({} if text == "{}" else {_OWN: text}))
    except SafetensorError as error:  # without the name of the file, which is a temporary one
        raise OSError(reason(error)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # it writes files that only their owner may read


def _usual_name(module: Any) -> str:
    is_of_diffusers = type(module).__module__.startswith("diffusers.")
    return "diffusion_pytorch_model.safetensors" if is_of_diffusers else "model.safetensors"


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def read_tensors(
    places: Mapping[str, tuple[Path, dict[str, Any]]],
    dtypes: Mapping[str, str],
    device: str,
    most_threads: int = _THREADS,
) -> dict[str, torch.Tensor]:
    """Read tensors to a device, by name."""
    import torch

    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, dtypes[entry["dtype"]]), device=device)
        for name, (_, entry) in places.items()
    }
    starts: dict[Path, int] = {}
    for path in {path for path, _ in places.values()}:
        with open_plain(path) as file:  # the data lie behind the header
            starts[path] = 8 + int.from_bytes(file.read(8), "little")
    pieces = [
        piece
        for name, (path, entry) in places.items()
        for piece in _pieces(path, starts[path] + entry["data_offsets"][0], tensors[name])
    ]
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be at work
    own = threading.local()

    def copy(piece: Piece) -> None:
        if not hasattr(own, "staging"):
            own.staging = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=is_cuda)
            own.stream = torch.cuda.Stream(device) if is_cuda else None
        staging = own.staging[: piece.target.numel()]
        _read_into(piece.path, piece.offset, memoryview(staging.numpy()))
        with torch.cuda.stream(own.stream):  # None: no stream
            piece.target.copy_(staging, non_blocking=True)
        if own.stream is not None:
            own.stream.synchronize()

    with ThreadPoolExecutor(min(most_threads, os.cpu_count() or 1)) as threads:
        for _ in threads.map(copy, pieces):
            pass
    return tensors


def _pieces(path: Path, offset: int, tensor: torch.Tensor) -> Iterator[Piece]:
    import torch

    if tensor.numel() == 0:
        return
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE):
        yield Piece(path, offset + start, flat[start : start + _PIECE])


def _read_into(path: Path, offset: int, target: memoryview) -> None:
    with open_plain(path) as file:
        file.seek(offset)
        while len(target):
            count = cast("BufferedReader", file).readinto(target)
            if not count:
                raise OSError(f"{path} ends before its header says")
            target = target[count:]


Rebuild = Callable[[Any], None]
"""Puts the modules that techniques left into a pipeline of skeletons."""
_CONFIG = "config.json"


def write_pipeline(pipe: Any, located: LocatedModel, folder: Path) -> None:
    """Write a pipeline into an empty folder, except `vivace.json`."""
    with quiet():
        _write_pipeline(pipe, located, folder)


def _write_pipeline(pipe: Any, located: LocatedModel, folder: Path) -> None:
    import torch

    pipe.save_config(str(folder))
    for name in components_of(read_object(folder / INDEX)):
        part = getattr(pipe, name)
        if part is None:
            continue
        target = folder / name
        if isinstance(part, torch.nn.Module):
            target.mkdir()
            if hasattr(part, "save_config"):
                part.save_config(str(target))
            else:
                part.config.save_pretrained(str(target))
            write_component(part, target, _skeleton(target, _kind_of(name, type(part))))
        elif hasattr(part, "save_pretrained"):
            part.save_pretrained(str(target))
            # Libraries write tokenizers in their own newest form, and may read that differently.
            own = {n: p for n, p in located.files.items() if n.startswith(f"{name}/")}
            if "scheduler" not in name and own:
                shutil.rmtree(target)
                target.mkdir()
                for own_name, path in own.items():
                    copy = folder / own_name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)


def read_pipeline(located: LocatedModel, rebuild: Rebuild, device: str) -> Any:
    """Check a saved folder as a whole, then build its pipeline on a device, in evaluation mode."""
    import diffusers

    assert located.saved is not None
    assert located.folder is not None
    folder = located.folder
    if device != "meta":
        check_contents(folder, located.saved)
    with quiet():
        skeletons = _skeletons(folder)
        rebuild(SimpleNamespace(**skeletons, components=skeletons))
        checked: dict[str, ComponentFiles] = {
            name: check_component(folder / name, skeleton) for name, skeleton in skeletons.items()
        }
        for name, files in checked.items():
            fill(skeletons[name], files, device)
        with reading(located.model.name, problem=f"does not load as a {located.pipeline}"):
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, **skeletons
            )
    for part in skeletons.values():
        part.eval().requires_grad_(False)
    if getattr(pipe, "watermark", None) is not None:
        pipe.watermark = None  # SDXL adds a watermark if the watermarking library happens to be installed
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _kind_of(name: str, kind: Any) -> Any:
    """Check that a saved folder can name a network's class, and return it."""
    if _public(kind.__module__.partition(".")[0], kind.__name__) is not kind:
        raise Unsupported(
            f"the {name} cannot be saved: {kind.__name__} is not a public class of diffusers or transformers; load "
            "the model without it"
        )
    return kind


def _public(library: str, name: str) -> Any:
    if library not in ("diffusers", "transformers"):
        return None
    return getattr(importlib.import_module(library), name, None)


def _skeletons(folder: Path) -> dict[str, Any]:
    import torch

    made: dict[str, Any] = {}
    for name, (library, class_name) in components_of(read_index(folder, str(folder))).items():
        kind = _public(library, class_name)
        if not isinstance(kind, type):
            raise UnusableModel(
                f"{folder / INDEX}: the key {name!r} names {class_name[:80]!r} of {library[:80]!r}, which saved "
                "models do not have"
            )
        if issubclass(kind, torch.nn.Module):
            with reading(folder / name / _CONFIG, problem=f"does not make a {class_name}"):
                made[name] = _skeleton(folder / name, kind)
    return made


def _skeleton(folder: Path, kind: Any) -> Any:
    config = read_object(folder / _CONFIG)
    library: Library = "transformers" if kind.__module__.startswith("transformers.") else "diffusers"
    if library == "diffusers":
        config = kind.extract_init_dict(config)[0]
    return on_meta(ComponentConfig(library=library, class_name=kind.__name__, config=config))
