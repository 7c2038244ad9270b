"""Prefetch layers: copy them to the GPU before they are called, on a stream beside the compute stream.

The layer that followed the last two in earlier calls is expected next; a prefetched layer that is not called is
dropped. How much is prefetched is counted in bytes, since layers differ in size by a factor of thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vivace.machinery.offloading.offloaded_module import OffloadedModule, write_copies

if TYPE_CHECKING:
    import torch

    from vivace.machinery.offloading.offloaded_module import Copy

PREFETCH_BYTES = 2**28
"""Bytes that are prefetched, plus up to one layer: the largest of each of FLUX's blocks has 113 MB in bf16."""

_BATCHES = 4
"""The streams wait for each other once for each quarter of these bytes, not for each layer."""

_Pair = tuple[OffloadedModule | None, OffloadedModule]


class Prefetcher:
    """Copies the layers that are likely to be called next while one computes.

    Attributes:
        num_prefetched: layers that were prefetched in time in the last call.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.num_prefetched = 0
        self._num_prefetched = 0
        """Number of prefetched layers in the current call."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._followers: dict[_Pair, OffloadedModule] = {}
        """The layer that followed a pair of layers."""
        self._pair: _Pair | None = None
        """The last two layers called."""
        self._tail: _Pair | None = None
        """The last two layers expected, if any."""
        self._pending: dict[OffloadedModule, tuple[int, _Batch]] = {}
        """The prefetched layers in the order in which they are expected, with their bytes."""
        self._pending_bytes = 0

    def onload(self, layer: OffloadedModule) -> int:
        """Onload a layer that is called, and prefetch the next ones. Returns the bytes copied for all of them."""
        num_bytes = 0
        if layer in self._pending:
            while (expected := next(iter(self._pending))) is not layer:
                self._drop(expected)
            self._take(layer)
            self._num_prefetched += 1
        else:
            self.cancel()
            num_bytes += layer.onload()
        if self._pair is not None:
            self._followers[self._pair] = layer
        self._pair = (self._pair[1] if self._pair is not None else None, layer)
        return num_bytes + self._prefetch(layer)

    def end_call(self) -> None:
        self.cancel()
        if self._pair is not None:
            self.num_prefetched, self._num_prefetched = self._num_prefetched, 0
        self._pair = None

    def cancel(self) -> None:
        """Drop all prefetched layers."""
        for layer in list(self._pending):
            self._drop(layer)
        self._tail = None

    def _prefetch(self, layer: OffloadedModule) -> int:
        if self._pending_bytes > PREFETCH_BYTES - PREFETCH_BYTES // _BATCHES:
            return 0
        batch, before = _Batch(self._stream, layer.device), self._pending_bytes
        pair = self._tail or self._pair
        assert pair is not None
        try:
            while self._pending_bytes < PREFETCH_BYTES:
                following = self._followers.get(pair)
                if following is None or following is layer or following in self._pending:
                    break
                if following.is_onloaded:
                    break  # it computes, and calls this layer
                size = batch.add(following)
                self._pending[following] = size, batch
                self._pending_bytes += size
                pair = self._tail = (pair[1], following)
        finally:
            batch.copy()
        return self._pending_bytes - before

    def _take(self, layer: OffloadedModule) -> None:
        """Remove a layer from the pending ones, once its copies are complete."""
        size, batch = self._pending.pop(layer)
        self._pending_bytes -= size
        batch.wait()

    def _drop(self, layer: OffloadedModule) -> None:
        self._take(layer)
        layer.restore()


class _Batch:
    """Layers that are copied together on a side stream, into memory of the compute stream.

    Args:
        stream: None on devices without streams; then `copy` copies at once.
    """

    def __init__(self, stream: Any, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._copies: list[Copy] = []
        self._event: Any = None
        """Marks the end of the copies; None once the compute stream waits for it."""

    def add(self, layer: OffloadedModule) -> int:
        """Allocate a layer's tensors on the device. Returns their bytes."""
        copies = layer.allocate()
        self._copies += copies
        return sum(copy.nbytes for copy, _ in copies)

    def copy(self) -> None:
        copies, self._copies = self._copies, []
        if not copies or self._stream is None:
            write_copies(copies)
            return
        import torch

        # Kernels that are still queued may use the memory until they have run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            write_copies(copies)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        """Let the compute stream wait for the copies, before anything reads or frees them."""
        event, self._event = self._event, None
        if event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(event)
