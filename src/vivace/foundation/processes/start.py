"""Start a process with pipes to talk to it.

It leads a session of its own, or a process group on Windows: Ctrl-C on the terminal does not reach it, and it can be
killed together with the processes that it starts.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # of Windows


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
        creationflags=_NEW_GROUP,
    )


def start_attached(command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    """Start a process with this one's standard input and error, which Ctrl-C reaches.

    Args:
        output: the number of the file that is its standard output.
    """
    return subprocess.Popen(list(command), stdout=output)


async def start_async(
    command: Sequence[str], variables: Mapping[str, str], stdin: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    """Start a process that coroutines wait for. Its standard error is this process's.

    Args:
        stdin: the number of the file that is its standard input; a pipe if it is left out.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(variables),
        start_new_session=True,
        creationflags=_NEW_GROUP,
    )


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # What is sent through the pipes is UTF-8, whatever the terminal's encoding is: cp1252 under Windows.
    return {**os.environ, **variables, "PYTHONIOENCODING": "utf-8"}
