"""A denoiser's forward, sharded among processes with one GPU each: both ends of it.

`ShardedDenoiser` is the end of the primary process (rank 0), `PeerDenoiser` that of each peer. Either the rows of the
batch are sharded ("cfg"), or the tokens, for which each process receives all arguments.

A CUDA graph of a forward whose tokens are sharded contains collectives, so all processes must capture at the same call
and replay at the same call. The primary tells the peers which it is, and calls its own forward with what they receive:
the same views of the same buffer, so that all look the graph up by the same shapes and strides.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vivace.errors import Unsupported
from vivace.machinery.compilation.captured import captured_forward
from vivace.machinery.multi_gpu.fused_exchange import Sharding
from vivace.machinery.multi_gpu.processes import Peers
from vivace.machinery.multi_gpu.split_tokens import (
    Mode,
    check_even_tokens,
    needs_diffusers,
    split_tokens,
)
from vivace.machinery.multi_gpu.transfer import (
    StorageList,
    TensorSpec,
    as_view,
    deserialize,
    num_bytes,
    pack,
    pack_module,
    select_rows,
    serialize,
    specs_in,
    specs_of,
    split_rows,
    unpack,
    unpack_module,
)
from vivace.machinery.step_caching.engine import MODE, latents_of

Arguments = dict[str, Any]
_LATENTS = "hidden_states"


class SecondCalls:
    """Guidance in two calls of the denoiser a step: a peer computes the second while this process computes the first.

    It has the first call's latents and timestep, and the text of the second call before. So from the second step on it
    is sent to a peer in advance, and compared with what was sent when it is made: the same objects, or, for what
    pipelines compute anew, the same values, compared on the device and looked at when the image is done.
    """

    def __init__(self, send: Callable[[Arguments], None], receive: Callable[[Any], Any]) -> None:
        self.num_shared = 0
        self._send, self._receive = send, receive
        self._first: Arguments | None = None
        self._output: Any = None
        self._sent: Arguments | None = None
        self._others: Arguments = {}
        self._gave_up = False
        self._differences: list[torch.Tensor] = []

    def call(self, forward: Callable[..., Any], kwargs: Arguments) -> tuple[Any, bool]:
        """Return the output of a call, and whether the peer has computed it."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            output = self._receive(self._output)
            if self._is(kwargs, sent):
                self.num_shared += 1
                self._first = None
                return output, True
            # Guidance has ended, or the pipeline calls its denoiser in another way.
            self._gave_up = True
        is_second = self._first is not None and kwargs.get(_LATENTS) is self._first.get(_LATENTS)
        if is_second:
            assert self._first is not None
            self._others = _other_arguments(self._first, kwargs)
            self._first = None
        else:
            self._first = kwargs
            if self._others and not self._gave_up:
                self._sent = kwargs | self._others
                self._send(self._sent)
        self._output = forward(**kwargs)
        return self._output, False

    def end(self) -> None:
        """End an image; Unsupported where a second call had other values than was assumed."""
        if self._sent is not None:
            self._receive(self._output)
        differences, self._differences = self._differences, []
        self._first = self._sent = self._output = None
        self._others, self._gave_up = {}, False
        if differences and torch.stack(differences).any():
            raise Unsupported(
                "parallel(cfg): the second call of a step has another timestep or size than the first, which it must "
                "share; leave parallel out"
            )

    def _is(self, kwargs: Arguments, sent: Arguments) -> bool:
        if kwargs.keys() != sent.keys():
            return False
        recomputed = []
        for name, value in kwargs.items():
            if value is sent[name]:
                continue
            if name in self._others or name == _LATENTS or not _may_be_equal(value, sent[name]):
                return False
            if torch.is_tensor(value):
                recomputed.append((value != sent[name]).any())
        self._differences += recomputed
        return True


def _other_arguments(first: Arguments, second: Arguments) -> Arguments:
    others = {}
    for name, value in second.items():
        before = first.get(name)
        same = value is before or (_may_be_equal(value, before) and not torch.is_tensor(value))
        if not same and torch.is_tensor(value) and _may_be_equal(value, before):
            same = torch.equal(value, before)
        if not same:
            others[name] = value
    return others


def _may_be_equal(value: Any, other: Any) -> bool:
    """Whether values are equal, as far as can be decided without reading tensors."""
    if torch.is_tensor(value) != torch.is_tensor(other):
        return False
    if torch.is_tensor(value):
        attributes = ("shape", "dtype", "device")
        return all(getattr(value, name) == getattr(other, name) for name in attributes)
    return type(value) is type(other) and bool(value == other)


_SAME_HEADER = b""  # in place of a header: the same as in the forward before


class ShardedDenoiser:
    """The denoiser of the primary process; `about` has further facts for the peers. Unsupported: it cannot be
    copied."""

    def __init__(
        self, denoiser: torch.nn.Module, mode: Mode, num: int, device: str, about: dict[str, Any]
    ) -> None:
        self.num_shared = 0
        self.num_alone = 0
        self.bytes_sent = 0
        self._mode = mode
        self._by_tokens = mode != "cfg"
        self._device = device
        self._denoiser = denoiser
        self._last_headers: dict[int, bytes] = {}
        self._graphs: Any = None
        self._sharding: Sharding | None = None
        self._sending: tuple[Any, torch.Tensor] | None = None
        self._second_calls = SecondCalls(self._send_call, self._receive_like)
        try:
            pickled, storages = pack_module(denoiser, device)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise Unsupported(
                f"parallel: the denoiser cannot be copied to other GPUs as it is ({str(error).splitlines()[0]}); "
                "remove what was added to it before, or apply the recipe to a pipeline that was just loaded"
            ) from error
        self._storages = StorageList(storages)
        by_diffusers = self._by_tokens and needs_diffusers(denoiser, mode, num)
        self.peers = Peers(num, device)
        try:
            for rank in range(1, num):
                self.peers.send(
                    rank, about | {"mode": mode, "denoiser": pickled, "by_diffusers": by_diffusers}
                )
            with self.peers.explained():
                for storage in storages:
                    dist.broadcast(storage, 0)
                if self._by_tokens:
                    self._sharding = split_tokens(denoiser, mode, num, device, by_diffusers)
            if self._sharding is not None and self._sharding.memory is not None:
                self.peers.when_lost.append(self._sharding.memory.abandon)
            for rank in range(1, num):
                self.peers.receive(rank)  # "received": the weights may change from now on
        except BaseException:
            self.peers.close()
            raise

    def finish(self) -> None:
        """Wrap the forward as it is now, and wait until the peers have theirs."""
        forward = self._denoiser.forward
        if self._by_tokens:
            self._graphs = captured_forward(self._denoiser)
        if self._graphs is not None:
            # NCCL destroys a communicator only once every graph that contains its collectives is gone.
            self.peers.before_leaving.append(self._graphs.graphs.clear)
        for rank in range(1, self.peers.num):
            self.peers.receive(rank)  # "applied"
        self._denoiser.forward = self._wrapped(forward)

    def send_written(self, tensors: Sequence[torch.Tensor]) -> None:
        self.peers.check()
        views = [self._storages.view_of(tensor) for tensor in tensors]
        for rank in range(1, self.peers.num):
            self.peers.send(rank, ("write", views))
        with self.peers.explained():
            dist.broadcast(pack(list(tensors), self._denoiser.device), 0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround a call, and reject its image if a peer died meanwhile."""
        self.peers.check()
        try:
            yield
        except Exception as error:
            self.peers.raise_if_failed(error)
            raise
        finally:
            if self.peers.is_open:
                with self.peers.explained():
                    self._second_calls.end()
        self.peers.check()

    def evidence(self) -> dict[str, int | float | str | list[str]]:
        facts: dict[str, int | float | str | list[str]] = {
            "gpus" if self._device == "cuda" else "processes": self.peers.num if self.num_shared else 1,
            "forwards_shared": self.num_shared,
            "forwards_alone": self.num_alone,
            "bytes_exchanged_a_forward": round(self.bytes_sent / self.num_shared) if self.num_shared else 0,
        }
        if self._sharding is not None and self._sharding.num_collectives is not None:
            facts["messages_an_attention"] = self._sharding.num_collectives
        if self._sharding is not None and self._sharding.memory is not None:
            facts["peer_memory_bytes"] = self._sharding.memory.num_bytes
        for rank in range(1, self.peers.num):
            self.peers.send(rank, ("evidence",))
        for rank in range(1, self.peers.num):
            for name, value in self.peers.receive(rank).items():
                facts[f"peer_{rank}.{name}"] = value
        return facts

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compute = self._forward_tokens if self._by_tokens else self._forward_rows

        def sharded(*args: Any, **kwargs: Any) -> Any:
            self.peers.check()
            if self._by_tokens and kwargs.get(MODE, "compute") != "compute":
                self.num_alone += 1  # a step cache's hit or look: hardly any work, on all tokens
                return forward(*args, **kwargs)
            if self._by_tokens:
                check_even_tokens(self._denoiser, args, kwargs, self.peers.num)
            try:
                with self.peers.explained():
                    return compute(forward, args, kwargs)
            except BaseException:
                self.peers.close()  # they may wait for what will never come
                raise

        return sharded

    def _forward_tokens(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        header, tensors = serialize((args, kwargs), self._device)
        buffer = pack(tensors, self._denoiser.device)
        captures = False
        if self._graphs is not None:
            args, kwargs = deserialize(header, unpack(buffer, specs_of(tensors)))
            captures = not self._graphs.has(args, kwargs)
        for rank in range(1, self.peers.num):
            self._announce(rank, header, captures)
        dist.broadcast(buffer, 0)
        self._count(buffer.numel() * (self.peers.num - 1))
        return forward(*args, **kwargs)

    def _forward_rows(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        num = latents_of(args, kwargs).shape[0]
        shards = split_rows(num, self.peers.num)
        if len(shards) == 1:
            return self._forward_one(forward, args, kwargs)
        pending = []
        for rank, rows in enumerate(shards[1:], 1):
            header, tensors = serialize(select_rows((args, kwargs), rows, num), self._device)
            self._announce(rank, header)
            buffer = pack(tensors, self._denoiser.device)
            pending.append((dist.isend(buffer, rank), buffer))
        own_args, own_kwargs = select_rows((args, kwargs), shards[0], num)
        header, own = serialize(forward(*own_args, **own_kwargs), self._device)
        num_own = shards[0].stop
        if any(not tensor.ndim or tensor.shape[0] != num_own for tensor in own):
            raise RuntimeError(f"the denoiser was called with {num_own} rows and returned another number")
        parts = [own]
        for work, _ in pending:
            work.wait()
        sent = sum(buffer.numel() for _, buffer in pending)
        for rank, rows in enumerate(shards[1:], 1):
            specs = [((rows.stop - rows.start, *t.shape[1:]), t.dtype) for t in own]
            buffer = torch.empty(num_bytes(specs), dtype=torch.uint8, device=self._denoiser.device)
            dist.recv(buffer, rank)
            sent += buffer.numel()
            parts.append(unpack(buffer, specs))
        self._count(sent)
        return deserialize(header, [torch.cat(pieces) for pieces in zip(*parts, strict=True)])

    def _forward_one(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args or MODE in kwargs:
            self.num_alone += 1
            return forward(*args, **kwargs)
        output, is_peers = self._second_calls.call(forward, kwargs)
        if is_peers:
            self.num_shared += 1  # with the first call of the step, which was not alone either
        self.num_alone += -1 if is_peers else 1
        return output

    def _send_call(self, kwargs: dict[str, Any]) -> None:
        header, tensors = serialize(((), kwargs), self._device)
        self._announce(1, header)
        buffer = pack(tensors, self._denoiser.device)
        self._sending = dist.isend(buffer, 1), buffer

    def _receive_like(self, output: Any) -> Any:
        assert self._sending is not None
        (work, sent), self._sending = self._sending, None
        work.wait()
        header, tensors = serialize(output, self._device)
        specs = specs_of(tensors)
        buffer = torch.empty(num_bytes(specs), dtype=torch.uint8, device=self._denoiser.device)
        dist.recv(buffer, 1)
        self.bytes_sent += sent.numel() + buffer.numel()
        return deserialize(header, unpack(buffer, specs))

    def _announce(self, rank: int, header: bytes, captures: bool = False) -> None:
        is_same = self._last_headers.get(rank) == header
        self._last_headers[rank] = header
        self.peers.send(rank, ("forward", _SAME_HEADER if is_same else header, captures))

    def _count(self, sent: int) -> None:
        self.num_shared += 1
        self.bytes_sent += sent


class PeerDenoiser:
    """The denoiser of a peer process. `about` has the denoiser, "mode" and "by_diffusers", "pipeline" (its class),
    "attribute", "scheduler" (class and configuration), "recipe" (the later techniques), "defaults",
    "has_random_weights"."""

    def __init__(self, rank: int, num: int, device: str, about: dict[str, Any]) -> None:
        self.device = device
        self.about = about
        self._num = num
        self._by_tokens = about["mode"] != "cfg"
        self._header = b""
        self._specs: list[TensorSpec] = []
        self._denoiser, self._storages = unpack_module(about["denoiser"], device)
        self.pipe = _pipeline_of(self._denoiser, about)
        self._num_forwards = 0

    def receive_weights(self) -> None:
        for storage in self._storages:
            dist.broadcast(storage, 0)
        if self._by_tokens:
            split_tokens(
                self._denoiser, self.about["mode"], self._num, self.device, self.about["by_diffusers"]
            )

    def serve(self, message: tuple[Any, ...]) -> dict[str, Any] | None:
        """Handle a message; return the answer, if it needs one."""
        if message[0] == "evidence":
            facts = {"peak_bytes": _peak_bytes(self.device), "forwards": self._num_forwards}
            if (graphs := captured_forward(self._denoiser)) is not None:
                facts["cuda_graphs_recorded"] = graphs.num_captured
            return facts
        if message[0] == "write":
            tensors = [as_view(self._storages, view) for view in message[1]]
            buffer = torch.empty(
                num_bytes(specs_of(tensors)), dtype=torch.uint8, device=self._denoiser.device
            )
            dist.broadcast(buffer, 0)
            for tensor, values in zip(tensors, unpack(buffer, specs_of(tensors)), strict=True):
                tensor.copy_(values)
            return None
        _, header, captures = message
        if header != _SAME_HEADER:
            self._header = header
            self._specs = specs_in(header)
        buffer = torch.empty(num_bytes(self._specs), dtype=torch.uint8, device=self._denoiser.device)
        dist.broadcast(buffer, 0) if self._by_tokens else dist.recv(buffer, 0)
        args, kwargs = deserialize(self._header, unpack(buffer, self._specs))
        if self._by_tokens and (graphs := captured_forward(self._denoiser)) is not None:
            _follow_primary(graphs, captures, args, kwargs)
        # Not the module itself: its hooks, such as a step cache's decision, have run in the primary process.
        output = self._denoiser.forward(*args, **kwargs)
        self._num_forwards += 1
        if not self._by_tokens:
            dist.send(pack(serialize(output, self.device)[1], self._denoiser.device), 0)
        return None


def _follow_primary(graphs: Any, captures: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if captures:
        graphs.forget(args, kwargs)
    elif not graphs.has(args, kwargs):
        raise RuntimeError("the primary process replays a CUDA graph that this process has not captured")


def _pipeline_of(denoiser: torch.nn.Module, about: dict[str, Any]) -> Any:
    pipe = object.__new__(about["pipeline"])
    setattr(pipe, about["attribute"], denoiser)
    kind, config = about["scheduler"]
    pipe.scheduler = kind.from_config(config)
    return pipe


def _peak_bytes(device: str) -> int:
    from vivace.foundation.processes.system import peak_resident_bytes

    if device == "cuda":
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    return peak_resident_bytes()
