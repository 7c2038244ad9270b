"""Whether B is as fast as A: latency of the images that are compared, and endpoints under load."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests import proved
from tests.images_server import serving
from tests.proved import PROMPTS, SHAPES, answer
from vivace.errors import UsageError
from vivace.proofs.checks.pair_figures import PairFigures, ReadImage
from vivace.proofs.sides.proof_store import KeptImage
from vivace.proofs.verdicts.fast import speed
from vivace.proofs.verdicts.same import ProofVerdict

SLOW, QUICK = "python:tests.drawn_shapes:draw_slowly", "python:tests.drawn_shapes:draw_quickly"
prove, proof_of = partial(proved.prove, seeds=2), partial(proved.proof_of, seeds=2)


def timed(a_s: float | None, b_s: float | None, prompt: str) -> PairFigures:
    return PairFigures(prompt, 0, *(ReadImage(KeptImage(None, seconds=s), (96, 96)) for s in (a_s, b_s)))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.5, 0.52, 0.49, 0.5, 0.51, 0.5), ProofVerdict.PROVEN),
        ((1.0, 1.01, 0.99, 1.02, 1.0, 1.01), ProofVerdict.PROVEN),
        ((1.2, 1.21, 1.19, 1.2, 1.22, 1.2), ProofVerdict.FAILED),
        ((0.8, 1.4, 1.0, 1.3, 0.9, 1.1), ProofVerdict.UNCLEAR),
        ((0.5, 0.5), ProofVerdict.UNCLEAR),
    ],
)
def test_not_slower_by_more_than_five_percent(ratios: tuple[float, ...], verdict: ProofVerdict) -> None:
    pairs = [timed(2.0, 2.0 * ratio, f"{k}") for k, ratio in enumerate(ratios)]
    result = speed([timed(None, 60.0, "a warm-up"), *pairs], "", [None, *([2.0] * len(ratios))])
    assert result.answer.verdict is verdict
    assert result.num_pairs == len(ratios)
    assert result.a_s == 2.0


def test_a_machine_that_gets_faster_or_slower_is_no_reason_for_an_answer() -> None:
    pairs = [timed(1.0, 0.75, f"{k}") for k in range(6)]
    throttled = [timed(1.0, 1.3, f"{k}") for k in range(6)]
    assert speed(pairs, "", [0.7] * 6).answer.verdict is ProofVerdict.UNCLEAR
    unclear = speed(throttled, "", [1.3] * 6).answer
    assert unclear.verdict is ProofVerdict.UNCLEAR
    assert "A's own time changed by ×1.30, so the machine is busy or throttles" in unclear.reason
    assert speed(throttled, "", [1.1] * 6).answer.verdict is ProofVerdict.FAILED
    alone = speed(pairs, "").answer
    assert alone.verdict is ProofVerdict.LEFT_OUT
    assert "--claim fast draws it again after B" in alone.reason


def test_the_slower_side_is_named_and_warm_ups_do_not_count(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    slower = proof_of(tmp_path, QUICK, SLOW, "--claim", "fast", "-o", str(page))
    assert slower["exit_code"] == 1
    assert "; B takes ×" in slower["headline"]
    assert slower["speed"]["log_ratio_to_a_again"]["mean"] > 0.5
    seconds = [pair["a"]["seconds"] for pair in slower["pairs"]]
    assert seconds[0] is None
    assert min(seconds[1:]) > 0.004
    assert slower["speed"]["pairs"] == 11
    assert "after it, median" in page.read_text()
    faster = prove(tmp_path, SLOW, QUICK, "--claim", "fast")
    assert faster.return_value == 0
    assert re.search(r"Fast\? +yes: B takes ×0\.", faster.stdout)


def test_a_folder_has_no_latency(tmp_path: Path) -> None:
    from tests.drawn_shapes import draw

    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        draw(PROMPTS[0], 0).save(tmp_path / side / "x.png")
    sides = str(tmp_path / "a"), str(tmp_path / "b")
    proof = proof_of(tmp_path, *sides, prompts=(), seeds=None)
    assert proof["answers"]["fast"]["verdict"] == "not checked"
    refused = prove(tmp_path, *sides, "--claim", "fast", prompts=(), seeds=None)
    assert "is a folder, of which nothing says how long" in str(refused.exception)


def test_endpoints_are_put_under_load_with_the_same_requests(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    more = ("--height", "96", "--width", "96", "--requests", "8", "-o", str(page))
    with serving() as server:
        result = prove(tmp_path, SHAPES, server.url, *more, "--format", "json")
        loads = answer(result)["speed"]["loads"]
        number = len(server.requests)
        bodies = [body for body in server.requests if 10 < body["seed"] < 2**31]
        text = " ".join(prove(tmp_path, SHAPES, server.url, *more, "--reuse").stdout.split())
        assert len(server.requests) < number + 20, "kept loads and images are not drawn again"
    assert [(load["side"], load["load"], load["done"]) for load in loads] == [
        ("B", "1 client", 8),
        ("B", "8 clients", 8),
        ("B", "0.8 of capacity", 8),
    ]
    assert len({load["slo_s"][0] for load in loads}) == 1
    assert "8 clients, 8 requests" in result.stderr
    assert len(bodies) == 2 + 24, "with two warm-ups"
    assert {(body["size"], body["model"]) for body in bodies} == {("96x96", "shapes")}
    assert {body["prompt"] for body in bodies} == set(PROMPTS)
    assert "B, 8 clients" in text
    assert "In time within" in text
    assert "goodput/s" in page.read_text()


def test_loads_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither A nor B is an images endpoint"):
        raise prove(tmp_path, SHAPES, SHAPES, "--requests", "8").exception
