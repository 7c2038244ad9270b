"""LoRAs that change, beside denoisers whose forwards are shared out: every process has the exchange."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vivace
from tests.families import build, draw, psnr, session
from tests.forked_peers import forked_peers
from tests.lora_files import write_lora
from vivace.errors import Unsupported, WorkerError

pytestmark = pytest.mark.usefixtures("short_calls")

SAME_DB = 34.0
"""A row alone and two at once are rounded differently."""


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("sd", "parallel(cfg)"),
        ("sd", "quantize(int8)+parallel(cfg)+compile(blocks=repeated, backend=eager)"),
        ("sd", "fused(bf16)+parallel(cfg)"),
        ("flux", "parallel(ulysses)"),
        ("flux", "fused(bf16)+parallel(all_gather)"),
    ],
)
@pytest.mark.long
@pytest.mark.exhaustive("sd-quantize*", "sd-fused*")
def test_an_exchange_reaches_every_process(family: str, recipe: str, tmp_path: Path) -> None:
    pipe = build(family)
    first, second = (
        write_lora(
            pipe, tmp_path / f"{rank}.safetensors", rank, rank, 0.1, takes=lambda name: "blocks" in name
        )
        for rank in (4, 8)
    )
    hot = f"lora({first!r}, hot=True, max_rank=8)"
    own = "+".join(part for part in recipe.split("+") if not part.startswith(("parallel", "compile")))
    alone = session(family, f"{own}+{hot}" if own else hot)
    with session(family, f"{recipe}+{hot}") as sharded:
        drawn = draw(sharded)
        expected = draw(alone)
        assert psnr(drawn, expected) > SAME_DB
        for file, scale in ((second, 1.0), (None, 0.0)):
            sharded.set_lora(file, scale=scale)
            alone.set_lora(file, scale=scale)
            before, expected = expected, draw(alone)
            assert psnr(draw(sharded), expected) > SAME_DB
            assert psnr(before, expected) < SAME_DB - 4
        sharded.set_lora(first, scale=1.0)
        assert np.array_equal(draw(sharded), drawn), "the same bits as before"
        assert sharded.refuted(sharded.evidence()) is None
    with pytest.raises(WorkerError, match="is closed; load the model anew"):
        sharded.set_lora(scale=0.5)


@pytest.mark.long
def test_a_session_that_is_shared_out_already_takes_none(tmp_path: Path) -> None:
    path = write_lora(build("sd"), tmp_path / "lora.safetensors", 4)
    with (
        session("sd", "parallel(cfg)") as sharded,
        pytest.raises(Unsupported, match="apply both by the same recipe, to a fresh pipeline"),
    ):
        vivace.apply(sharded.pipe, f"lora({path!r}, hot=True)")
