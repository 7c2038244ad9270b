"""A denoiser's forward, shared among processes of one GPU each: both ends of it.

`Shared` is the end of the process that draws, `Share` that of each of the others. Either the rows of the batch are
split, or the tokens ("ulysses", "ring"), where each process is given all arguments.

A CUDA graph of a forward whose tokens are split holds messages, so all record at the same call and replay at the same
call. The process that draws tells the others which it is, and gives its own forward what they are given: the same views
of the same buffer, so that all know the arguments by the same shapes and strides.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vivace.compilation.captured import RECORDED
from vivace.errors import Unsupported
from vivace.multi_gpu.module_transfer import pack_module, unpack_module
from vivace.multi_gpu.processes import Peers
from vivace.multi_gpu.sharded_forward import (
    num_bytes,
    pack,
    put_together,
    rows_of,
    shapes_in,
    shapes_of,
    shares,
    take_apart,
    unpack,
)
from vivace.multi_gpu.split_tokens import Mode, needs_diffusers, refuse_uneven, split_tokens
from vivace.step_caching.cached_denoiser import MODE, latents_of

_AGAIN = b""  # in the place of a header: the same as before
MARK = "_vivace_shared"


class Shared:
    """The denoiser of the process that draws.

    Args:
        denoiser: on its device, without local functions in it.
        by_copies: how messages inside of attention travel where tokens are split; see `messages`.
        given: what the other processes are told beside it; see `Share`.

    Raises:
        Unsupported: the denoiser cannot be copied.
        WorkerError: the other processes could not be started.
    """

    def __init__(
        self, denoiser: Any, mode: Mode, num: int, device: str, by_copies: bool, given: dict[str, Any]
    ) -> None:
        import torch.distributed as dist

        self.num_shared = 0
        self.num_alone = 0
        self.bytes_sent = 0
        self._mode = mode
        self._device = device
        self._denoiser = denoiser
        self._last: dict[int, bytes] = {}
        self._graphs: Any = None
        self._by_copies = by_copies
        self.messages: int | None = None
        try:
            pickled, storages = pack_module(denoiser, device)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise Unsupported(
                f"parallel: the denoiser cannot be copied to other GPUs as it is ({str(error).splitlines()[0]}); "
                "leave out what was hung into it before, or apply the recipe to a pipeline that was just loaded"
            ) from error
        by_diffusers = needs_diffusers(denoiser, mode, num)
        self.peers = Peers(num, device)
        try:
            for rank in range(1, num):
                told = {
                    "mode": mode,
                    "denoiser": pickled,
                    "by_diffusers": by_diffusers,
                    "by_copies": by_copies,
                }
                self.peers.say(rank, given | told)
            with self.peers.explained():
                for storage in storages:
                    dist.broadcast(storage, 0)
                if mode != "guidance":
                    self.messages = split_tokens(denoiser, mode, num, device, by_diffusers, by_copies)
            if by_copies:
                from vivace.multi_gpu.collectives import let_go, send_by_collectives

                self.peers.after_failure.append(let_go)
                self.peers.before_leaving.append(send_by_collectives)
            for rank in range(1, num):
                self.peers.hear(rank)  # "taken": nothing later may change what they are still copying
        except BaseException:
            self.peers.close()
            raise
        setattr(denoiser, MARK, True)

    def finish(self) -> None:
        """Wrap the forward as it is now, and wait until the others have theirs."""
        forward = self._denoiser.forward
        if self._mode != "guidance" and getattr(forward, "replays_graphs", False):
            self._graphs = getattr(self._denoiser, RECORDED, None)
            if self._graphs is None:
                raise Unsupported(
                    "parallel: a graph that torch.compile records holds what attention says to other GPUs, and each "
                    "process would decide for itself when to record anew; take compile in its default mode, with "
                    "cuda_graph behind it"
                )
            # NCCL waits for the end of every graph that holds its messages before it lets go of a communicator.
            self.peers.before_leaving.insert(0, self._graphs.graphs.clear)
        for rank in range(1, self.peers.num):
            self.peers.hear(rank)  # "applied"
        self._denoiser.forward = self._wrapped(forward)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a call: a picture that was drawn while one of the others died is not the picture."""
        self.peers.check()
        try:
            yield
        except Exception as error:
            self.peers.blame(error)
            raise
        self.peers.check()

    def evidence(self) -> dict[str, int | float | str | list[str]]:
        """What took part, and the most memory that each of the others held since it was started."""
        found: dict[str, int | float | str | list[str]] = {
            "gpus" if self._device == "cuda" else "processes": self.peers.num if self.num_shared else 1,
            "forwards_shared": self.num_shared,
            "forwards_alone": self.num_alone,
            "bytes_exchanged_a_forward": round(self.bytes_sent / self.num_shared) if self.num_shared else 0,
        }
        if self.messages is not None:
            found["messages_an_attention"] = self.messages
            found["messages_travel_by"] = "copies" if self._by_copies else "collectives"
        for rank in range(1, self.peers.num):
            self.peers.say(rank, ("evidence",))
        for rank in range(1, self.peers.num):
            for name, value in self.peers.hear(rank).items():
                found[f"peer_{rank}.{name}"] = value
        return found

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        share = self._by_rows if self._mode == "guidance" else self._by_tokens

        def shared(*args: Any, **kwargs: Any) -> Any:
            self.peers.check()
            if self._mode != "guidance" and kwargs.get(MODE, "compute") != "compute":
                self.num_alone += 1  # a step cache's hit, or its look: hardly any work, of all tokens
                return forward(*args, **kwargs)
            if self._mode != "guidance":
                refuse_uneven(self._denoiser, args, kwargs, self.peers.num)
            try:
                with self.peers.explained():
                    return share(forward, args, kwargs)
            except BaseException:
                self.peers.close()  # they may wait for what will never come
                raise

        return shared

    def _by_tokens(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch.distributed as dist

        header, tensors = take_apart((args, kwargs), self._device)
        buffer = pack(tensors, self._denoiser.device)
        records = False
        if self._graphs is not None:
            args, kwargs = put_together(header, unpack(buffer, shapes_of(tensors)))
            records = not self._graphs.has(args, kwargs)
        for rank in range(1, self.peers.num):
            self._tell(rank, header, records)
        _before_messages(self._by_copies)
        dist.broadcast(buffer, 0)
        self._count(buffer.numel() * (self.peers.num - 1))
        return forward(*args, **kwargs)

    def _by_rows(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch
        import torch.distributed as dist

        num = latents_of(args, kwargs).shape[0]
        rows = shares(num, self.peers.num)
        if len(rows) == 1:
            self.num_alone += 1
            return forward(*args, **kwargs)
        under_way = []
        for rank, part in enumerate(rows[1:], 1):
            header, tensors = take_apart(rows_of((args, kwargs), part, num), self._device)
            self._tell(rank, header)
            buffer = pack(tensors, self._denoiser.device)
            under_way.append((dist.isend(buffer, rank), buffer))
        own_args, own_kwargs = rows_of((args, kwargs), rows[0], num)
        header, own = take_apart(forward(*own_args, **own_kwargs), self._device)
        first = rows[0].stop
        if any(not tensor.ndim or tensor.shape[0] != first for tensor in own):
            raise RuntimeError(f"the denoiser of {first} rows returned a tensor of other than {first} rows")
        parts = [own]
        for work, _ in under_way:
            work.wait()
        sent = sum(buffer.numel() for _, buffer in under_way)
        for rank, part in enumerate(rows[1:], 1):
            shapes = [((part.stop - part.start, *t.shape[1:]), t.dtype) for t in own]
            buffer = torch.empty(num_bytes(shapes), dtype=torch.uint8, device=self._denoiser.device)
            dist.recv(buffer, rank)
            sent += buffer.numel()
            parts.append(unpack(buffer, shapes))
        self._count(sent)
        return put_together(header, [torch.cat(pieces) for pieces in zip(*parts, strict=True)])

    def _tell(self, rank: int, header: bytes, records: bool = False) -> None:
        again = self._last.get(rank) == header
        self._last[rank] = header
        self.peers.say(rank, ("forward", _AGAIN if again else header, records))

    def _count(self, sent: int) -> None:
        self.num_shared += 1
        self.bytes_sent += sent


class Share:
    """The denoiser of one of the other processes.

    Args:
        given: "denoiser" (see `pack_module`), "mode", "by_diffusers" and "by_copies" (see `split_tokens`), "pipeline"
            (its class), "attribute" ("unet" or "transformer"), "scheduler" (class and configuration), "recipe" (what
            comes later), "defaults", "has_random_weights".
    """

    def __init__(self, rank: int, num: int, device: str, given: dict[str, Any]) -> None:
        self.device = device
        self.given = given
        self._rank, self._num = rank, num
        self._header = b""
        self._shapes: list[tuple[tuple[int, ...], Any]] = []
        self._denoiser, self._storages = unpack_module(given["denoiser"], device)
        self.pipe = _pipeline_of(self._denoiser, given)
        self._num_forwards = 0

    def take_weights(self) -> None:
        """Receive the denoiser's weights."""
        import torch.distributed as dist

        for storage in self._storages:
            dist.broadcast(storage, 0)
        if self.given["mode"] != "guidance":
            split_tokens(
                self._denoiser,
                self.given["mode"],
                self._num,
                self.device,
                self.given["by_diffusers"],
                self.given["by_copies"],
            )

    def serve(self, message: tuple[Any, ...]) -> dict[str, Any] | None:
        """Do what a message asks; an answer, where it wants one."""
        import torch
        import torch.distributed as dist

        if message[0] == "evidence":
            found = {"peak_bytes": _peak_bytes(self.device), "forwards": self._num_forwards}
            if (graphs := getattr(self._denoiser, RECORDED, None)) is not None:
                found["cuda_graphs_recorded"] = graphs.num_recorded
            return found
        if message[1] != _AGAIN:
            self._header = message[1]
            self._shapes = shapes_in(self._header)
        buffer = torch.empty(num_bytes(self._shapes), dtype=torch.uint8, device=self._denoiser.device)
        by_rows = self.given["mode"] == "guidance"
        dist.recv(buffer, 0) if by_rows else dist.broadcast(buffer, 0)
        args, kwargs = put_together(self._header, unpack(buffer, self._shapes))
        if not by_rows and (graphs := getattr(self._denoiser, RECORDED, None)) is not None:
            _agree(graphs, message[2], args, kwargs)
        _before_messages(self.given["by_copies"])
        # Not the module itself: what decides in front of the forward has decided in the process that draws.
        output = self._denoiser.forward(*args, **kwargs)
        self._num_forwards += 1
        if by_rows:
            dist.send(pack(take_apart(output, self.device)[1], self._denoiser.device), 0)
        return None


def _before_messages(by_copies: bool) -> None:
    if by_copies:
        from vivace.multi_gpu.collectives import restart

        restart()


def _agree(graphs: Any, records: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let this process record, or replay, as the one that draws does.

    Raises:
        RuntimeError: it would replay what this process never recorded.
    """
    if records:
        graphs.forget(args, kwargs)
    elif not graphs.has(args, kwargs):
        raise RuntimeError("a CUDA graph was to be replayed that this process has not recorded")


def _pipeline_of(denoiser: Any, given: dict[str, Any]) -> Any:
    """A pipeline of the class that has a denoiser and a scheduler, and no other part."""
    pipe = object.__new__(given["pipeline"])
    setattr(pipe, given["attribute"], denoiser)
    kind, config = given["scheduler"]
    pipe.scheduler = kind.from_config(config)
    return pipe


def _peak_bytes(device: str) -> int:
    import resource

    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
