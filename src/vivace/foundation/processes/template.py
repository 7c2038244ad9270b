"""A process that has imported libraries and forks children on order, each with a standard input and output of its own.

Only for Linux. Nothing here may have started threads or used a GPU, which no fork can take along.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import TextIO

from vivace.foundation.processes.protocol import send_event
from vivace.foundation.processes.resident import end_with_pipe, open_events

_LONGEST_ORDER = 65_536


def fork_on_orders(events: TextIO) -> TextIO | None:
    """Fork a child for each order on standard input, a socket, until it is closed.

    An order is {"number": ..., "variables": {...}} of JSON, with two files: the child's standard input and output. The
    events of this process are {"number": ..., "status": ...} for the end of each child: its exit code, or minus the
    signal that ended it.

    Returns:
        In each child its own events, the first of which is {"event": "forked", "pid": ...}; None once there are no more
        orders.
    """
    orders = socket.socket(fileno=os.dup(0))
    numbers: dict[int, int] = {}

    def note_ends(*_: object) -> None:
        for pid in list(numbers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(status)
                send_event(events, {"number": numbers.pop(pid), "status": status})

    signal.signal(signal.SIGCHLD, note_ends)
    while True:
        text, files, _, _ = socket.recv_fds(orders, _LONGEST_ORDER, 2)
        if not text:
            return None
        order = json.loads(text)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            orders.close()
            events.close()
            return _become_child(files, order["variables"])
        for file in files:
            os.close(file)
        numbers[pid] = order["number"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become_child(files: list[int], variables: dict[str, str]) -> TextIO:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(variables)
    events = open_events()
    send_event(events, {"event": "forked", "pid": os.getpid()})
    # With who ordered it, and not with its parent.
    threading.Thread(target=end_with_pipe, args=(0,), daemon=True).start()
    return events
