"""A process that computes its share of each of a denoiser's forwards, for the process that started it.

    python -m vivace.runtime.peer        messages in on standard input, answers out on standard output

See `vivace.multi_gpu.processes`. It ends when its standard input does, and so with its parent, however that ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from typing import Any

from vivace.errors import NoEffect
from vivace.multi_gpu.processes import TIMEOUT, join, receive, send


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), daemon=True).start()
    status = 1
    try:
        serve(requests, answers)
        status = 0
    except EOFError:
        status = 0
    except BaseException as error:  # noqa: BLE001  the process boundary
        traceback.print_exc()
        said = str(error).strip().splitlines()
        print(
            f"{type(error).__name__}: {said[0] if said else 'no message'}", file=sys.stderr
        )  # what is told on
    finally:
        sys.stderr.flush()
        os._exit(status)  # no farewell to a group that may be gone


def serve(requests: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from vivace.models.quiet import quiet
    from vivace.multi_gpu.sharded_denoiser import Share

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
        share = Share(about["rank"], about["num"], about["device"], receive(requests))
        share.take_weights()
        send(answers, "taken")
        session = _session(share)
        send(answers, "applied")
        with session.surroundings():
            while True:
                answer = share.serve(receive(requests))
                if answer is not None:
                    send(answers, answer)


def _session(share: Any) -> Any:
    """What comes later in the recipe, applied to the denoiser alone; its pipeline has no other part."""
    from vivace.contract import ModelFacts, Placement, Target
    from vivace.measure.machine import this_machine
    from vivace.recipes.resolve import resolve
    from vivace.runtime.session import Session
    from vivace.spec.recipe import BASELINE

    def applied(recipe: str) -> Session:
        given = share.given
        target = Target(
            Placement(this_machine(share.device)),
            share.pipe,
            ModelFacts(defaults=given["defaults"], has_random_weights=given["has_random_weights"]),
        )
        return Session(share.pipe, resolve(recipe), target)

    try:
        return applied(share.given["recipe"])
    except NoEffect as error:
        if not error.already_so:
            raise
        return applied(BASELINE)


def _end_with_parent(requests: int) -> None:
    """The main thread may be waiting for the others of the group when the parent dies."""
    poll = select.poll()
    poll.register(requests, 0)  # wakes up when the other end is closed, whatever is still to be read
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
