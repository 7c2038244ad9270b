"""Outputs that are made from memory are those that the operator makes."""

from typing import Any

import pytest
import torch

from vivace.runtime.memory.footprint import MetaOutputs

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes())


IMAGE = meta(2, 8, 6, 6)
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.add.Tensor, (IMAGE, meta(8, 1, 1)), {}),
    (aten.add.Tensor, (IMAGE, meta(8, 1, 1, dtype=torch.float32)), {"alpha": 2}),
    (aten.mul.Tensor, (IMAGE.contiguous(memory_format=torch.channels_last), IMAGE), {}),
    (aten.div.Tensor, (meta(3, dtype=torch.int64), 2), {}),
    (aten.add.Tensor, (meta(3, dtype=torch.int64), 2), {}),
    (aten.add.Tensor, (meta(3, dtype=torch.int64), 2.0), {}),
    (aten.cat.default, ([IMAGE, IMAGE], 1), {}),
    (aten._to_copy.default, (IMAGE,), {"dtype": torch.float32}),
    (aten._to_copy.default, (IMAGE,), {"dtype": torch.bfloat16}),
    (aten.clone.default, (IMAGE.transpose(1, 3),), {"memory_format": torch.contiguous_format}),
    (aten.native_group_norm.default, (IMAGE, meta(8), meta(8), 2, 8, 36, 4, 1e-5), {}),
    (aten.native_layer_norm.default, (meta(2, 5, 8), [8], None, None, 1e-5), {}),
    (aten.addmm.default, (meta(4), meta(3, 5), meta(5, 4)), {}),
    (aten.convolution.default, (IMAGE, meta(4, 8, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), {}),
    (aten._softmax.default, (IMAGE, -1, False), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CASES, ids=lambda value: str(value)[:40])
def test_a_known_call_has_the_layout_of_the_first(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    outputs = MetaOutputs()
    for other, other_args, other_kwargs in CASES:
        outputs.call(other, other_args, other_kwargs)
    real, made = func(*args, **kwargs), outputs.call(func, args, kwargs)
    reals, mades = ((real,), (made,)) if isinstance(real, torch.Tensor) else (real, made)
    assert [layout(m) for m in mades] == [layout(r) for r in reals]
    assert len({m.untyped_storage()._cdata for m in mades}) == len(mades), "each has its own storage"


@pytest.mark.parametrize(
    ("func", "args"),
    [(aten.view.default, ([4, 9],)), (aten._unsafe_view.default, ([4, 9],)), (aten.add_.Tensor, (1,))],
)
def test_what_shares_its_inputs_storage_goes_on_doing_so(func: Any, args: tuple[Any, ...]) -> None:
    outputs = MetaOutputs()
    for _ in range(2):
        tensor = meta(6, 6)
        made = outputs.call(func, (tensor, *args), {})
        assert made.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_tensors_of_no_dimension_are_not_remembered() -> None:
    """A number that was wrapped in a tensor does not promote, and a tensor of the same layout does."""
    outputs = MetaOutputs()
    number = torch.tensor(2.0, dtype=torch.float64, device="meta")
    for other in (number, meta(1, dtype=torch.float64)):
        real = aten.add.Tensor(meta(3), other)
        assert outputs.call(aten.add.Tensor, (meta(3), other), {}).dtype == real.dtype
