"""The GPUs of this host as places. Each has a worker that sees no other GPU, and a thread that waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vivace.benchmark.places.spread_trials import SpreadTrials, Ticket
from vivace.benchmark.places.trial_jobs import Done, Job, rounds_of
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.rounds.worker_requests import WORKER, GpusRequest, ask
from vivace.errors import Unsupported, UsageError, VivaceError, WorkerError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment, Place

_ASK_TIMEOUT_S = 600.0
NumGpus = int | Literal["all"]


@dataclass(frozen=True)
class _Ask:
    """A request for a place's environment, with its number of CPU threads."""

    threads: int | None


_Message = Environment | Done | str | None
"""What a place says: its environment, a round, why it was lost, or that it has run all rounds of its job."""


def gpus_of_this_host(launcher: Launcher, num_gpus: NumGpus) -> list[Place]:
    """Return the first GPUs that this process may use; `num_gpus` is their number, or "all"."""
    places = [Place.model_validate(gpu) for gpu in ask(launcher, GpusRequest(), _ASK_TIMEOUT_S)["gpus"]]
    if not places:
        raise Unsupported("--gpus: PyTorch sees no CUDA device on this host; leave out --gpus")
    if num_gpus == "all":
        return places
    if num_gpus > len(places):
        raise UsageError(f"--gpus {num_gpus}: this host has {len(places)}; give at most that, or all")
    return places[:num_gpus]


def gpu_pool(places: Sequence[Place]) -> LocalPool:
    """Return a pool of GPUs of this host, each the only one that its worker sees."""

    def launcher_at(place: Place) -> Launcher:
        return Launcher(WORKER, variables={"CUDA_VISIBLE_DEVICES": place.uuid})

    return LocalPool(places, "cuda", launcher_at)


class LocalPool:
    """Places of this host, "cuda" or "cpu". Their workers end with `close`."""

    def __init__(
        self, places: Sequence[Place], device: str, launcher_at: Callable[[Place], Launcher]
    ) -> None:
        self._messages: queue.Queue[tuple[int, _Message]] = queue.Queue()
        self._workers = {
            number: _Worker(number, place, device, launcher_at(place), self._messages)
            for number, place in enumerate(places)
        }
        self._environments: dict[int, Environment] = {}

    @property
    def num_places(self) -> int:
        return len(self._workers)

    def environments(self, threads: int | None) -> list[Environment]:
        for worker in self._workers.values():
            worker.inbox.put(_Ask(threads))
        self._environments = {}
        while len(self._environments) < len(self._workers):
            number, message = self._messages.get()
            if isinstance(message, str):
                raise WorkerError(f"{self._workers[number].place.name} cannot be used: {message}")
            if isinstance(message, Environment):
                self._environments[number] = message
        return list({e.at(None).digest(): e.at(None) for e in self._environments.values()}.values())

    def run(self, spread: SpreadTrials) -> None:
        idle = sorted(self._workers)
        active: dict[int, Ticket] = {}
        while True:
            for number in list(idle):
                if (ticket := spread.take(self._environments[number])) is not None:
                    active[number] = ticket
                    idle.remove(number)
                    self._workers[number].inbox.put(ticket.job)
            if not active:
                return
            number, message = self._messages.get()
            match message:
                case Done():
                    spread.deliver(active[number], message)
                case None:
                    spread.finish(active.pop(number))
                    idle.append(number)
                case str(why):
                    spread.lose(active.pop(number), why)
                    self._workers.pop(number).join()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        for worker in self._workers.values():
            worker.join()


class _Worker(threading.Thread):
    """A place's thread. It starts the worker process, which Linux ends with the thread that started it."""

    def __init__(
        self,
        number: int,
        place: Place,
        device: str,
        launcher: Launcher,
        messages: queue.Queue[tuple[int, _Message]],
    ) -> None:
        super().__init__(name=f"vivace {place.name}", daemon=True)
        self.place = place
        self.inbox: queue.Queue[Job | _Ask | None] = queue.Queue()
        self._number = number
        self._device = device
        self._launcher = launcher
        self._messages = messages
        self._stopping = threading.Event()
        self.start()

    def stop(self) -> None:
        self._stopping.set()
        self._launcher.kill()
        self.inbox.put(None)

    def run(self) -> None:
        with self._launcher:
            try:
                while (job := self.inbox.get()) is not None:
                    if isinstance(job, _Ask):
                        environment = ask_environment(self._launcher, self._device, job.threads)
                        self._post(environment.at(self.place))
                        continue
                    for done in rounds_of(job, self._launcher):
                        if self._stopping.is_set():
                            return
                        self._post(done)
                    self._post(None)
            except (VivaceError, OSError) as error:
                self._post(str(error))

    def _post(self, message: _Message) -> None:
        if not self._stopping.is_set():
            self._messages.put((self._number, message))
