"""Schema of a family: where the blocks of its denoiser are, how its tokens are laid out, how it is guided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call: by position, and by name."""


class Handle(Protocol):
    """Ends a watch."""

    def remove(self) -> None: ...


@dataclass(frozen=True)
class Handles:
    """Ends several watches."""

    handles: tuple[Handle, ...]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


Note = Callable[[Any], None]
Watch = Callable[[Any, Note], Handle]
"""Calls `note` with a tensor of each forward of the transformer, until its handle is removed."""


@dataclass(frozen=True)
class Blocks:
    """The chain of blocks of a transformer, as one residual: what it adds to the image's tokens.

    Attributes:
        chains: attributes that hold lists of blocks, in the order in which tokens pass them.
        entering, leaving: watch the tokens (batch, tokens, channels) in front of the first block and behind the last:
            all that blocks are given, or the last of them, which are the image's.
            They watch other modules than blocks: where one compiled code serves all blocks, it does not tell their
            hooks apart.
        modulated: of the first block, its image tokens and the other arguments of its call: the tokens as its first
            attention gets them, normed and modulated by the timestep.
        grid: rows and columns of the image's tokens, which come first, from the transformer and the arguments of its
            call.
        text: a block's argument that holds the text's tokens, by name or position; None where blocks take none, or get
            them in one tensor with the image's.
        returns_text_first: whether blocks return text and image, or image and text.
        joined: those of the chains whose blocks take and return text and image as one tensor, the text first, although
            those before them keep the two apart.
        image_starts_at: from a block's call, how many of the tokens that it is given are in front of the image's and
            computed in the first step alone, so that no later step can reuse their results.
        added_between: names of arguments that add something between blocks (ControlNets), which a residual contains.
        outside: what a step computes besides embeddings even if the blocks are skipped.
    """

    chains: tuple[str, ...]
    entering: Watch
    leaving: Watch
    modulated: Callable[[Any, Any, Arguments], torch.Tensor]
    grid: Callable[[Any, Arguments], tuple[int, int]]
    text: str | int | None = "encoder_hidden_states"
    returns_text_first: bool = True
    joined: tuple[str, ...] = ()
    image_starts_at: Callable[[Arguments], int] = lambda _: 0
    added_between: tuple[str, ...] = ()
    outside: str = ""

    def text_of(self, call: Arguments) -> Any:
        """Return the text's tokens among a block's arguments, or None."""
        args, kwargs = call
        if self.text is None:
            return None
        return kwargs[self.text] if isinstance(self.text, str) else args[self.text]

    def returned(self, image: Any, text: Any) -> Any:
        """Return what a block returns for these tokens; `text` is None where it returns the image's alone."""
        if text is None:
            return image
        return (text, image) if self.returns_text_first else (image, text)

    def tokens_in(self, returned: Any) -> tuple[Any, Any]:
        """Return the tokens of the image, and of the text or None, from what a block has returned."""
        if not isinstance(returned, tuple):
            return returned, None
        first, second = returned
        return (second, first) if self.returns_text_first else (first, second)


@dataclass(frozen=True)
class Doubled:
    """Guidance as one call of a doubled batch.

    Attributes:
        off: at or below this guidance scale the batch is not doubled.
    """

    off: float = 1.0


@dataclass(frozen=True)
class Family:
    """The facts about an architecture.

    Attributes:
        name: as its publishers write it.
        denoiser: the denoiser's class in diffusers.
        pipelines: the text-to-image pipelines that have it.
        embeddings: for each pipeline, names of the call's arguments for the values that `encode_prompt` returns; None
            for a value that the pipeline computes again.
        blocks: None where steps cannot skip them: a UNet's are no chain.
        doubled: how guidance doubles the batch; None if it does not.
        second_call_above: the guidance scale above which a pipeline that guides in two calls makes the second.
        is_transformer: whether the denoiser is one; otherwise it is a UNet.
        not_by_diffusers: why diffusers' own caches of blocks do not fit; "" if they do, or the denoiser has no chain.
        text_in_first_step_alone: whether the pipeline keeps what the first step makes of the text's tokens, and gives
            later steps the image's alone; so what is kept of the first step is longer, the image's tokens last.
        text_of_any_length: whether the text is not padded to a fixed number of tokens, so that GPUs may not share it.
        not_captured: of a denoiser, why its forward is not captured as one CUDA graph, as a sentence; "" if it can be.
        rows_in_lists: whether the denoiser takes a list of one tensor for each row of the batch, and returns one.
        pads_captions: whether the denoiser makes each text as long as a multiple of 32 tokens, by its `_pad_with_ids`.
        cells: latent cells on a side of a token, by the denoiser.
        last_text_state: for each pipeline that reads of a language model nothing but the states behind some layers, the
            last of them: 27 is that behind 27 layers, -1 that behind all.
        padding_unread_by: the pipelines that read states of prompts' own tokens alone, although they have the text
            encoder compute those of padding behind them, too.
        side_in_tokens: images are so many tokens, or a multiple of that, wide and high.
    """

    name: str
    denoiser: str
    pipelines: tuple[str, ...]
    embeddings: dict[str, tuple[str | None, ...]]
    blocks: Blocks | None = None
    doubled: Doubled | None = None
    second_call_above: float = 1.0
    is_transformer: bool = True
    not_by_diffusers: str = ""
    rows_in_lists: bool = False
    text_in_first_step_alone: bool = False
    text_of_any_length: bool = False
    not_captured: Callable[[Any], str] = lambda _: ""
    pads_captions: bool = False
    cells: Callable[[Any], int] = lambda _: 2
    last_text_state: Mapping[str, int] = field(default_factory=dict)
    padding_unread_by: tuple[str, ...] = ()
    side_in_tokens: int = 1


def output_of(path: str) -> Watch:
    """Watch what a module returns."""

    def watch(transformer: Any, note: Note) -> Handle:
        handle: Handle = transformer.get_submodule(path).register_forward_hook(
            lambda _, __, output: note(output)
        )
        return handle

    return watch


def input_of(path: str) -> Watch:
    """Watch a module's first argument."""

    def watch(transformer: Any, note: Note) -> Handle:
        handle: Handle = transformer.get_submodule(path).register_forward_pre_hook(
            lambda _, args: note(args[0])
        )
        return handle

    return watch


def returned_by(method: str) -> Watch:
    """Watch the first of the values that a method returns, which is replaced on the instance."""

    def watch(transformer: Any, note: Note) -> Handle:
        whole = getattr(transformer, method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            returned = whole(*args, **kwargs)
            note(returned[0])
            return returned

        setattr(transformer, method, noting)
        return _Restored(transformer, method)

    return watch


@dataclass(frozen=True)
class _Restored:
    owner: Any
    method: str

    def remove(self) -> None:
        vars(self.owner).pop(self.method, None)


def grid_of_latents(patch: Callable[[Any], int]) -> Callable[[Any, Arguments], tuple[int, int]]:
    """Return the grid of a transformer that cuts latents (batch, channels, height, width) into patches."""

    def grid(transformer: Any, call: Arguments) -> tuple[int, int]:
        args, kwargs = call
        latents = args[0] if args else kwargs["hidden_states"]
        size = patch(transformer)
        return latents.shape[-2] // size, latents.shape[-1] // size

    return grid


def grid_of_ids(_: Any, call: Arguments) -> tuple[int, int]:
    """Return the grid of a transformer that takes the image's positions (tokens, 3 or 4): image, row, column.

    Tokens of other images, which are given to be edited, come after its own.

    Raises:
        ValueError: the ids are not those of a whole image, row by row.
    """
    import torch

    ids_given = call[1]["img_ids"]
    ids = (ids_given[0] if ids_given.ndim == 3 else ids_given)[:, :3].detach().cpu().long()
    own = ids[ids[:, 0] == 0]
    rows, columns = (int(own[:, axis].max()) + 1 if len(own) else 0 for axis in (1, 2))
    count = rows * columns
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    if not 0 < count == len(own) or not torch.equal(ids[:count], torch.nn.functional.pad(cells, (1, 0))):
        raise ValueError(f"the ids of the {len(ids)} image tokens are not those of an image, row by row")
    return rows, columns
