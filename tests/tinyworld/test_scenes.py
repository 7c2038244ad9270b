import torch

from tinyworld import scenes
from tinyworld.words import COLOURS, POSITIONS, RELATIONS, SHAPES, SIDE


def test_same_seed_same_bytes():
    first, again = (scenes.to_uint8(scenes.draw(scenes.sample(32, 5))[0]) for _ in range(2))
    other = scenes.to_uint8(scenes.draw(scenes.sample(32, 6))[0])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_never_sees_a_held_out_combination():
    labels = scenes.sample(50_000, 0)
    assert not scenes.held_out(labels).any()
    assert scenes.held_out(scenes.sample(500, 0, "held_out")).all()
    # Yet every single word, and every pair of colour and shape, is trained.
    things = {(c, s) for c, s in zip(labels.colour[:, 0].tolist(), labels.shape[:, 0].tolist(), strict=True)}
    assert len(things) == len(COLOURS) * len(SHAPES)
    assert set(labels.layout[labels.count == 1].tolist()) == set(range(len(POSITIONS)))
    assert set(labels.layout[labels.count == 2].tolist()) == set(range(len(RELATIONS)))


def test_objects_lie_inside_and_apart():
    labels = scenes.sample(20_000, 7)
    extent = (torch.tensor(scenes.EXTENTS)[labels.shape] * labels.radius)[..., None]
    low, high = labels.centre - extent, labels.centre + extent
    two = labels.count == 2
    drawn = torch.stack([torch.ones_like(two), two], dim=1)
    assert low[drawn].min() >= scenes.MARGIN - 1e-3
    assert high[drawn].max() <= SIDE - scenes.MARGIN + 1e-3
    gap = torch.maximum(low[:, 0] - high[:, 1], low[:, 1] - high[:, 0]).amax(1)
    assert gap[two].min() >= scenes.GAP - 1e-3
