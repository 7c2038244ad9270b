"""A worker on a simulated slow host: quick until the final of a search, whose rounds take as long as it is told.

VIVACE_FINAL_ROUND_S is the seconds of each round of the final. A call of the baseline is reported as 0.2 ms, of other
recipes as half of it.
"""

import os
import sys
import time
from datetime import UTC, datetime

from tests.make import make_environment, make_round
from tests.stub_worker import say
from vivace.benchmark.rounds.worker_requests import (
    EnvironmentRequest,
    RoundRequest,
    SupportRequest,
    parse_request,
)

COMMAND = (sys.executable, "-m", "tests.slow_worker")


def main() -> None:
    say({"event": "ready", "forks": True})
    for line in sys.stdin:
        request = parse_request(line)
        say({"event": "started", "pid": os.getpid()})
        value: object = {}
        match request:
            case EnvironmentRequest():
                value = make_environment().model_dump(mode="json")
            case SupportRequest():
                value = {"reasons": {}, "components": None, "by_model": [], "idle": {}}
            case RoundRequest():
                started = datetime.now(UTC).isoformat(timespec="seconds")
                if request.timing.rounds > 1:
                    time.sleep(float(os.environ["VIVACE_FINAL_ROUND_S"]))
                call_s = 2e-4 if request.trial.recipe.is_baseline else 1e-4
                round_ = make_round(request.round, (call_s,) * (request.timing.repeats or 1))
                quick = {"first_call_s": call_s, "warmup_s": (call_s,), "started_at": started, "pictures": ()}
                value = round_.model_copy(update=quick).model_dump(mode="json")
            case _:
                raise AssertionError(request.kind)
        say({"event": "result", "value": value})
        say({"event": "ended", "status": 0})


if __name__ == "__main__":
    main()
