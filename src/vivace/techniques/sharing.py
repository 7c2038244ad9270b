"""A denoiser's forward, shared among processes of one GPU each: both ends of it.

`Shared` is the end of the process that draws, `Share` that of each of the others. Either the rows of the batch are
split, or the tokens, in diffusers' own way ("ulysses", "ring"), where each process is given all arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from vivace.errors import Unsupported
from vivace.techniques.copied_module import pack_module, unpack_module
from vivace.techniques.peers import Peers
from vivace.techniques.shared_forward import (
    num_bytes,
    pack,
    put_together,
    rows_of,
    shapes_in,
    shares,
    take_apart,
    unpack,
)
from vivace.techniques.step_cache import latents_of

Mode = Literal["guidance", "ulysses", "ring"]
_AGAIN = b""  # in the place of a header: the same as before
MARK = "_vivace_shared"


class Shared:
    """The denoiser of the process that draws.

    Args:
        denoiser: on its device, without local functions in it.
        given: what the other processes are told beside it; see `Share`.

    Raises:
        Unsupported: the denoiser cannot be copied.
        WorkerError: the other processes could not be started.
    """

    def __init__(self, denoiser: Any, mode: Mode, num: int, device: str, given: dict[str, Any]) -> None:
        import torch.distributed as dist

        self.num_shared = 0
        self.num_alone = 0
        self.bytes_sent = 0
        self._mode = mode
        self._device = device
        self._denoiser = denoiser
        self._last: dict[int, bytes] = {}
        try:
            pickled, storages = pack_module(denoiser, device)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise Unsupported(
                f"parallel: the denoiser cannot be copied to other GPUs as it is ({str(error).splitlines()[0]}); "
                "leave out what was hung into it before, or apply the recipe to a pipeline that was just loaded"
            ) from error
        self.peers = Peers(num, device)
        try:
            for rank in range(1, num):
                self.peers.say(rank, given | {"mode": mode, "denoiser": pickled})
            with self.peers.explained():
                for storage in storages:
                    dist.broadcast(storage, 0)
                if mode != "guidance":
                    split_tokens(denoiser, mode, num, device)
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
            raise Unsupported(
                "parallel: a CUDA graph of the denoiser would hold what its attention says to other GPUs, which is not "
                "known to work; leave out the recording, or share by guidance"
            )
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
        for rank in range(1, self.peers.num):
            self._tell(rank, header)
        buffer = pack(tensors, self._denoiser.device)
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

    def _tell(self, rank: int, header: bytes) -> None:
        again = self._last.get(rank) == header
        self._last[rank] = header
        self.peers.say(rank, ("forward", _AGAIN if again else header))

    def _count(self, sent: int) -> None:
        self.num_shared += 1
        self.bytes_sent += sent


class Share:
    """The denoiser of one of the other processes.

    Args:
        given: "denoiser" (see `pack_module`), "mode", "pipeline" (its class), "attribute" ("unet" or "transformer"),
            "scheduler" (class and configuration), "recipe" (what comes later), "defaults", "has_random_weights".
    """

    def __init__(self, rank: int, num: int, device: str, given: dict[str, Any]) -> None:
        self.device = device
        self.given = given
        self._rank, self._num = rank, num
        self._header = b""
        self._denoiser, self._storages = unpack_module(given["denoiser"], device)
        self.pipe = _pipeline_of(self._denoiser, given)
        self._num_forwards = 0

    def take_weights(self) -> None:
        """Receive the denoiser's weights."""
        import torch.distributed as dist

        for storage in self._storages:
            dist.broadcast(storage, 0)
        if self.given["mode"] != "guidance":
            split_tokens(self._denoiser, self.given["mode"], self._num, self.device)

    def serve(self, message: tuple[Any, ...]) -> dict[str, Any] | None:
        """Do what a message asks; an answer, where it wants one."""
        import torch
        import torch.distributed as dist

        if message[0] == "evidence":
            return {"peak_bytes": _peak_bytes(self.device), "forwards": self._num_forwards}
        self._header = message[1] or self._header
        shapes = shapes_in(self._header)
        buffer = torch.empty(num_bytes(shapes), dtype=torch.uint8, device=self._denoiser.device)
        by_rows = self.given["mode"] == "guidance"
        dist.recv(buffer, 0) if by_rows else dist.broadcast(buffer, 0)
        args, kwargs = put_together(self._header, unpack(buffer, shapes))
        # Not the module itself: what decides in front of the forward has decided in the process that draws.
        output = self._denoiser.forward(*args, **kwargs)
        self._num_forwards += 1
        if by_rows:
            dist.send(pack(take_apart(output, self.device)[1], self._denoiser.device), 0)
        return None


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


def split_tokens(denoiser: Any, mode: Mode, num: int, device: str) -> None:
    """Let each process of the group compute its own share of the tokens, in diffusers' own way.

    All of them call this at the same time.
    """
    import warnings

    import torch
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import AttentionBackendName
    from torch.distributed.device_mesh import init_device_mesh

    # diffusers calls a function by its old name, in each forward.
    warnings.filterwarnings("ignore", ".*all_gather_tensor` is deprecated", FutureWarning)
    degrees: dict[str, Any] = {"ulysses_degree": num} if mode == "ulysses" else {"ring_degree": num}
    if mode == "ulysses" and (num_heads(denoiser) or num) % num:
        degrees["ulysses_anything"] = True  # pads the heads, at the price of more messages
    shape = (1, num) if mode == "ulysses" else (num, 1)
    config = ContextParallelConfig(
        **degrees, mesh=init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
    )
    if mode == "ring":
        # PyTorch's own choice of a kernel tells no log-sum-exp, by which a ring adds its parts up.
        least = torch.cuda.get_device_capability() >= (9, 0)
        kernel = AttentionBackendName._NATIVE_CUDNN if least else AttentionBackendName._NATIVE_FLASH
        for processor in attentions_of(denoiser):
            processor._attention_backend = kernel
    if device == "cuda":
        denoiser.enable_parallelism(config=config)
        return
    # diffusers looks for an accelerator's number; the rest of what it does holds for a CPU as well.
    from diffusers import ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel

    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(torch.distributed.get_rank(), num, torch.device(device), mesh=config.mesh)
    denoiser._parallel_config = whole
    for processor in attentions_of(denoiser):
        processor._parallel_config = whole
    apply_context_parallel(denoiser, config, denoiser._cp_plan)


def attentions_of(denoiser: Any) -> list[Any]:
    """The processors of the attentions that diffusers can share."""
    found = [getattr(module, "processor", None) for module in denoiser.modules()]
    return [processor for processor in found if hasattr(processor, "_parallel_config")]


def num_heads(denoiser: Any) -> int | None:
    """Attention heads of a transformer, None where its configuration does not tell."""
    heads = getattr(denoiser.config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def can_pad(heads: int, num: int) -> bool:
    """Whether diffusers can fill the heads up to a multiple of `num`: only the last share may have empty ones."""
    missing = -heads % num
    return missing < (heads + missing) // num


def refuse_uneven(denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> None:
    """
    Raises:
        Unsupported: tokens that `num` processes cannot have equal shares of.
    """
    import inspect

    if denoiser._parallel_config.context_parallel_config.ulysses_anything:
        return
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]
    known = dict(zip(names, args, strict=False)) | kwargs
    for name, how in (denoiser._cp_plan.get("") or {}).items():
        tensor, dim = known.get(name), getattr(how, "split_dim", None)
        if tensor is None or dim is None or tensor.ndim <= dim:
            continue
        if tensor.shape[dim] % num:
            raise Unsupported(
                f"parallel: {name} has {tensor.shape[dim]} tokens, of which {num} GPUs cannot have equal shares; "
                f"choose a size or a number of GPUs that divides them, e.g. a multiple of {16 * num} px"
            )
