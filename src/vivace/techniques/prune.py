"""Remove the denoiser's blocks that change their input least.

Why: every block adds something to its input, and some add next to nothing. A removed block costs neither time nor
    memory, and pruning needs no kernels and works on any GPU.
Costs: another image, and with a larger share a worse one: published pruned models were retrained afterwards, which
    vivace does not do. On both embedded models it is further from the baseline than fewer steps of the same work
    (docs/step-curves.md): measure both. To choose the blocks, `pictures` of the workload's prompts are generated first.
Needs: a diffusers UNet, or a transformer with lists of blocks (FLUX, SD 3.5, Z-Image, Qwen-Image, PixArt).
Source: Men et al., "ShortGPT", arXiv 2403.03853 (a block's influence); Kim et al., "BK-SDM", arXiv 2305.15798 (which
    parts of a UNet can be removed).

A block's influence is the norm of what it adds over the norm of its input, averaged over all steps of these images.
Removable parts of a UNet are those whose output has the shape of their input: attention with its feed-forward, and
ResNet blocks after the first of their resolution. At least one block of each list stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vivace.errors import NoEffect, UnusableModel
from vivace.machinery.technique import (
    Effect,
    Facts,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    call_parameters,
    knob,
    without_clashes,
)

_LISTS = ("transformer_blocks", "single_transformer_blocks", "layers")


class Prune(Technique):
    name: ClassVar[str] = "prune"
    summary: ClassVar[str] = "the denoiser's least influential blocks are removed"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.PRUNE,
        owns="blocks",
        same_picture=False,
        targetable=("denoiser",),
        default_targets=("denoiser",),
        provides=frozenset({Trait.PRUNED}),
        needs_prompts=True,
        is_stored=True,
    )

    share: float = knob(
        0.1, gt=0, le=0.9, tune=[0.1, 0.2], about="share of the removable blocks, at least one block"
    )
    pictures: int = knob(2, ge=1, le=64, tune=[2], about="number of prompts to choose the blocks with")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if not _blocks(denoiser):
            return f"{type(denoiser).__name__} has no removable blocks"
        if _chooses(target) and not target.request.prompts:
            return (
                "it needs prompts to choose the blocks; give some: vivace.apply(pipe, recipe, prompts=[...])"
            )
        return None

    def apply(self, target: Target) -> Effect:
        if target.model.has_random_weights:
            return self.predict(target)
        blocks = _blocks(target.module("denoiser"))
        prompts = [target.request.prompts[k % len(target.request.prompts)] for k in range(self.pictures)]
        influence = _influence(target, blocks, prompts)
        how = f"least influence over {self.pictures} image{'s' if self.pictures > 1 else ''}"
        return self._without(target, sorted(blocks, key=lambda block: influence[block.name]), how)

    def predict(self, target: Target) -> Effect:
        """Remove evenly spaced blocks: without trained weights all are alike, so any choice saves as much."""
        blocks = _blocks(target.module("denoiser"))
        number = self._number(blocks)
        ordered = [blocks[(2 * k + 1) * len(blocks) // (2 * number)] for k in range(number)]
        return self._without(target, ordered, "evenly spaced: random weights have no meaningful influence")

    def rebuild(self, target: Target, changed: Facts) -> None:
        denoiser = target.module("denoiser")
        by_name = {block.name: block for block in _blocks(denoiser)}
        names = [name for name in str(changed.get("denoiser.taken_out", "")).split(", ") if name]
        if unknown := [name for name in names if name not in by_name]:
            raise UnusableModel(f"there is no block {unknown[0][:80]!r} in this {type(denoiser).__name__}")
        _remove(denoiser, [by_name[name] for name in names], len(names))

    def _number(self, blocks: list[_Block]) -> int:
        return max(1, int(self.share * len(blocks)))

    def _without(self, target: Target, ordered: list[_Block], how: str) -> Effect:
        """Remove blocks, the first ones first.

        Raises:
            NoEffect: none can be removed.
        """
        denoiser = target.module("denoiser")
        blocks = _blocks(denoiser)
        number = self._number(blocks)
        before = sum(p.numel() for p in denoiser.parameters())
        names = _remove(denoiser, ordered, number)
        if not names:
            raise NoEffect("each list has a single block, which must stay")
        removed = before - sum(p.numel() for p in denoiser.parameters())
        return Effect(
            changed={
                "denoiser.blocks_taken_out": len(names),
                "denoiser.blocks_that_could_go": len(blocks),
                "denoiser.parameters_less": f"{removed / before:.1%}",
                "denoiser.taken_out": ", ".join(sorted(names)),
                "chosen": how,
            }
        )


@dataclass(frozen=True)
class _Block:
    """A removable block.

    name: its path in the denoiser. in_list: it can be deleted from its list; otherwise an identity replaces it.
    """

    name: str
    module: Any
    in_list: bool


def _chooses(target: Target) -> bool:
    return target.model.has_weights and not target.model.has_random_weights


def _blocks(denoiser: Any) -> list[_Block]:
    """Return the removable blocks, in the order of the denoiser's modules."""
    if hasattr(denoiser, "down_blocks"):
        return _unet_blocks(denoiser)
    blocks = []
    for name in _LISTS:
        for number, block in enumerate(getattr(denoiser, name, None) or ()):
            # SD3's last block returns no text.
            if not getattr(block, "context_pre_only", False):
                blocks.append(_Block(f"{name}.{number}", block, in_list=True))
    return blocks


def _unet_blocks(unet: Any) -> list[_Block]:
    blocks = []
    for name, module in unet.named_modules():
        if name.rpartition(".")[0].endswith("resnets"):
            same_shape = module.in_channels == module.out_channels and module.conv_shortcut is None
            if same_shape and not module.up and not module.down:
                blocks.append(_Block(name, module, in_list=False))
        elif name.rpartition(".")[0].endswith("attentions") and hasattr(module, "transformer_blocks"):
            inner = list(module.transformer_blocks)
            if len(inner) == 1:
                blocks.append(_Block(name, module, in_list=False))
            else:
                blocks += [
                    _Block(f"{name}.transformer_blocks.{k}", b, in_list=True) for k, b in enumerate(inner)
                ]
    return blocks


def _influence(target: Target, blocks: Sequence[_Block], prompts: Sequence[str]) -> dict[str, float]:
    """Return the influence of each block; infinite if it was never called."""
    import torch

    changes: dict[str, list[Any]] = {block.name: [] for block in blocks}
    accepted = call_parameters(target.pipe)
    call = {k: v for k, v in target.model.defaults.items() if k in accepted} | dict(target.request.inputs)
    with _watching(blocks, changes):
        for number, prompt in enumerate(prompts):
            target.pipe(
                prompt=prompt,
                generator=torch.Generator("cpu").manual_seed(number),
                **without_clashes(target.pipe, call),
            )
    ratios = {
        name: float(torch.stack(ratios).mean()) if ratios else float("inf")
        for name, ratios in changes.items()
    }
    return {name: ratio if ratio == ratio else float("inf") for name, ratio in ratios.items()}  # nan last


@contextlib.contextmanager
def _watching(blocks: Sequence[_Block], changes: dict[str, list[Any]]) -> Iterator[None]:
    def look(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).float()
            changes[name].append((_hidden(output).float() - before).norm() / before.norm())

        return hook

    hooks = [block.module.register_forward_hook(look(block.name), with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hidden(output: Any) -> Any:
    """Return the image tokens of a block's output, which may be the last of a tuple or in a `sample`."""
    if hasattr(output, "sample"):
        return output.sample
    return output[-1] if isinstance(output, tuple) else output


def _remove(denoiser: Any, ordered: Sequence[_Block], number: int) -> list[str]:
    """Remove the first `number` blocks, but never the last of a list; return their names."""
    removed: list[_Block] = []
    left: dict[str, int] = {}
    for block in ordered:
        if len(removed) == number:
            break
        parent = block.name.rpartition(".")[0]
        if block.in_list:
            if left.setdefault(parent, len(denoiser.get_submodule(parent))) == 1:
                continue
            left[parent] -= 1
        removed.append(block)
    # From the end, so that the indices of the others stay valid.
    for block in sorted(removed, key=lambda block_: -int(block_.name.rpartition(".")[2])):
        parent, _, index = block.name.rpartition(".")
        if block.in_list:
            del denoiser.get_submodule(parent)[int(index)]
        else:
            denoiser.get_submodule(parent)[int(index)] = _identity(
                hasattr(block.module, "transformer_blocks")
            )
    return [block.name for block in removed]


def _identity(in_tuple: bool) -> Any:
    """Return a module that returns its first argument, in a tuple if it replaces a UNet's attention."""
    import torch

    class PassThrough(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return (hidden_states,) if in_tuple else hidden_states

        def __reduce__(self) -> Any:  # for copies in other processes, since a local class cannot be pickled
            return _identity, (in_tuple,)

    return PassThrough()
