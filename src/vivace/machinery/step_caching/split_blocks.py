"""A transformer's blocks in three parts: the first, the middle ones, and the last.

The middle ones are one residual, which a step cache keeps and adds again; the others are always computed. Where the
blocks are is known of each family in `vivace.architectures`.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vivace.architectures import Blocks
from vivace.machinery.step_caching.block_residual import blocks_of, own_arguments, stand_in_for
from vivace.machinery.step_caching.engine import StepForwards

if TYPE_CHECKING:
    import torch

    Role = Literal["noting", "passing", "adding", "resuming"]
    Tokens = tuple[torch.Tensor, ...]
    """The image's tokens (batch, tokens, channels), and the text's where a block takes them apart."""


def num_blocks(transformer: Any) -> int:
    return sum(len(getattr(transformer, chain)) for chain in blocks_of(transformer).chains)


@dataclass
class _SplitPass:
    """Where the blocks are split, and the tensors within one forward, cleared after it, so that a graph carries no
    state.

    `first` and `end` are the numbers of the first middle block, and of the first behind them; `joined` says of each
    block whether it takes text and image as one tensor.
    """

    blocks: Blocks
    first: int
    end: int
    joined: list[bool]
    begin: Tokens = ()
    first_output: Any = None
    entering: Tokens = ()
    leaving: Tokens = ()
    residual: Tokens = ()

    def clear(self) -> None:
        self.begin = self.entering = self.leaving = self.residual = ()
        self.first_output = None

    def first_residual(self) -> torch.Tensor:
        """Return what the first blocks add to the image's tokens."""
        joins = self.joined[self.first - 1] and not self.joined[0]
        begin = (_joined(self.begin) if joins else self.begin)[0]
        after = _returned_tokens(self.blocks, self.first_output)[0]
        # In front of the image's tokens there may be others.
        return after[:, after.shape[1] - begin.shape[1] :] - begin

    def middle_residual(self, with_text: bool) -> Tokens:
        """Return what the middle blocks add; to the image's tokens alone if no block takes the text after them."""
        outputs = self.leaving if with_text else self.leaving[:1]
        return tuple(after - before for after, before in zip(outputs, self._entering(), strict=False))

    def with_residual(self, tokens: Tokens) -> Tokens:
        """Return the tokens behind the middle blocks, by the residual that is kept of them."""
        added = zip(self._entering(), self.residual, strict=False)
        # Without a residual of the text's, no block after this one takes the text.
        return (*(tensor + residual for tensor, residual in added), *tokens[len(self.residual) :])

    def _entering(self) -> Tokens:
        """Return the tokens in front of the middle blocks, as the last of those blocks takes them."""
        joins = self.joined[self.end - 1] and not self.joined[self.first]
        return _joined(self.entering) if joins else self.entering


def split_forwards(transformer: Any, first: int, last: int) -> StepForwards:
    """Return the transformer's forwards that compute, or reuse, the residual of all but the first and last blocks.

    `look` computes the first blocks. It returns what they add to the image's tokens, and what the last of them
    returned, from which `compute_on` and `reuse_on` go on.
    """
    split = _SplitForwards(transformer, first, last)
    return StepForwards(split.compute, split.reuse, split.look, split.compute_on, split.reuse_on)


class _SplitForwards:
    """The forwards of `split_forwards`.

    The transformer's own forward runs over chains of the same lengths, in which stand-ins without tensors of their own
    hand on their input. So what ControlNets add between blocks is added where it was.
    """

    def __init__(self, transformer: Any, first: int, last: int) -> None:
        self._transformer = transformer
        self._forward = type(transformer).forward
        self._last = last
        blocks = blocks_of(transformer)
        self._places = [
            (chain, index) for chain in blocks.chains for index in range(len(getattr(transformer, chain)))
        ]
        number = len(self._places)
        end = number - last
        assert 0 < first < end <= number
        self._pass = _SplitPass(blocks, first, end, [chain in blocks.joined for chain, _ in self._places])
        noting: dict[int, Role] = dict.fromkeys({first, end - 1}, "noting")
        adding: dict[int, Role] = dict.fromkeys(range(first, end), "adding")
        resuming: dict[int, Role] = dict.fromkeys(range(first), "resuming")
        looking: dict[int, Role] = dict.fromkeys({0, first - 1}, "noting")
        passing: dict[int, Role] = dict.fromkeys(range(first, number), "passing")
        self._compute_view = self._view(noting)
        self._reuse_view = self._view(adding)
        self._look_view = self._view(looking | passing)
        self._compute_on_view = self._view(noting | resuming)
        self._reuse_on_view = self._view(adding | resuming)

    def compute(self, *args: Any, **kwargs: Any) -> tuple[Any, Tokens]:
        output = self._run(self._compute_view, args, kwargs)
        residual = self._pass.middle_residual(with_text=self._last > 0)
        self._pass.clear()
        return output, residual

    def reuse(self, residual: Tokens, *args: Any, **kwargs: Any) -> Any:
        self._pass.residual = residual
        output = self._run(self._reuse_view, args, kwargs)
        self._pass.clear()
        return output

    def look(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        self._run(self._look_view, args, kwargs)
        returned = self._pass.first_output
        added = self._pass.first_residual()
        self._pass.clear()
        return added, returned

    def compute_on(self, looked: tuple[torch.Tensor, Any], *args: Any, **kwargs: Any) -> tuple[Any, Tokens]:
        self._pass.first_output = looked[1]
        output = self._run(self._compute_on_view, args, kwargs)
        residual = self._pass.middle_residual(with_text=self._last > 0)
        self._pass.clear()
        return output, residual

    def reuse_on(self, looked: tuple[torch.Tensor, Any], residual: Tokens, *args: Any, **kwargs: Any) -> Any:
        self._pass.first_output, self._pass.residual = looked[1], residual
        output = self._run(self._reuse_on_view, args, kwargs)
        self._pass.clear()
        return output

    def _run(self, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(view, *args, **own_arguments(kwargs))[0]

    def _view(self, roles: dict[int, Role]) -> Any:
        import torch

        made = copy.copy(self._transformer)
        made._modules = dict(self._transformer._modules)
        chains: dict[str, list[Any]] = {chain: [] for chain in self._pass.blocks.chains}
        for number, (chain, index) in enumerate(self._places):
            block = getattr(self._transformer, chain)[index]
            role = roles.get(number)
            chains[chain].append(block if role is None else _stand_in()(number, block, role, self._pass))
        for chain, members in chains.items():
            setattr(made, chain, torch.nn.ModuleList(members))
        return made


@functools.cache
def _stand_in() -> Any:
    import torch

    class StandIn(torch.nn.Module):  # type: ignore[misc]
        """Replaces a block: notes its inputs, or passes on other values than the block would return."""

        def __init__(self, number: int, block: Any, role: Role, split: _SplitPass) -> None:
            super().__init__()
            self.block = block if role == "noting" else None
            self.split = split
            self.joined = split.joined[number]
            self.begins = number == 0
            self.ends_first = number == split.first - 1
            self.enters = number == split.first
            self.leaves = number == split.end - 1
            self.resumes = role == "resuming" and self.ends_first
            self.adds = role == "adding" and self.leaves
            # SD3's transformer asks its blocks for it where a ControlNet adds something.
            self.context_pre_only = getattr(block, "context_pre_only", None)
            stand_in_for(block, self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            split, blocks = self.split, self.split.blocks
            tokens = _argument_tokens(blocks, self.joined, args, kwargs)
            start = blocks.image_starts_at((args, kwargs))
            if self.begins:
                split.begin = _from(start, tokens)
            if self.enters:
                split.entering = _from(start, tokens)
            if self.block is not None:
                returned = self.block(*args, **kwargs)
            elif self.resumes:
                returned = split.first_output
            else:
                returned = _returned(blocks, split.with_residual(tokens) if self.adds else tokens)
            if self.ends_first:
                split.first_output = returned
            if self.leaves:
                split.leaving = _from(start, _returned_tokens(blocks, returned))
            return returned

    return StandIn


def _argument_tokens(blocks: Blocks, joined: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
    image = blocks.image_of((args, kwargs))
    text = None if joined else blocks.text_of((args, kwargs))
    return (image,) if text is None else (image, text)


def _from(start: int, tokens: Tokens) -> Tokens:
    return (tokens[0][:, start:], *tokens[1:]) if start else tokens


def _returned(blocks: Blocks, tokens: Tokens) -> Any:
    image, text = (*tokens, None)[:2]
    return blocks.returned(image, text)


def _returned_tokens(blocks: Blocks, returned: Any) -> Tokens:
    image, text = blocks.tokens_in(returned)
    return (image,) if text is None else (image, text)


def _joined(tokens: Tokens) -> Tokens:
    import torch

    image, text = tokens
    return (torch.cat([text, image], dim=1),)
