"""Quantised tensors as plain ones with a description in JSON, as a saved model's files hold them, and back.

A quantised weight is a subclass of torch's tensor around a few plain ones (values, scales, zeros) and attributes (block
size, dtype, how inputs are scaled). A pickle would import whatever it names. Here a description names its classes, and
only those of the two tables are ever made of one, after their plain tensors were checked against the weight's shape.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported
from vivace.machinery.quantization.block_tensors import MXFP8_BLOCK, NVFP4_BLOCK, tiled_shape
from vivace.machinery.quantization.packed_int4 import GROUPS
from vivace.machinery.quantization.rotated_int8 import BLOCKS, block_of

if TYPE_CHECKING:
    import torch

_OWN = "vivace.machinery.quantization."
_TORCHAO = "torchao.quantization."
_WORKFLOWS = _TORCHAO + "quantize_.workflows"
_TENSORS = {
    "Int8Tensor": _TORCHAO[:-1],
    "Int8WeightTensor": _OWN + "torchao_tensors",
    "Int8DynamicTensor": _OWN + "torchao_tensors",
    "Float8Tensor": _WORKFLOWS,
    "Fp8RowTensor": _OWN + "torchao_tensors",
    "PrototypeFloat8Tensor": "torchao.prototype.quantization.float8_static_quant.prototype_float8_tensor",
    "IntxUnpackedToInt8Tensor": _TORCHAO[:-1],
    "NF4Tensor": _TORCHAO[:-1],
    "PackedInt4Tensor": _OWN + "packed_int4",
    "NvFp4Tensor": _OWN + "block_tensors",
    "MxFp8Tensor": _OWN + "block_tensors",
    "RotatedInt8Tensor": _OWN + "rotated_int8",
}
"""Classes of quantised weights, by name, and the modules that have them."""
_ATTRIBUTES = {
    "QuantizeTensorToInt8Kwargs": _WORKFLOWS,
    "QuantizeTensorToFloat8Kwargs": _WORKFLOWS,
    "PerRow": _TORCHAO[:-1],
    "PerTensor": _TORCHAO[:-1],
    "Float8MMConfig": "torchao.float8.inference",
    "KernelPreference": _TORCHAO + "quantize_.common",
    "MappingType": _TORCHAO + "quant_primitives",
    "SubclassTensorArgs": _WORKFLOWS + ".nf4.nf4_tensor",
}
"""Classes of their attributes: dataclasses, named tuples and enums."""
_TYPES = {
    "block_size": ("list", "tuple", "int"),
    "dtype": ("dtype",),
    "target_dtype": ("dtype",),
    "mm_config": ("Float8MMConfig", "NoneType"),
    "act_quant_kwargs": ("QuantizeTensorToInt8Kwargs", "QuantizeTensorToFloat8Kwargs", "NoneType"),
    "output_act_quant_kwargs": ("QuantizeTensorToFloat8Kwargs", "NoneType"),
    "kernel_preference": ("KernelPreference",),
    "activation_quantization": ("NoneType",),
    "reduce_range": ("bool",),
    "n_blocks": ("int",),
    "scaler_block_size": ("int",),
    "tensor_meta": ("SubclassTensorArgs",),
}
"""Types of attributes, by their name, as the schemes of `quantize` set them."""
_KIND, _FIELDS = "class", "fields"


@dataclass(frozen=True)
class StoredTensor:
    """A quantised tensor's description: its class, its attributes in JSON, and the names of its plain tensors."""

    kind: str
    attributes: Any
    names: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {_KIND: self.kind, "attributes": self.attributes, "tensors": list(self.names)}

    @classmethod
    def of_json(cls, content: Any) -> StoredTensor:
        """Read a description; ValueError where it is none, or names a class that saved models do not have."""
        if not isinstance(content, dict) or set(content) != {_KIND, "attributes", "tensors"}:
            raise ValueError("its description is not a class, attributes and tensors")
        kind, names = content[_KIND], content["tensors"]
        if not isinstance(kind, str) or kind not in _TENSORS:
            raise ValueError(f"it is a {str(kind)[:60]!r}; saved models have {', '.join(_TENSORS)}")
        if not isinstance(names, list) or not all(isinstance(n, str) and n.isidentifier() for n in names):
            raise ValueError("its description names no tensors")
        return cls(kind, content["attributes"], tuple(names))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's own, without others inside."""
    return not hasattr(tensor, "__tensor_flatten__")


def flatten(tensor: Any, name: str) -> tuple[StoredTensor, dict[str, torch.Tensor]]:
    """Return a quantised tensor's description and plain tensors; Unsupported where no file format is set up."""
    names, attributes = tensor.__tensor_flatten__()
    kind = type(tensor).__name__
    try:
        if kind not in _TENSORS:
            raise ValueError(f"it is a {kind}")
        described = StoredTensor(kind, _encoded(attributes), tuple(names))
    except ValueError as error:
        raise Unsupported(f"{name} cannot be saved: {error}; no file format is set up for that") from None
    return described, {inner: getattr(tensor, inner).detach() for inner in names}


def unflatten(
    stored: StoredTensor, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a description's tensor for a weight's shape; ValueError where the class has other tensors or
    attributes."""
    import torch

    attributes = _decoded(stored.attributes, next(iter(tensors.values())).device)
    if not isinstance(attributes, dict):
        raise ValueError("its attributes are not an object")
    _check(stored.kind, attributes, tensors, shape)
    made = _class(_TENSORS[stored.kind], stored.kind)
    strides = torch.empty(shape, device="meta").stride()
    tensor: torch.Tensor = made.__tensor_unflatten__(dict(tensors), attributes, torch.Size(shape), strides)
    if tuple(tensor.shape) != shape or set(stored.names) != set(made.__tensor_flatten__(tensor)[0]):
        raise ValueError(f"it is {tuple(tensor.shape)}, not {shape}")
    return tensor


def check_shapes(stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless plain tensors of these shapes are those of such a weight; see `unflatten`."""
    import torch

    attributes = _decoded(stored.attributes, torch.device("meta"))
    if not isinstance(attributes, dict):
        raise ValueError("its attributes are not an object")
    _check_shapes(stored.kind, attributes, shapes, shape)


def _check(
    kind: str, attributes: dict[str, Any], tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> None:
    import torch

    meta = attributes.get("tensor_meta")
    dtype = attributes["dtype"] if "dtype" in attributes else getattr(meta, "dtype", None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"it is dequantised to {dtype}, not to fp32, fp16 or bf16")
    _check_shapes(kind, attributes, {n: tuple(t.shape) for n, t in tensors.items()}, shape)
    in_fp8 = "Float8" in kind or kind in ("Fp8RowTensor", "MxFp8Tensor")
    dtypes = dict.fromkeys(("packed", "quantized_data", "exponents"), torch.uint8)
    dtypes |= dict.fromkeys(("zero_point", "quantized_scalers"), torch.int8)
    dtypes["qdata"] = torch.float8_e4m3fn if in_fp8 else torch.int8
    if kind == "NvFp4Tensor":
        dtypes["scale"] = torch.float8_e4m3fn
    for name, tensor in tensors.items():
        if tensor.dtype != dtypes.get(name) and (name in dtypes or not tensor.is_floating_point()):
            raise ValueError(f"its {name} is {str(tensor.dtype).removeprefix('torch.')}")


def _check_shapes(
    kind: str, attributes: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    for name, value in attributes.items():
        if type(value).__name__ not in _TYPES.get(name, ()):
            raise ValueError(f"its attribute {name[:60]!r} is {type(value).__name__}")
    try:
        expected = _expected_shapes(kind, attributes, shapes, shape)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise ValueError(f"it lacks tensors or attributes of a {kind}") from None
    for name, allowed in expected.items():
        if name in shapes and shapes[name] != allowed:
            raise ValueError(f"its {name} has the shape {list(shapes[name])}, not {list(allowed)}")
    for name in shapes.keys() - expected.keys():
        if math.prod(shapes[name]) != 1:
            raise ValueError(f"its {name} has the shape {list(shapes[name])}, not one element")


def _expected_shapes(
    kind: str, attributes: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of plain tensors by name; those that are not named have one element."""
    if kind == "PackedInt4Tensor":
        rows, columns = shape
        groups = shapes["scale"][-1]
        scales = (
            rows,
            groups if groups * (columns // groups) == columns and columns // groups in GROUPS else -1,
        )
        return {"packed": (rows, columns // 2), "scale": scales, "zero": scales}
    if kind == "RotatedInt8Tensor":
        shapes["qdata"], shapes["scale"]  # both must be there
        if not block_of(shape[1]):
            raise ValueError(f"its {shape[1]} columns are no multiple of {BLOCKS[-1]}")
        return {"qdata": shape, "scale": (shape[0], 1)}
    if kind in ("NvFp4Tensor", "MxFp8Tensor"):
        return _of_blocks(kind, shapes, shape)
    if kind == "NF4Tensor":
        meta, number = attributes["tensor_meta"], math.prod(shape)
        blocks = number // attributes["block_size"]
        if tuple(meta.original_shape) != shape or attributes["n_blocks"] != blocks:
            raise ValueError(f"it is a weight of {list(meta.original_shape)}, not {list(shape)}")
        scalers = (blocks // attributes["scaler_block_size"],)
        return {"quantized_data": (number // 2,), "quantized_scalers": (blocks,)} | {
            "quantization_factor": scalers,
            "nf4": (16,),
            "scaler_mean": (),
        }
    blocks_of = [int(size) for size in attributes["block_size"]]
    if len(blocks_of) != len(shape) or any(b < 1 or s % b for s, b in zip(shape, blocks_of, strict=True)):
        raise ValueError(f"its block_size {blocks_of} does not divide {list(shape)}")
    per_block = tuple(s // b for s, b in zip(shape, blocks_of, strict=True))
    shapes["qdata"], shapes["scale"]  # both must be there
    return {"qdata": shape, "scale": per_block, "zero_point": per_block}


def _of_blocks(
    kind: str, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    rows, columns = shape
    rank = shapes["down"][0] if "up" in shapes or "down" in shapes else 0
    low_rank = {"up": (rows, rank), "down": (rank, columns)}
    if kind == "NvFp4Tensor":
        shapes["packed"], shapes["scale"], shapes["tensor_scale"]  # all must be there
        scales = tiled_shape(rows, columns // NVFP4_BLOCK)
        return {"packed": (rows, columns // 2), "scale": scales, "tensor_scale": ()} | low_rank
    shapes["qdata"], shapes["exponents"]
    return {"qdata": shape, "exponents": tiled_shape(rows, columns // MXFP8_BLOCK)} | low_rank


def _encoded(value: Any) -> Any:
    import torch

    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"it has the attribute {value}")
        return value
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", _FIELDS: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_KIND: "device", _FIELDS: None}  # wherever it is read to
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_KIND: "dict", _FIELDS: {key: _encoded(item) for key, item in value.items()}}
    kind = type(value).__name__
    if isinstance(value, tuple) and kind in ("tuple", "Size"):
        return {_KIND: "tuple", _FIELDS: [_encoded(item) for item in value]}
    if kind in _ATTRIBUTES and type(value) is _class(_ATTRIBUTES[kind], kind):
        return {_KIND: kind, _FIELDS: _fields_of(value)}
    raise ValueError(f"it has an attribute of {kind}")


def _fields_of(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {name: _encoded(item) for name, item in value._asdict().items()}


def _decoded(value: Any, device: torch.device) -> Any:
    import torch

    if isinstance(value, list):
        return [_decoded(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {_KIND, _FIELDS}:
        raise ValueError("an attribute is not a class with fields")
    kind, fields = value[_KIND], value[_FIELDS]
    if kind == "device":
        return device
    if kind == "dtype":
        dtype = getattr(torch, str(fields), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{str(fields)[:40]!r} is not a dtype")
        return dtype
    if kind == "tuple" and isinstance(fields, list):
        return tuple(_decoded(item, device) for item in fields)
    if kind not in (*_ATTRIBUTES, "dict"):
        raise ValueError(f"it has an attribute of the class {str(kind)[:60]!r}")
    if kind == "dict":
        return {str(key): _decoded(item, device) for key, item in dict(fields).items()}
    made = _class(_ATTRIBUTES[kind], kind)
    try:
        if issubclass(made, enum.Enum):
            return made[str(fields)]
        return made(**{str(key): _decoded(item, device) for key, item in dict(fields).items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"this version has another {kind} ({error})") from None


def _class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise ValueError(f"the installed torchao has no {name}") from None
