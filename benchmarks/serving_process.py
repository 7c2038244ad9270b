"""A server of its own for a measurement, and how its start went."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
import psutil

_READY_S = 900.0
_LOG_S = 5.0
"""The line that says how the start went is written after the server is ready."""


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready.

    Attributes:
        seconds: from its start until it was ready.
        phases: seconds of its first worker's start, by phase.
    """

    url: str
    seconds: float
    phases: dict[str, float]
    pid: int

    def kill_worker(self) -> None:
        """Kill the worker, which the server's child has forked, or is where nothing is forked."""
        children = psutil.Process(self.pid).children()
        forked = [each for child in children for each in child.children()]
        max(forked or children, key=lambda process: process.memory_info().rss).kill()


@contextmanager
def server(model: str, recipe: str, device: str, *more: str) -> Iterator[RunningServer]:
    """Run `vivace serve` until it is ready, and then the block."""
    settings = (
        "--recipe",
        recipe,
        "--device",
        device,
        "--port",
        "0",
        "--max-queue",
        "1000",
        "--max-wait",
        "3600",
    )
    command = [sys.executable, "-m", "vivace", "serve", model, *settings, *more]
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stderr is not None
    output: list[str] = []
    try:
        match = None
        while match is None:
            line = process.stderr.readline()
            if not line:
                raise click.ClickException(f"the server ended: {''.join(output[-3:]).strip()}")
            output.append(line)
            match = re.search(r"(http://\S+)/v1 the API", line)
        threading.Thread(target=lambda: output.extend(process.stderr or ()), daemon=True).start()
        url = match[1]
        while not _is_ready(url):
            if time.monotonic() - began > _READY_S or process.poll() is not None:
                raise click.ClickException(f"the server is not ready: {''.join(output[-3:]).strip()}")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        yield RunningServer(url, seconds, _logged_phases(output), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _logged_phases(output: list[str]) -> dict[str, float]:
    """Return the phases of the first start that the log tells of; none if it does not in time."""
    until = time.monotonic() + _LOG_S
    while time.monotonic() < until:
        for line in list(output):
            if phases := phases_of(line):
                return phases
        time.sleep(0.05)
    return {}


def phases_of(line: str) -> dict[str, float]:
    """Return the seconds of a start by phase, of the line of the log that ends it; none of other lines."""
    match = re.search(r": ready after [0-9.]+ s: (.+)", line)
    pairs = re.findall(r"(\S.*?) ([0-9.]+)(?:, |\s*$)", match[1]) if match else []
    return {name: float(seconds) for name, seconds in pairs}
