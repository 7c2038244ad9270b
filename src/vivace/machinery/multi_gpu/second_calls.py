"""Guidance in two calls of the denoiser a step: a peer computes the second while this process computes the first.

The second call of a step is known when the first is made: it has the same latents and timestep, and the text that the
second call of the step before had. So from the second step on it is sent to a peer in advance. When it is made, it is
compared with what was sent: the same objects, or, for what pipelines compute anew in each call, the same values. These
are compared on the device, and looked at when the image is done, so that no step waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported

if TYPE_CHECKING:
    import torch

Arguments = dict[str, Any]
_LATENTS = "hidden_states"


class SecondCalls:
    """The state of one image's calls.

    Args:
        send: sends arguments to the peer.
        receive: returns what it made of them: an output like the one that it is given.

    Attributes:
        num_shared: steps whose second call the peer computed, over all images.
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
        """End an image.

        Raises:
            Unsupported: a second call had other values than was assumed, so that the image is not the image.
        """
        import torch

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
            if _is_tensor(value):
                recomputed.append((value != sent[name]).any())
        self._differences += recomputed
        return True


def _other_arguments(first: Arguments, second: Arguments) -> Arguments:
    """Return the second call's arguments that have other values than the first one's."""
    import torch

    others = {}
    for name, value in second.items():
        before = first.get(name)
        same = value is before or (_may_be_equal(value, before) and not _is_tensor(value))
        if not same and _is_tensor(value) and _may_be_equal(value, before):
            same = torch.equal(value, before)
        if not same:
            others[name] = value
    return others


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _may_be_equal(value: Any, other: Any) -> bool:
    """Whether values are equal, as far as can be decided without reading tensors."""
    if _is_tensor(value) != _is_tensor(other):
        return False
    if _is_tensor(value):
        attributes = ("shape", "dtype", "device")
        return all(getattr(value, name) == getattr(other, name) for name in attributes)
    return type(value) is type(other) and bool(value == other)
