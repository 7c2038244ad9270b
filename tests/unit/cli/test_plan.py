"""vivace plan, in this process."""

import json
import re

import pytest

from tests.typed import typed
from vivace.techniques import offload


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return typed(monkeypatch, "plan", *arguments)


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "tiny-sd", "--recipe", "tiny_vae", "--card", "8") == 0
    shown = capsys.readouterr().out
    assert "predicted, nothing was loaded" in shown
    assert "UNet2DConditionModel" in shown
    assert "AutoencoderTiny" in shown
    assert "cards of 8, 12, 16, 24, 40, 48, 80, 141 GB (with 1.00 GB kept free" in shown
    assert "It fits 8 GB." in shown
    assert "others" not in shown


def test_what_sharing_gpus_hold_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "tiny-sd", "--recipe", "parallel(guidance)") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("others")]
    assert "at most on the other GPU: the denoiser and its forward" in line


def test_json_has_components_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "tiny-sd", "--card", "1.05", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    unet = next(c for c in found["components"] if c["name"] == "unet")
    assert unet["num_parameters"] == pytest.approx(4.8e6, rel=0.01)
    assert unet["num_bytes"] == pytest.approx(2 * 4.8e6, rel=0.05)
    assert found["model_bytes"] < found["stages"]["denoiser"] < found["peak_bytes"]
    assert found["peak_bytes"] == found["stages"][found["peak_stage"]]
    assert (found["fits"]["8"], found["fits_card"], found["card_bytes"]) == (True, False, 1_050_000_000)
    assert found["changes"][-1]["fits_card"]
    assert found["changes"][-1]["peak_bytes"] < found["peak_bytes"]


def test_room_that_is_left_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload, "_STEP", 1e6)
    assert run(monkeypatch, "tiny-sd", "--recipe", "offload(group)", "--card", "8") == 0
    *_, fits, also = capsys.readouterr().out.splitlines()
    assert fits == "It fits 8 GB."
    assert re.fullmatch(
        r"So does --recipe 'offload\(group, keep=0.009\)' \(peak [\d.]+ MB\), which spares copies\.", also
    ), also
    assert run(monkeypatch, "tiny-sd", "--recipe", "offload(model)", "--card", "8") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "It fits 8 GB."


def test_what_is_so_already_is_planned_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "tiny-sd", "--recipe", "fp16") == 0
    shown = capsys.readouterr()
    assert "every targeted component is fp16 already; so this is the baseline's memory" in shown.err
    assert "tiny-sd, baseline, 128x128" in shown.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("flux-dve",), 2, "no model 'flux-dve'; did you mean 'flux-dev'"),
        (("tiny-sd", "--recipe", "tiny_vea"), 2, "did you mean 'tiny_vae'"),
        (("tiny-sd", "--height", "100"), 2, "--height 100: tiny-sd takes multiples of"),
        (("tiny-sd", "--batch", "0"), 2, "--batch"),
        (("tiny-sd", "--card", "-1"), 2, "--card"),
        (("tiny-sd", "--recipe", "first_block_cache"), 3, "no chain of transformer blocks"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == code
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown
