"""A worker that measures nothing: it answers in milliseconds what a real one would. For tests of several places."""

import json
import os
import sys
import time
from datetime import UTC, datetime

from tests.make import make_environment, make_round
from vivace.benchmark.rounds.worker_requests import EnvironmentRequest, RoundRequest, parse_request

COMMAND = (sys.executable, "-m", "tests.stub_worker")
_ROUND_S = float(os.environ.get("VIVACE_STUB_ROUND_S", "0.05"))


def main() -> None:
    say({"event": "ready", "forks": True})
    for line in sys.stdin:
        request = parse_request(line)
        say({"event": "started", "pid": os.getpid()})
        match request:
            case EnvironmentRequest():
                value = make_environment().model_dump(mode="json")
            case RoundRequest(round=index):
                started = datetime.now(UTC).isoformat(timespec="seconds")
                time.sleep(_ROUND_S)
                value = make_round(index).model_dump(mode="json") | {"started_at": started, "pictures": []}
            case _:
                raise AssertionError(request.kind)
        say({"event": "result", "value": value})
        say({"event": "ended", "status": 0})


def say(event: object) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
