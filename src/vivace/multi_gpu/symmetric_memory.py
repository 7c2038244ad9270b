"""Memory of one size in each of a session's processes, all of it seen by all.

Source: PyTorch, torch.distributed._symmetric_memory. It is made for processes that start and end together; a session
starts fresh ones beside a process that may have shared a model before, which is what `_Group` is about.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Buffer(Protocol):
    """Memory of one size in each process, all of it seen by all."""

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A process's own, from its beginning."""
        ...

    def meet(self) -> None:
        """What comes after it in any process sees what came before it in every one."""
        ...


class Memory(Protocol):
    """Where buffers are made."""

    rank: int
    num: int

    def allocate(self, num_bytes: int) -> Buffer:
        """In all processes at the same time."""
        ...

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """What is done in it comes after what was done before, and beside what is done then."""
        ...

    def join(self) -> None:
        """What is done from now on comes after what was done beside."""
        ...

    def let_go(self) -> None:
        """Another process has ended: let what waits for it here go on."""
        ...

    def close(self) -> None:
        """Nothing more will be allocated."""
        ...


class OfGPUs:
    """Memory of each GPU that the others reach, by PyTorch's symmetric memory.

    Each of the processes calls its own GPU the first.
    """

    def __init__(self, rank: int, num: int) -> None:
        self.rank = rank
        self.num = num
        # The numbers of the GPUs, by which PyTorch would tell them apart, are the same in all processes. It also keeps
        # PyTorch from setting up multicast, which copies have no use for.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._group = _Group(rank, num)
        # What meets is a kernel of one warp, and must not wait for the end of the product that it comes before.
        self._stream = torch.cuda.Stream(priority=-1)
        self._over = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def allocate(self, num_bytes: int) -> Buffer:
        """
        Raises:
            RuntimeError: a CUDA graph is being recorded, or the GPUs do not reach each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a message of {num_bytes} bytes was never sent before a CUDA graph records it"
            )
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", 0))
        return _OfGPUs(symmetric.rendezvous(own, self._group.name), own, self.rank, self.num, self._over)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def let_go(self) -> None:
        self._over.fill_(1)  # no call of CUDA, any of which may have to wait for what waits here

    def close(self) -> None:
        self._group.close()


class _OfGPUs:
    def __init__(self, handle: Any, own: torch.Tensor, rank: int, num: int, over: torch.Tensor) -> None:
        from vivace.multi_gpu.gpu_barrier import wait_for_all

        self._wait_for_all = wait_for_all
        self._handle = handle
        self._own = own  # its memory is there for as long as this is
        self._rank, self._num, self._over = rank, num, over
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        pads = [handle.get_signal_pad(peer, (num,), torch.int32) for peer in range(num)]
        self._pads = torch.tensor([pad.data_ptr() for pad in pads], dtype=torch.int64, device=own.device)
        self._count = torch.zeros(1, dtype=torch.int32, device=own.device)
        # Once before anything waits: CUDA may load a kernel only when the GPU has nothing to do.
        self.meet()

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = (rank, shape, dtype)
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, shape, dtype)
        return self._views[key]

    def meet(self) -> None:
        self._wait_for_all(self._pads, self._count, self._over, self._rank, self._num)


class _Group:
    """The processes of a session, under a name that no other session of this process has."""

    _names = (f"vivace-messages-{number}" for number in itertools.count())

    def __init__(self, rank: int, num: int) -> None:
        from torch._C import _distributed_c10d as c10d
        from torch.distributed import distributed_c10d

        self.name = next(self._names)
        # Both are kept here: what is registered is not kept by that, and a store that C++ alone keeps has no methods.
        self._store = NumberedAnew(distributed_c10d._get_default_store())
        self._process_group = c10d.ProcessGroup(self._store, rank, num)
        c10d._register_process_group(self.name, self._process_group)

    def close(self) -> None:
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self.name)


class NumberedAnew(dist.Store):  # type: ignore[misc]
    """A store in which this process's numbers begin with 0.

    Symmetric memory writes what it exchanges under a number that counts the exchanges of this process since its start.
    One that shared a model before would look for the next number, those that were started for this session for the
    first, and all would wait.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._inner = store
        self._first: dict[str, int] = {}  # by what stands before the number

    def _key(self, key: str) -> str:
        what, number, *rest = key.split("/", 2)
        first = self._first.setdefault(what, int(number))
        return "/".join((what, str(int(number) - first), *rest))

    def set(self, key: str, value: Any) -> None:
        self._inner.set(self._key(key), value)

    def get(self, key: str) -> Any:
        return self._inner.get(self._key(key))

    def multi_get(self, keys: list[str]) -> Any:
        return self._inner.multi_get([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> Any:
        return self._inner.add(self._key(key), amount)

    def check(self, keys: list[str]) -> Any:
        return self._inner.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._inner.wait([self._key(key) for key in keys], *timeout)


class OfProcesses:
    """Memory of processes on CPUs, in files that all of them map: of use for tests alone."""

    def __init__(self, rank: int, num: int) -> None:
        self.rank = rank
        self.num = num

    def allocate(self, num_bytes: int) -> Buffer:
        folder = [tempfile.mkdtemp(prefix="vivace-messages-") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        maps = [
            torch.from_file(f"{folder[0]}/{rank}", shared=True, size=num_bytes, dtype=torch.uint8)
            for rank in range(self.num)
        ]
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder[0])  # who has mapped a file keeps it
        return _OfProcesses(maps)

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OfProcesses:
    def __init__(self, maps: list[torch.Tensor]) -> None:
        self._maps = maps

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._maps[rank][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def meet(self) -> None:
        dist.barrier()
