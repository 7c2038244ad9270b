"""Quantised weights as plain tensors and JSON: what comes back computes the same, and nothing else comes back."""

import json
from typing import Any

import pytest
import torch

from tests.targets import CPU
from vivace.errors import Unsupported
from vivace.machinery.quantization import SCHEMES
from vivace.machinery.quantization.packed_int4 import pack
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.machinery.quantization.stored_tensors import StoredTensor, check_shapes, flatten, unflatten

FP32 = {"dtype": {"class": "dtype", "fields": "float32"}}
LAYERS = (
    "int8",
    "int8_dynamic",
    "int8_dynamic rotated",
    "fp8_weight",
    "fp8",
    "fp8_static",
    "nf4",
    "int4",
    "packed int4",
    "int8 convolution",
    "nvfp4",
    "mxfp8",
    "nvfp4 low rank",
)


def quantised(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = torch.nn.Conv2d(16, 32, 3) if "convolution" in kind else torch.nn.Linear(256, 512)
    layer: torch.nn.Module = made.to(dtype).requires_grad_(False)
    if kind == "packed int4":
        layer.weight = torch.nn.Parameter(pack(layer.weight), requires_grad=False)
        return layer
    scale = torch.ones(1, 1) if kind == "fp8_static" else None
    settings |= {"rank": 16} if "low rank" in kind else {}
    settings |= {"rotation": "hadamard"} if "rotated" in kind else {}
    scheme = SCHEMES["torchao", kind.partition(" ")[0]]
    return scheme.convert(layer, SchemeSettings(CPU, input_scale=scale, **settings))


def stored(layer: Any) -> tuple[StoredTensor, dict[str, torch.Tensor], tuple[int, ...]]:
    described, tensors = flatten(layer.weight, "weight")
    again = StoredTensor.of_json(json.loads(json.dumps(described.as_json())))
    return again, {name: tensor.clone() for name, tensor in tensors.items()}, tuple(layer.weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_what_comes_back_computes_the_same(kind: str, dtype: torch.dtype) -> None:
    layer = quantised(kind, dtype)
    x = (
        torch.linspace(-1, 1, 16 * 256)
        .to(dtype)
        .reshape((1, 16, 16, 16) if "convolution" in kind else (16, 256))
    )
    expected, before = layer(x), layer.weight
    described, tensors, shape = stored(layer)
    check_shapes(described, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shape)
    layer.weight = torch.nn.Parameter(unflatten(described, tensors, shape), requires_grad=False)
    assert type(layer.weight) is type(before)
    assert layer.weight.__tensor_flatten__() == before.__tensor_flatten__()
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_each_tensor_has_its_shape(kind: str) -> None:
    described, tensors, shape = stored(quantised(kind))
    for name in tensors:
        shapes = {other: tuple(tensor.shape) for other, tensor in tensors.items()}
        with pytest.raises(ValueError, match=f"its {name} has the shape"):
            check_shapes(described, shapes | {name: (*shapes[name], 2)}, shape)
    with pytest.raises(ValueError, match=r"shape|block_size|weight of|lacks"):
        check_shapes(described, shapes, (shape[0] * 2, *shape[1:]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"class": "Tensor"}, "it is a 'Tensor'; saved models have Int8Tensor"),
        ({"class": ["Int8Tensor"]}, "saved models have"),
        ({"tensors": "qdata"}, "names no tensors"),
        ({"more": 1}, "not a class, attributes and tensors"),
    ],
)
def test_a_description_of_something_else(change: dict[str, Any], problem: str) -> None:
    described, _, _ = stored(quantised("int8"))
    with pytest.raises(ValueError, match=problem):
        StoredTensor.of_json(described.as_json() | change)


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"class": "Popen", "fields": {"args": "ls"}}, "attribute of the class 'Popen'"),
        ({"class": "KernelPreference", "fields": "none"}, "this version has another KernelPreference"),
        ({"class": "PerRow", "fields": {"columns": 1}}, "this version has another PerRow"),
        ({"class": "dtype", "fields": "float7"}, "'float7' is not a dtype"),
        ({"path": "x"}, "not a class with fields"),
        ({"class": "dict", "fields": FP32 | {"reduce_range": "yes"}}, "its attribute 'reduce_range' is str"),
        ({"class": "dict", "fields": FP32 | {"hook": None}}, "its attribute 'hook' is NoneType"),
        ({"class": "dict", "fields": {}}, "it is dequantised to None"),
        ([], "not an object"),
    ],
)
def test_attributes_of_something_else(attributes: Any, problem: str) -> None:
    described, tensors, shape = stored(quantised("int8"))
    with pytest.raises(ValueError, match=problem):
        unflatten(StoredTensor(described.kind, attributes, described.names), tensors, shape)


def test_a_class_that_no_file_is_set_up_for() -> None:
    class Other(torch.nn.Parameter):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

    with pytest.raises(Unsupported, match=r"proj\.weight cannot be saved: it is a Other"):
        flatten(Other(torch.zeros(1)), "proj.weight")
