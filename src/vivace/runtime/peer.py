"""A peer process (python -m vivace.runtime.peer): computes one shard of each forward of a denoiser, for the process
that started it (`vivace.machinery.multi_gpu.processes`). It ends when its standard input is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import IO, TYPE_CHECKING

from vivace.errors import NoEffect
from vivace.foundation.processes.resident import end_with_pipe
from vivace.machinery.multi_gpu.processes import TIMEOUT, join, receive, send

if TYPE_CHECKING:
    from vivace.machinery.multi_gpu.sharded_denoiser import PeerDenoiser
    from vivace.runtime.session import Session


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # standard output carries answers only
    # The main thread may be waiting for a collective when the parent dies.
    threading.Thread(target=end_with_pipe, args=(requests.fileno(),), daemon=True).start()
    status = 1
    try:
        serve(requests, answers)
        status = 0
    except EOFError:
        status = 0
    except BaseException as error:  # noqa: BLE001  the process boundary
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        # The primary process reports the last line of the log.
        print(f"{type(error).__name__}: {lines[0] if lines else 'no message'}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)  # does not leave the process group, whose other members may have ended


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Join the process group, receive the denoiser, apply the recipe and compute forwards until the requests end."""
    import torch
    import torch.distributed as dist

    from vivace.machinery.multi_gpu.sharded_denoiser import PeerDenoiser
    from vivace.models.quiet import quiet

    about = receive(requests)
    torch.set_num_threads(about["threads"])
    with quiet():
        import diffusers

        assert diffusers.DiffusionPipeline is not None
    if about["device"] == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    send(answers, "ready")
    store = dist.TCPStore("127.0.0.1", about["port"], is_master=False, timeout=TIMEOUT)
    join(store, about["rank"], about["num"], about["device"])
    with torch.no_grad():
        denoiser = PeerDenoiser(about["rank"], about["num"], about["device"], receive(requests))
        denoiser.receive_weights()
        send(answers, "received")
        session = _session(denoiser)
        send(answers, "applied")
        with session.surroundings():
            while True:
                answer = denoiser.serve(receive(requests))
                if answer is not None:
                    send(answers, answer)


def _session(denoiser: PeerDenoiser) -> Session:
    """Apply the techniques after `parallel` to the denoiser, the only component of its pipeline."""
    from vivace.foundation.spec.recipe_syntax import BASELINE
    from vivace.machinery.technique import ModelFacts, Placement, Target
    from vivace.measure.machine import this_machine
    from vivace.recipes.resolve import resolve
    from vivace.runtime.session import Session

    def open_session(recipe: str) -> Session:
        about = denoiser.about
        target = Target(
            Placement(this_machine(denoiser.device)),
            denoiser.pipe,
            ModelFacts(defaults=about["defaults"], has_random_weights=about["has_random_weights"]),
        )
        return Session(denoiser.pipe, resolve(recipe), target)

    try:
        return open_session(denoiser.about["recipe"])
    except NoEffect as error:
        if not error.already_so:
            raise
        return open_session(BASELINE)


if __name__ == "__main__":
    main()
