"""Start a process that is spoken to through pipes.

It leads a session of its own: Ctrl-C on the terminal does not reach it, and it can be killed together with the
processes that it starts.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO


def start(command: Sequence[str], variables: Mapping[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process.

    Args:
        variables: environment variables besides this process's own.
        errors: where its standard error goes.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=_environment(variables),
        start_new_session=True,
    )


async def start_async(command: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a process that coroutines wait for. Its standard error is this process's."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(variables),
        start_new_session=True,
    )


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **variables}
