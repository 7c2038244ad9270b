"""Layers without values, which stand for those that other libraries quantise."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vivace.machinery.quantization.scheme import meta_layer


@pytest.mark.parametrize("dequantises", [True, False])
def test_a_layer_without_values_computes_as_much_as_the_quantised_one(dequantises: bool) -> None:
    layer = torch.nn.Linear(64, 32, device="meta", dtype=torch.float16)
    made = meta_layer(layer, ((32, 64), torch.int8), dequantises=dequantises)
    inputs = torch.empty(3, 5, 64, device="meta", dtype=torch.float16)
    with FlopCounterMode(display=False) as counted:
        assert made(inputs).shape == (3, 5, 32)
    assert counted.get_total_flops() == 2 * 3 * 5 * 64 * 32


def test_a_layer_without_values_has_the_sizes_that_pipelines_read() -> None:
    """StableDiffusionXLPipeline compares `add_embedding.linear_1.in_features` with what it is about to pass."""
    linear = meta_layer(torch.nn.Linear(64, 32, device="meta"), ((32, 64), torch.int8))
    assert (linear.in_features, linear.out_features) == (64, 32)
    convolution = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, device="meta")
    made = meta_layer(convolution, (tuple(convolution.weight.shape), torch.int8))
    assert (made.in_channels, made.out_channels, made.kernel_size) == (4, 8, (3, 3))
    assert made(torch.empty(1, 4, 10, 10, device="meta")).shape == (1, 8, 5, 5)
