"""The tables of searches on docs/tuning.md, made of a real search of an embedded model.

`tune-tiny-sd.json` is the answer of `vivace tune tiny-sd --trials 1 --start "dtype(bf16)+cfg_cutoff(0.6)"
--num-inference-steps 6 --format json`, with what the page shows.
"""

import json
from pathlib import Path
from typing import Any

from docgen import tuned

RECORD = Path(__file__).with_name("tune-tiny-sd.json")
PAGE = f"before\n{tuned.START}\nold\n{tuned.END}\nafter\n"


def recorded_search() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(RECORD.read_text())
    return answer


def test_a_search_becomes_a_table() -> None:
    page = tuned.filled(PAGE, [RECORD])
    answer = recorded_search()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert f"**tiny-sd** on {answer['device']}, goal latency: 1 recipe measured in" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(answer["final"])
    assert rows[2].startswith(f"| baseline | {answer['final'][0]['latency']['median_s']:.3f} | - |")
    low, high = answer["final"][1]["speedup"]["ci95"]
    assert rows[3].startswith("| `dtype(bf16)+cfg_cutoff(0.6)` |")
    assert f"[{low:.2f}, {high:.2f}]" in rows[3]
    assert len({row.count("|") for row in rows}) == 1
    assert tuned.filled(page, [RECORD]) == page


def test_without_a_record_the_page_says_so() -> None:
    assert "No search is recorded yet." in tuned.filled(PAGE, [])
