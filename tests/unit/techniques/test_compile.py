"""torch.compile: repeated blocks, any size, and code that a second process finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import flow_models
from tests.families import FAMILIES, build, draw, drawn, psnr, session
from tests.targets import target_of
from vivace.errors import Unsupported
from vivace.machinery.compilation.compiled_code import code_folder
from vivace.machinery.technique import Machine
from vivace.techniques.compile import Compile

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")

BLOCKS = {"sd": (7, 3), "sdxl": (12, 1), "flux": (7, 3)}  # blocks, and graphs that serve them all


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("flux")
def test_repeated_blocks_share_their_graphs(family: str) -> None:
    made = session(family, "compile(backend=eager, blocks=repeated)")
    assert np.array_equal(draw(made), drawn(family))
    num = made.effects["compile@denoiser"]["denoiser.compiled_blocks"]
    assert (num, made.evidence()["compiled_graphs"]) == BLOCKS[family]


@pytest.mark.parametrize("model", ["sana-1600m", "sd35-medium"])
@pytest.mark.long
def test_blocks_that_vivace_knows_where_diffusers_names_none(model: str) -> None:
    made = flow_models.session(model, "compile(backend=eager, blocks=repeated)")
    blocks = list(made.pipe.transformer.transformer_blocks)
    with made:
        picture = flow_models.draw(made)
    assert psnr(picture, flow_models.reference(model)) > 60
    assert made.effects["compile@denoiser"]["denoiser.compiled_blocks"] == len(blocks)
    assert 1 <= made.evidence()["compiled_graphs"] <= 3
    script = Compile(blocks="repeated").script(target_of(pipe=flow_models.pipeline(model)))
    assert script is not None
    assert script.lines == ("for block in pipe.transformer.transformer_blocks:", "    block.compile()")


def test_unnamed_blocks_are_refused_with_a_reason() -> None:
    for target, class_name in (("vae", "AutoencoderKL"), ("text_encoder", "CLIPTextModel")):
        with pytest.raises(Unsupported, match=rf"the {target} \({class_name}\) names no repeated blocks"):
            vivace.apply(build("sd"), f"compile(backend=eager, blocks=repeated)@{target}")
    made = Compile(mode="reduce-overhead", blocks="repeated")
    on_gpu = Machine("cuda", "a GPU", (9, 0), None)
    assert "a CUDA graph for every single block" in (made.unsupported(target_of(machine=on_gpu)) or "")
    assert Compile(blocks="repeated").unsupported(target_of(machine=on_gpu)) is None
    old = Machine("cuda", "an old GPU", (7, 0), None)
    assert "needs compute capability 7.5" in (Compile().unsupported(target_of(machine=old)) or "")


def test_where_the_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert code_folder() == tmp_path / "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("VIVACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert code_folder() == Path.home() / ".cache" / "vivace" / "inductor"


def test_the_search_of_max_autotune_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a setting of PyTorch's mode: the others that the mode sets stay."""
    options_of_calls: list[dict[str, Any]] = []
    target = target_of(pipe=build("sd"))
    monkeypatch.setattr(
        torch, "compile", lambda forward, **options: options_of_calls.append(options) or forward
    )
    Compile(mode="max-autotune").apply(target)
    Compile(mode="max-autotune", coordinate_descent=False).apply(target)
    with_search, without = options_of_calls[0], options_of_calls[-1]
    assert not {"mode"} & (with_search.keys() | without.keys()), "PyTorch takes a mode or options, not both"
    theirs = torch._inductor.list_mode_options("max-autotune")
    assert with_search["options"] == theirs
    assert without["options"] == {**theirs, "coordinate_descent_tuning": False}
    assert without["options"]["max_autotune"] is True

    made = Compile(mode="max-autotune-no-cudagraphs", coordinate_descent=False)
    script = made.script(target_of(pipe=build("sd")))
    assert script is not None
    assert '"coordinate_descent_tuning": False' in "".join(script.lines)
    assert "compile_threads" not in "".join(script.lines)
    gpu = Machine("cuda", "a GPU", (9, 0), None, has_all_packages=True)
    script = made.script(target_of(pipe=build("sd"), machine=gpu))
    assert script is not None
    assert '"compile_threads": 1' in "".join(script.lines), "or candidates are compiled one after the other"
    wrong = Compile(coordinate_descent=False).unsupported(target_of(pipe=build("sd")))
    assert wrong is not None
    assert "mode default has no coordinate descent to leave out" in wrong
