"""Layers come to the GPU before their turn, on a stream beside the one that computes.

Which comes next is what came after the last two the last time; what was fetched and did not come is dropped. How much
is fetched ahead is counted in bytes, since layers differ by a factor of thousands.
"""

from __future__ import annotations

from typing import Any

from vivace.offloading.components import Copy, Part, write_copies

AHEAD = 2**28
"""Bytes that are fetched ahead, and up to one layer more: FLUX's largest of each block has 113 MB in bf16."""

_BATCHES = 4
"""In how many pieces: a stream waits for the other once for each, not for each layer."""

_Pair = tuple[Part | None, Part]


class Ahead:
    """Fetches the layers that are likely to come next, while the one that has come computes."""

    def __init__(self, device: Any) -> None:
        import torch

        self.last = 0
        """How many came in time in the last call."""
        self._now = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._then: dict[_Pair, Part] = {}
        """What came after two."""
        self._pair: _Pair | None = None
        """The two that came last."""
        self._tail: _Pair | None = None
        """The last two of those that are expected, if any is."""
        self._fetched: dict[Part, tuple[int, _Batch]] = {}
        """In the order in which they are expected, with their bytes."""
        self._waiting = 0
        """Bytes of them all."""

    def comes(self, part: Part) -> int:
        """Its turn has come. Returns the bytes that were copied, of what was fetched ahead as well."""
        num_bytes = 0
        if part in self._fetched:
            while (expected := next(iter(self._fetched))) is not part:
                self._drop(expected)
            self._take(part)
            self._now += 1
        else:
            self.drop_all()
            num_bytes += part.come()
        if self._pair is not None:
            self._then[self._pair] = part
        self._pair = (self._pair[1] if self._pair is not None else None, part)
        return num_bytes + self._fetch(part)

    def end(self) -> None:
        self.drop_all()
        if self._pair is not None:
            self.last, self._now = self._now, 0
        self._pair = None

    def drop_all(self) -> None:
        """Nothing is expected any more."""
        for part in list(self._fetched):
            self._drop(part)
        self._tail = None

    def _fetch(self, part: Part) -> int:
        if self._waiting > AHEAD - AHEAD // _BATCHES:
            return 0
        batch, before = _Batch(self._stream, part.device), self._waiting
        pair = self._tail or self._pair
        assert pair is not None
        try:
            while self._waiting < AHEAD:
                following = self._then.get(pair)
                if following is None or following is part or following in self._fetched:
                    break
                if following.is_here:
                    break  # it computes, and this comes within it
                size = batch.add(following)
                self._fetched[following] = size, batch
                self._waiting += size
                pair = self._tail = (pair[1], following)
        finally:
            batch.copy()
        return self._waiting - before

    def _take(self, part: Part) -> None:
        """Away from what is expected. It is written to until its batch is there."""
        size, batch = self._fetched.pop(part)
        self._waiting -= size
        batch.wait()

    def _drop(self, part: Part) -> None:
        self._take(part)
        part.withdraw()


class _Batch:
    """What is copied at once on a stream of its own, into memory of the stream that computes.

    Args:
        stream: None where nothing has streams; then copies are made by whoever asks for them.
    """

    def __init__(self, stream: Any, device: Any) -> None:
        self._stream = stream
        self._device = device
        self._copies: list[Copy] = []
        self._event: Any = None
        """When the copies are there; None as well once the stream that computes waits for that."""

    def add(self, part: Part) -> int:
        """Returns its bytes."""
        copies = part.make_room()
        self._copies += copies
        return sum(copy.nbytes for copy, _ in copies)

    def copy(self) -> None:
        copies, self._copies = self._copies, []
        if not copies or self._stream is None:
            write_copies(copies)
            return
        import torch

        # The memory may be what was given up by kernels that are still to run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            write_copies(copies)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        """Before anything of it is read or given up."""
        event, self._event = self._event, None
        if event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(event)
