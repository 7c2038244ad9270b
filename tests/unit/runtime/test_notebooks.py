"""In a notebook: what takes minutes shows its progress, and every result is HTML."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vivace
from tests.make import make_record, make_round
from vivace.answers.page import in_notebook
from vivace.benchmark.pairs import Paired

PLACES = {
    "bench": ("vivace.benchmark.studies", "progress"),
    "compare": ("vivace.benchmark.pairs", "on_pair"),
    "prove": ("vivace.proofs.prover", "progress"),
    "study": ("vivace.evidence.studies.runs", "progress"),
    "tune": ("vivace.tuning.tuner", "watcher"),
}


@pytest.mark.parametrize("name", PLACES)
def test_progress_is_shown_where_somebody_watches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, argument = PLACES[name]
    seen: list[dict[str, Any]] = []

    def function(**kwargs: Any) -> None:
        seen.append(kwargs)

    function.__name__ = name
    monkeypatch.setattr(f"{module}.{name}", function)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False, write=len, flush=lambda: None))
    getattr(vivace, name)()
    for shell in (None, object()):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        getattr(vivace, name)()
    own = object()
    getattr(vivace, name)(**{argument: own})
    assert [argument in kwargs for kwargs in seen] == [False, False, True, True]
    assert seen[2][argument] is not None
    assert seen[3][argument] is own
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None))
    getattr(vivace, name)(**{argument: None})
    assert seen[4][argument] is not None, "a terminal"


def test_every_result_is_html() -> None:
    results = ("Paired", "Profiled", "Proof", "Recommendation", "Run", "StudyRun", "Tuned")
    public = {name for name in vivace.__all__ if inspect.isclass(getattr(vivace, name))}
    assert set(results) <= public
    for name in results:
        assert "_repr_html_" in vars(getattr(vivace, name)), name


def test_a_page_is_framed_and_a_text_escaped() -> None:
    answer = vivace.recommend("flux-dev", gpu="A100", store=())
    html = answer._repr_html_()
    assert html.startswith("<pre>")
    assert answer.recipe is not None
    assert answer.recipe in html
    assert in_notebook('a < "b"') == "<pre>a &lt; &#34;b&#34;</pre>"
    records = [make_record(recipe, *map(make_round, range(3))) for recipe in ("baseline", "bf16")]
    page = Paired(None, tuple(records), None)._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "bf16" in page
    assert "<!doctype" not in page.lower(), "escaped"


def test_a_run_whose_store_is_gone_still_shows_its_tables(tmp_path: Path) -> None:
    from vivace.benchmark.run import Run
    from vivace.foundation.spec.study import Study

    run = Run(Study.of("tiny-sd", ["baseline"]), tmp_path / "gone", ())
    assert run._repr_html_().startswith("<pre>")
