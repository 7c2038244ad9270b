"""A resident worker: keeps one session and draws one image after the other.

    python -m vivace.serve.worker.main [--open-gpu] [--template MODEL]

A template imports libraries, never touches the GPU, and forks workers. A worker reads `messages` on standard input and
writes events on standard output. Its main thread owns the session; another one reads the input, so that a cancel
arrives while an image is drawn; a third one ends calls, so that the next one does not wait until pixels are copied.

Events: forked, phase (what loading does), loaded, step, compiling (the next step takes longer), called (its session
takes the next message), and then drawn, refused (the request's fault), failed or cancelled. Pixels are RGB bytes in a
file of the folder that `Load` names, which lies in memory; the server removes it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from vivace.errors import Cancelled, NotFinite, VivaceError
from vivace.foundation.hardware.this_machine import open_context
from vivace.foundation.processes.protocol import send_event
from vivace.foundation.processes.resident import die_with_parent, open_events
from vivace.foundation.processes.template import fork_on_orders
from vivace.foundation.untrusted.files import is_out_of_memory
from vivace.models.quiet import quiet
from vivace.serve.queue.messages import Cancel, Draw, Load, Message, parsed
from vivace.serve.queue.process import TEMPLATE, WITH_GPU

if TYPE_CHECKING:
    from vivace.serve.worker.warm_session import Drawing, Finish

_SENDING = threading.Lock()


_MOST = 1
"""Calls that wait here beside the one that is being ended: their images take memory."""


class CompletionThread:
    """A thread that ends calls in their order, while the next one runs: it sends the last event of each, or what
    `describe` makes of an exception."""

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
        """Let a call be ended, which began at a `time.perf_counter`; wait while too many are."""
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


class Inbox:
    """Messages of the server. A cancel takes effect at once: on the current jobs, or on those that wait here.

    A call that draws several images ends when all of them are cancelled.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self._left: dict[str, set[str]] = {}
        """The jobs of each message that are not cancelled."""
        self._lock = threading.Lock()
        self._current: str | None = None
        self.drawing: Drawing | None = None
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            message = parsed(line)
            if isinstance(message, Cancel):
                self._cancel(message.id)
                continue
            if isinstance(message, Draw):
                with self._lock:
                    self._left[message.id] = set(message.ids)
            self._messages.put(message)
        self._messages.put(None)

    def _cancel(self, job: str) -> None:
        with self._lock:
            for message, jobs in self._left.items():
                jobs.discard(job)
                if not jobs and message == self._current and self.drawing is not None:
                    self.drawing.cancel()

    def next(self) -> Message | None:
        """Wait for a message; None once the server has gone."""
        return self._messages.get()

    def begin(self, message: Draw) -> bool:
        """Begin to draw; return False if the message was cancelled meanwhile."""
        with self._lock:
            self._current = message.id
            return bool(self._left[message.id])

    def end(self, message: Draw) -> None:
        with self._lock:
            self._current = None
            del self._left[message.id]

    @property
    def current(self) -> str | None:
        """The name of the message that is drawn."""
        return self._current

    def is_cancelled(self, message: Draw) -> bool:
        with self._lock:
            return not self._left[message.id]


def main() -> None:
    die_with_parent()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # which service managers send to all; the server ends its workers
        signal.signal(number, signal.SIG_IGN)
    events = open_events()
    began = time.monotonic()
    if TEMPLATE in sys.argv:
        _import_libraries()
        _import_model(sys.argv[-1])
        gc.freeze()  # what is imported stays, and is shared as long as nobody counts its references
        forked = fork_on_orders(events)
        if forked is None:
            return
        events = forked
        torch = sys.modules.get("torch")
        # A library may have asked CUDA something when it was imported, which no fork can do again.
        if torch is not None and torch.cuda._is_in_bad_fork():
            flags = [WITH_GPU] if WITH_GPU in sys.argv else []
            os.dup2(events.fileno(), 1)
            os.execv(sys.executable, [sys.executable, "-m", "vivace.serve.worker.main", *flags])
    if WITH_GPU in sys.argv:
        threading.Thread(target=open_context, daemon=True).start()
    _report(events, "importing libraries", began)
    if TEMPLATE not in sys.argv:
        _import_libraries()
    inbox = Inbox(iter(sys.stdin.readline, ""))
    ending = CompletionThread(functools.partial(_send, events), _event_of)
    while (message := inbox.next()) is not None:
        if isinstance(message, Load):
            if not _load(message, inbox, events):
                return
        elif isinstance(message, Draw):
            _draw(message, inbox, events, ending)


def _import_libraries() -> None:
    from vivace.measure.machine import without_cuda_init

    gc.disable()  # nothing of it is garbage, and looking for some takes a seventh of the time
    import vivace.serve.worker.warm_session  # noqa: F401 - before diffusers, whose loading of foreign code it disables

    with quiet(), without_cuda_init():
        import diffusers.pipelines.pipeline_utils  # noqa: F401
        import transformers.modeling_utils  # noqa: F401
    gc.freeze()
    gc.enable()


def _import_model(name: str) -> None:
    """Import the classes of a model's components. What is wrong with the model is said by its worker."""
    import diffusers
    import transformers

    from vivace.measure.machine import without_cuda_init
    from vivace.models.find import find_model
    from vivace.models.repository import read_index

    with contextlib.suppress(Exception), quiet(), without_cuda_init():
        located = find_model(name)
        getattr(diffusers, located.pipeline)
        for entry in read_index(located.folder, name).values() if located.folder is not None else ():
            match entry:
                case ["diffusers", str(kind)]:
                    getattr(diffusers, kind)
                case ["transformers", str(kind)]:
                    getattr(transformers, kind)


def _report(events: TextIO, phase: str, at: float | None = None) -> None:
    send_event(events, {"event": "phase", "phase": phase, "at": time.monotonic() if at is None else at})


def _load(message: Load, inbox: Inbox, events: TextIO) -> bool:
    from vivace.serve.worker.warm_session import Drawing

    try:
        inbox.drawing = Drawing.load(message, lambda phase: _report(events, phase))
    except VivaceError as error:
        send_event(events, {"event": "unusable", "message": str(error)})
        return False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{message.model} with {message.recipe} does not fit the free memory; `vivace plan` says what would"
        send_event(events, {"event": "unusable", "message": problem})
        return False
    gc.freeze()  # what is loaded stays, and collections between images need not look at it
    if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:  # else nothing is compiled
        dynamo.on_compile_start(lambda _: _report_compiling(inbox, events))
    send_event(events, {"event": "loaded", "state": inbox.drawing.state()})
    return True


def _report_compiling(inbox: Inbox, events: TextIO) -> None:
    if inbox.current is not None:
        _send(events, {"event": "compiling", "id": inbox.current})


def _draw(message: Draw, inbox: Inbox, events: TextIO, ending: CompletionThread) -> None:
    began = time.perf_counter()
    try:
        finish = _call(message, inbox, events)
    except Exception as error:  # noqa: BLE001 - a request that fails must not end the worker
        event = _event_of(error)
        finish = lambda: event  # noqa: E731 - sent after those of earlier messages
    finally:
        inbox.end(message)
    _send(events, {"event": "called", "id": message.id})
    ending.put(message.id, began, finish)


def _call(message: Draw, inbox: Inbox, events: TextIO) -> Finish:
    assert inbox.drawing is not None
    if not inbox.begin(message):
        raise Cancelled("cancelled before it began")

    def report(kind: str, fields: dict[str, Any]) -> None:
        _send(events, {"event": kind, "id": message.id, **fields})
        if inbox.is_cancelled(message):
            raise Cancelled("the job was cancelled")

    return inbox.drawing.draw(message, report)


def _send(events: TextIO, event: dict[str, Any]) -> None:
    with _SENDING:
        send_event(events, event)


def _event_of(error: Exception) -> dict[str, Any]:
    if isinstance(error, Cancelled):
        return {"event": "cancelled"}
    if isinstance(error, NotFinite):
        return {"event": "failed", "message": str(error)}
    if isinstance(error, VivaceError):
        return {"event": "refused", "message": str(error)}
    traceback.print_exception(error)
    if is_out_of_memory(error):
        message = "the memory is not enough for an image of this size; ask for a smaller one"
        return {"event": "refused", "message": message}
    text = str(error).strip().splitlines()
    return {"event": "failed", "message": f"{type(error).__name__}: {text[0][:300] if text else ''}"}


if __name__ == "__main__":
    main()
