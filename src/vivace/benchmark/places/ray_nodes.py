"""The nodes of a Ray cluster as places.

Ray schedules and places: an actor with one GPU (or one CPU) measures one trial with its baseline, and Ray says where.
The nodes need the same vivace and libraries, and the models. Rounds come back one by one as JSON, images as PNG bytes.
If a node ends, what it has returned stays, and the trial gets another actor.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vivace.benchmark.places.spread_trials import MAX_ATTEMPTS, SpreadTrials, Ticket
from vivace.benchmark.places.trial_jobs import Done, Job, rounds_of
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.rounds.worker_requests import WORKER
from vivace.benchmark.store.images import image_path
from vivace.errors import Unsupported, WorkerError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment, Place
from vivace.foundation.spec.record import Round

_INSTALL = "pip install ray"
_ANSWER_S = 5.0
_POLL_S = 1.0
"""Seconds of each wait in Ray, so that Ctrl-C is noticed."""


class RayPlace:
    """The code that runs in an actor: a worker, its environment, and its rounds. Only texts and bytes pass through
    Ray."""

    def __init__(self, device: str, threads: int | None, worker: Sequence[str]) -> None:
        import ray

        self._launcher = Launcher(worker, tries_gpu=device != "cpu")
        environment = ask_environment(self._launcher, device, threads)
        host = socket.gethostname()
        if environment.device == "cuda":
            gpu = self._gpu()
            self._environment = environment.at(gpu.model_copy(update={"host": host}))
        else:
            self._environment = environment.at(
                Place(uuid=f"node-{ray.get_runtime_context().get_node_id()}", host=host)
            )

    def environment(self) -> str:
        return self._environment.model_dump_json()

    def measure(self, job: str, sources: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Run a job's rounds and yield each, with its new images; `sources` are PNG files by the sha256 of their
        pixels."""
        with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
            own = Path(folder) / "sources"
            for sha256, png in sources.items():
                path = image_path(own, sha256)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png)
            here = Job.model_validate_json(job).model_copy(update={"pictures": folder, "sources": str(own)})
            for done in rounds_of(here, self._launcher):
                images = {
                    p.sha256: image_path(Path(folder), p.sha256).read_bytes() for p in done.round.pictures
                }
                text = asdict(done) | {"round": done.round.model_dump(mode="json")}
                yield json.dumps(text), images

    def _gpu(self) -> Place:
        from vivace.benchmark.places.local_pool import gpus_of_this_host

        (gpu,) = gpus_of_this_host(self._launcher, 1)
        return gpu


class RayNodes:
    """Places of a Ray cluster.

    Args:
        address: of the cluster: "auto" for this host's own, "HOST:PORT", or "local" to start one here.
        device: "auto" (GPUs if the cluster has some), "cpu" or "cuda".
        worker: the command line that starts a worker process on a node.
    """

    num_places: int | None = None

    def __init__(self, address: str, device: str, worker: Sequence[str] = WORKER) -> None:
        try:
            import ray
        except ImportError:
            raise Unsupported(f"--ray needs Ray on every node: {_INSTALL}") from None
        self._ray: Any = ray
        self._worker = tuple(worker)
        self._started = not ray.is_initialized()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray otherwise warns of a planned change for actors that request no GPU.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if self._started:
            check_answers(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError, RuntimeError) as error:
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise Unsupported(
                    f"--ray {address}: no Ray cluster was reached ({first}); start one with `ray start --head`, or "
                    "give --ray local"
                ) from error
        gpus = ray.cluster_resources().get("GPU", 0)
        if device == "cuda" and not gpus:
            self.close()
            raise Unsupported(f"--ray {address}: the cluster has no GPUs; use --device cpu")
        self._device = "cuda" if device != "cpu" and gpus else "cpu"
        self._threads: int | None = None

    def environments(self, threads: int | None) -> list[Environment]:
        """Return the environments of the live nodes, without place, as reported by an actor on each."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        self._threads = threads
        needed = "GPU" if self._device == "cuda" else "CPU"
        nodes = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get(needed, 0) >= 1]
        actors = [self._actor(scheduling_strategy=On(n["NodeID"], soft=False)) for n in nodes]
        environments: dict[str, Environment] = {}
        for actor in actors:
            try:
                text = self._ray.get(actor.environment.remote())
            except self._ray.exceptions.RayError:  # the node has ended since, or cannot measure
                continue
            finally:
                self._ray.kill(actor)
            environment = Environment.model_validate_json(text).at(None)
            environments[environment.digest()] = environment
        if not environments:
            raise WorkerError("no node of the Ray cluster can measure; `ray status` shows its nodes")
        return list(environments.values())

    def run(self, spread: SpreadTrials) -> None:
        exceptions = self._ray.exceptions
        arriving: dict[Any, Any] = {}  # the reference of its environment -> the actor
        measuring: dict[Any, tuple[Any, Ticket]] = {}  # the stream of its rounds -> the actor, and its work
        broken: list[str] = []  # the reasons why the last actors in a row did not report their place
        try:
            while spread.waiting or measuring:
                while len(arriving) < spread.waiting and len(broken) < MAX_ATTEMPTS:
                    actor = self._actor(scheduling_strategy="SPREAD")
                    arriving[actor.environment.remote()] = actor
                if not arriving and not measuring:
                    raise WorkerError(f"{len(broken)} actors of Ray in a row did not start: {broken[-1]}")
                ready, _ = self._ray.wait([*arriving, *measuring], num_returns=1, timeout=_POLL_S)
                for reference in ready:
                    if reference in arriving:
                        actor = arriving.pop(reference)
                        try:
                            text = self._ray.get(reference)
                        except exceptions.RayError as error:
                            broken.append(_in_a_line(error))
                            continue
                        broken.clear()
                        ticket = spread.take(Environment.model_validate_json(text))
                        if ticket is None:
                            self._ray.kill(actor)
                            continue
                        stream = actor.measure.options(num_returns="streaming").remote(
                            ticket.job.model_dump_json(), _sources_of(ticket.job)
                        )
                        measuring[stream] = (actor, ticket)
                        continue
                    actor, ticket = measuring[reference]
                    try:
                        text, images = self._ray.get(next(reference))
                    except StopIteration:
                        spread.finish(ticket)
                    except exceptions.RayError as error:
                        spread.lose(ticket, _in_a_line(error))
                    else:
                        spread.deliver(ticket, _done(text), images)
                        continue
                    del measuring[reference]
                    self._ray.kill(actor)
        finally:
            for actor in [*arriving.values(), *(actor for actor, _ in measuring.values())]:
                self._ray.kill(actor)

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()

    def _actor(self, **options: Any) -> Any:
        """Return a new actor with a GPU of its own, or a CPU.

        Ray neither restarts it nor repeats its calls: rounds repeated on another node would be taken for those of the
        first.
        """
        resource = {"num_gpus": 1} if self._device == "cuda" else {"num_cpus": 1}
        kind = self._ray.remote(**resource, max_restarts=0, max_task_retries=0)(RayPlace)
        return kind.options(**options).remote(self._device, self._threads, self._worker)


def check_answers(address: str) -> None:
    """Check that something listens at HOST:PORT; Ray itself tries for over a minute, and writes into the terminal."""
    if address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Unsupported(
            f"--ray {address}: give HOST:PORT of the cluster's head (Ray's default port is 6379), auto, or local"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise Unsupported(
            f"--ray {address}: nothing answers there ({error.strerror or error}); start a cluster with "
            "`ray start --head`, whose output has its address, or give --ray local"
        ) from error


def _sources_of(job: Job) -> dict[str, bytes]:
    """Return the files of the images that a job's trials start from, by the sha256 of their pixels."""
    if job.sources is None:
        return {}
    shas = {sha for trial in job.trials for source in trial.workload.sources for sha in source.hashes}
    return {sha: image_path(Path(job.sources), sha).read_bytes() for sha in sorted(shas)}


def _done(text: str) -> Done:
    fields = json.loads(text)
    return Done(**fields | {"round": Round.model_validate(fields["round"])})


def _in_a_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if any(line.startswith("File ") for line in lines) else lines[0]
