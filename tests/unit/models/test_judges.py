"""Models that score images, as KIND:NAME."""

import json
from pathlib import Path

import pytest

from vivace.errors import UnknownModel, UsageError
from vivace.models import scorers as judges
from vivace.models.find import WEIGHTS
from vivace.models.scorers import PICKSCORE, find_judge


def test_an_embedded_scorer_needs_no_kind() -> None:
    for text in (
        "tiny-clip",
        "clip:tiny-clip",
        "CLIP:tiny-clip",
        "hpsv2:tiny-clip",
        str(WEIGHTS / "tiny-clip"),
    ):
        judge = find_judge(text)
        assert judge.kind == "clip"
        assert judge.scorer.folder == WEIGHTS / "tiny-clip"


def test_pickscore_has_a_usual_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def find(name: str, *, download: bool = True) -> None:
        names.append((name, download))

    monkeypatch.setattr(judges, "find_scorer", find)
    assert find_judge("pickscore", download=False).kind == "clip"
    assert find_judge("pickscore:org/other").kind == "clip"
    assert names == [(PICKSCORE, False), ("org/other", True)]


@pytest.mark.parametrize("text", ["{folder}", "blip:{folder}"])
def test_a_folder_is_what_its_configuration_says(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blip"}))
    with pytest.raises(UnknownModel, match="BLIP"):  # it was recognised, and lacks its weights
        find_judge(text.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clpi:tiny-clip", r"no such kind 'clpi'.*clip.*give clip:NAME"),
        ("clip:", "nothing after 'clip:'"),
        ("imagereward", "published as a pickle"),
        ("ImageReward:org/model", "published as a pickle"),
        ("hpsv3:org/model", "HPSv3"),
        ("hpsv2", "nothing after 'hpsv2:'"),
    ],
)
def test_a_wrong_name_is_explained(text: str, message: str) -> None:
    with pytest.raises((UsageError, UnknownModel), match=message):
        find_judge(text)
