"""A transformer's blocks in three parts: the first, the middle ones, and the last.

The middle ones are one residual, which a step cache keeps and adds again; the others are always computed. Where the
blocks are is known of each family in `vivace.machinery.families`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.machinery.families import Blocks
from vivace.machinery.step_caching.block_residual import blocks_of, own_arguments, stand_in_for
from vivace.machinery.step_caching.cached_denoiser import StepForwards

if TYPE_CHECKING:
    import torch

    Tokens = tuple[torch.Tensor, ...]
    """The image's tokens (batch, tokens, channels), and the text's where a block takes them apart."""


def num_blocks(transformer: Any) -> int:
    """Return the number of a transformer's blocks; see `block_residual.unknown_blocks`."""
    return sum(len(getattr(transformer, chain)) for chain in blocks_of(transformer).chains)


@dataclass
class _SplitPass:
    """Tensors within one forward. Empty between forwards, so that a graph carries no state.

    Attributes:
        begin: the tokens in front of the first block.
        first: what the last of the first blocks returns.
        entering, leaving: the tokens in front of the middle blocks, and behind them.
        residual: what is added in place of the middle blocks.
    """

    begin: Tokens = ()
    first: Any = None
    entering: Tokens = ()
    leaving: Tokens = ()
    residual: Tokens = ()

    def clear(self) -> None:
        self.begin = self.entering = self.leaving = self.residual = ()
        self.first = None


def split_forwards(transformer: Any, first: int, last: int) -> StepForwards:
    """Return the transformer's forwards that compute, or reuse, the residual of all but the first and last blocks.

    `look` computes the first blocks. It returns what they add to the image's tokens, and what the last of them
    returned, from which `compute_on` and `reuse_on` go on.

    The transformer's own forward runs over chains of the same lengths, in which some blocks have stand-ins that hand
    on their input. So what is added between blocks (ControlNets) is added where it was. What a stand-in hands on is
    replaced where its part ends. Stand-ins have no tensors of their own, so that what moves the
    transformer moves theirs.

    Args:
        first, last: how many blocks are always computed; there are more than these.
    """
    import torch

    passing = _SplitPass()
    blocks = blocks_of(transformer)
    places = [(chain, index) for chain in blocks.chains for index in range(len(getattr(transformer, chain)))]
    end = len(places) - last
    assert 0 < first < end <= len(places)
    joined = [chain in blocks.joined for chain, _ in places]
    joins_in_first = joined[first - 1] and not joined[0]
    joins_in_middle = joined[end - 1] and not joined[first]
    plain = type(transformer).forward

    class Stand(torch.nn.Module):  # type: ignore[misc]
        """Replaces a block: notes its inputs, or passes on other values than the block would return."""

        def __init__(self, number: int, block: Any, role: str) -> None:
            super().__init__()
            self.block = block if role == "noting" else None
            self.joined = joined[number]
            self.begins = number == 0
            self.ends_first = number == first - 1
            self.enters = number == first
            self.leaves = number == end - 1
            self.resumes = role == "resuming" and self.ends_first
            self.adds = role == "adding" and self.leaves
            # SD3's transformer asks its blocks for it where a ControlNet adds something.
            self.context_pre_only = getattr(block, "context_pre_only", None)
            stand_in_for(block, self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            tokens = _argument_tokens(blocks, self.joined, args, kwargs)
            start = blocks.image_starts_at((args, kwargs))
            if self.begins:
                passing.begin = _from(start, tokens)
            if self.enters:
                passing.entering = _from(start, tokens)
            if self.block is not None:
                returned = self.block(*args, **kwargs)
            elif self.resumes:
                returned = passing.first
            elif self.adds:
                added = zip(entering(), passing.residual, strict=False)
                # Without a residual of the text's, no block after this one takes the text.
                tokens = (
                    *(tensor + residual for tensor, residual in added),
                    *tokens[len(passing.residual) :],
                )
                returned = _returned(blocks, tokens)
            else:
                returned = _returned(blocks, tokens)
            if self.ends_first:
                passing.first = returned
            if self.leaves:
                passing.leaving = _from(start, _returned_tokens(blocks, returned))
            return returned

    def entering() -> Tokens:
        """Return the tokens in front of the middle blocks, as the last of those blocks takes them."""
        return _joined(passing.entering) if joins_in_middle else passing.entering

    def view(roles: dict[int, str]) -> Any:
        """Return the transformer with stand-ins; it shares all else."""
        made = copy.copy(transformer)
        made._modules = dict(transformer._modules)
        for chain in blocks.chains:
            members = []
            for number, (own, index) in enumerate(places):
                if own == chain:
                    block = getattr(transformer, chain)[index]
                    members.append(Stand(number, block, roles[number]) if number in roles else block)
            setattr(made, chain, torch.nn.ModuleList(members))
        return made

    heads, middle, after = range(first), range(first, end), range(first, len(places))
    noting = dict.fromkeys({first, end - 1}, "noting")
    adding = dict.fromkeys(middle, "adding")
    resuming = dict.fromkeys(heads, "resuming")
    views = {
        "compute": view(noting),
        "reuse": view(adding),
        "look": view(dict.fromkeys({0, first - 1}, "noting") | dict.fromkeys(after, "passing")),
        "compute_on": view(noting | resuming),
        "reuse_on": view(adding | resuming),
    }

    def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(views[name], *args, **own_arguments(kwargs))[0]

    def residual() -> Tokens:
        """Return the residual of the middle blocks; of the image alone if no block is computed after them."""
        outputs = passing.leaving if last else passing.leaving[:1]
        return tuple(after - before for after, before in zip(outputs, entering(), strict=False))

    def compute(*args: Any, **kwargs: Any) -> tuple[Any, Tokens]:
        output = run("compute", args, kwargs)
        kept = residual()
        passing.clear()
        return output, kept

    def reuse(kept: Tokens, *args: Any, **kwargs: Any) -> Any:
        passing.residual = kept
        output = run("reuse", args, kwargs)
        passing.clear()
        return output

    def look(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        run("look", args, kwargs)
        begin = _joined(passing.begin) if joins_in_first else passing.begin
        returned = passing.first
        after = _returned_tokens(blocks, returned)[0]
        # In front of the image's tokens there may be others.
        added = after[:, after.shape[1] - begin[0].shape[1] :] - begin[0]
        passing.clear()
        return added, returned

    def compute_on(looked: tuple[torch.Tensor, Any], *args: Any, **kwargs: Any) -> tuple[Any, Tokens]:
        passing.first = looked[1]
        output = run("compute_on", args, kwargs)
        kept = residual()
        passing.clear()
        return output, kept

    def reuse_on(looked: tuple[torch.Tensor, Any], kept: Tokens, *args: Any, **kwargs: Any) -> Any:
        passing.first, passing.residual = looked[1], kept
        output = run("reuse_on", args, kwargs)
        passing.clear()
        return output

    return StepForwards(compute, reuse, look, compute_on, reuse_on)


def _argument_tokens(blocks: Blocks, joined: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
    """Return the tokens among a block's arguments."""
    image = args[0] if args else kwargs["hidden_states"]
    text = None if joined else blocks.text_of((args, kwargs))
    return (image,) if text is None else (image, text)


def _from(start: int, tokens: Tokens) -> Tokens:
    """Return the tokens without the first ones of the image's tensor."""
    return (tokens[0][:, start:], *tokens[1:]) if start else tokens


def _returned(blocks: Blocks, tokens: Tokens) -> Any:
    """Return the output of a block."""
    image, text = (*tokens, None)[:2]
    return blocks.returned(image, text)


def _returned_tokens(blocks: Blocks, returned: Any) -> Tokens:
    """Return the tokens in a block's output. SD3's last one returns no text."""
    image, text = blocks.tokens_in(returned)
    return (image,) if text is None else (image, text)


def _joined(tokens: Tokens) -> Tokens:
    """Return the tokens of text and image in one tensor, the text first."""
    import torch

    image, text = tokens
    return (torch.cat([text, image], dim=1),)
