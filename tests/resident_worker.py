"""A resident worker without heavy libraries: answers with its own id, or hangs, or dies. For tests of processes."""

import json
import os
import sys
import time
from typing import TextIO

from vivace.foundation.processes.protocol import send_event
from vivace.foundation.processes.resident import serve_requests

COMMAND = (sys.executable, "-m", "tests.resident_worker")


def serve(request: dict[str, object], events: TextIO) -> None:
    match request["device"]:
        case "hangs":
            time.sleep(60)
        case "dies":
            os.abort()
    send_event(events, {"event": "result", "value": {"pid": os.getpid()}})


if __name__ == "__main__":
    serve_requests(json.loads, serve, lambda: None, lambda: True)
