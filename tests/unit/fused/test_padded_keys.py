"""Whether cuDNN leaves out keys that pad others is tried before anything rests on it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.kernels import reference

CPU = torch.device("cpu")


class NotSupported(Exception):
    """Stands in for cudnn-frontend's."""


def attend(lengths: list[int]) -> Any:
    """Return attention that leaves out the keys behind those of its call, or behind the first of `lengths`."""

    def compute(q: Any, k: Any, v: Any, of_qk: Any, of_v: Any, out: Any, num_keys: Any) -> None:
        length = lengths[0] if lengths else int(num_keys)
        wide = (q.float() * of_qk[0], k[:, :length].float() * of_qk[1], v[:, :length].float() * of_v[0])
        made = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in wide))
        out.copy_(reference.to_e4m3(made.transpose(1, 2) * of_v[1]))

    return compute


def refuse(error: Exception) -> Any:
    def compute(*_: Any) -> None:
        raise error

    return compute


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (attend([]), True),
        (attend([256]), False),  # no key is left out
        (attend([200]), False),  # the number is that of the call that made the plan
        (refuse(NotSupported("no engine")), False),
        (refuse(RuntimeError("cuDNN")), False),
    ],
)
def test_it_is_tried(computed: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(cudnnGraphNotSupportedError=NotSupported))
    monkeypatch.setattr(cudnn_fp8, "attend", computed)
    assert cudnn_fp8._left_out_keys(CPU) is expected


def test_a_cpu_has_no_cudnn() -> None:
    assert not cudnn_fp8.leaves_out_keys(CPU)
    assert not cudnn_fp8.leaves_out_keys(torch.device("meta"))
