"""A recipe compared with itself: what is counted, and that the command goes on."""

import json

from benchmarks import against_itself
from vivace.foundation.stats import Verdict


def test_the_committed_record_has_at_most_one_false_verdict() -> None:
    cases = json.loads(against_itself.RESULTS.read_text())
    busy = [case for case in cases if case["busy"]]
    assert len(busy) >= against_itself.NUMBER
    assert sum(case["verdict"] in (Verdict.FASTER, Verdict.SLOWER) for case in busy) <= 1
