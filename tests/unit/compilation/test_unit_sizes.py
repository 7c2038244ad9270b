"""Code for any size of a UNet: few graphs, simple shapes, the same values."""

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from vivace.techniques.compile import compiled_by_units, takes_a_sample


class Graphs(list[torch.fx.GraphModule]):
    """A backend that keeps what it is given."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.append(graph)
        return graph.forward

    def shapes(self) -> set[str]:
        values = [node.meta.get("example_value") for graph in self for node in graph.graph.nodes]
        return {str(tuple(value.shape)) for value in values if isinstance(value, torch.Tensor)}


@pytest.fixture
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=16,
        norm_num_groups=4,
    ).eval()


@pytest.mark.parametrize(
    ("any_size", "sizes", "graphs_by_then"),
    [
        # Half of 9 is no size of a level: it is interpolated, by other code, which serves all such sizes.
        (True, [(8, 12), (10, 4), (9, 12), (13, 7)], [1, 1, 2, 2]),
        (False, [(8, 12), (10, 4), (12, 16)], [1, 2, 2]),
    ],
)
@torch.no_grad()
@pytest.mark.long
def test_what_the_levels_halve_is_traced_without_divisions(
    unet: UNet2DConditionModel, any_size: bool, sizes: list[tuple[int, int]], graphs_by_then: list[int]
) -> None:
    assert takes_a_sample(unet)
    eager, graphs, counted = unet.forward, Graphs(), []
    compiled = compiled_by_units(unet, any_size=any_size, backend=graphs)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for height, width in sizes:
            sample = torch.randn(1, 4, height, width).to(memory_format=torch.channels_last)
            text = torch.randn(1, 5, 8)
            torch.testing.assert_close(compiled(sample, 3, text).sample, eager(sample, 3, text).sample)
            counted.append(len(graphs))
            if height % 2 == 0:
                assert not [shape for shape in graphs.shapes() if "//" in shape]
    assert counted == graphs_by_then
    whole = [node for node in graphs[0].graph.nodes if node.target == "flatten"][1]
    assert whole.meta["example_value"].is_contiguous(memory_format=torch.channels_last)
