"""Pictures and models shared by the tests of the tiny world; one thread, so that figures repeat."""

import os
import random
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tinyworld import captions, scenes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def true_scenes():
    """1,000 scenes of held-out combinations: pictures, their captions, and the whole truth about each."""
    labels = scenes.sample(1000, 91, "held_out")
    described = captions.describe(labels)
    rng = random.Random(91)
    texts = [captions.write(full, rng) for full in described]
    pictures = torch.cat(
        [scenes.to_uint8(scenes.draw(labels[i : i + 250])[0]) for i in range(0, len(labels), 250)]
    )
    return pictures.numpy(), texts, described
