"""A thread that ends calls in their order, while the next one runs: it sends the last event of each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Finish = Callable[[], dict[str, Any]]
"""Waits for a call's images, puts them into files, and returns facts about them."""
_MOST = 1
"""Calls that wait here beside the one that is being ended: their images take memory."""


class CompletionThread:
    """The thread.

    Args:
        send: sends an event.
        describe: returns the event of a call whose end raised an exception.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        describe: Callable[[Exception], dict[str, Any]],
    ) -> None:
        self._send, self._describe = send, describe
        self._calls: queue.Queue[tuple[str, float, Finish]] = queue.Queue(_MOST)
        self._last = 0.0
        """When the last call ended: one that was queued before then has taken the time since."""
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, id_: str, began: float, finish: Finish) -> None:
        """Let a call be ended; wait while too many are.

        Args:
            began: when it did, of `time.perf_counter`.
        """
        self._calls.put((id_, began, finish))

    def _run(self) -> None:
        while True:
            id_, began, finish = self._calls.get()
            try:
                event = {"event": "drawn", **finish()}
            except Exception as error:  # noqa: BLE001 - a request that fails must not end the worker
                event = self._describe(error)
            ended = time.perf_counter()
            self._send({**event, "id": id_, "seconds": ended - max(began, self._last)})
            self._last = ended
            del finish, event  # with their images
