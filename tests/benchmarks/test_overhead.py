"""The harness beside a plain script: each pair gives a ratio."""

import pytest

from benchmarks.overhead import line, ratios


def test_the_ratio_is_the_pairs_own() -> None:
    case = {
        "model": "synthetic:sdxl",
        "mode": "eager",
        "num_inference_steps": 50,
        "plain_s": [1.0, 2.0, 4.0],
        "vivace_s": [1.1, 2.0, 3.6],
    }
    assert ratios(case) == pytest.approx([1.1, 1.0, 0.9])
    assert line(case).startswith("sdxl eager, 50 steps: plain 2.00 s, vivace 2.00 s, ratio 1.0000 [0.84")
