"""One image over several GPUs of a host: each computes its shard of every forward of the denoiser.

Why: the denoiser takes nearly all of an image's time. `cfg` shards the rows of its batch: with classifier-free
    guidance, one GPU computes the conditional and one the unconditional branch, also where they are two calls of one
    row (Qwen-Image, FLUX's true CFG), from the second step on. The other modes shard a transformer's
    tokens. Each GPU runs all layers on its own tokens; in attention, `ulysses` exchanges tokens for heads (each GPU has
    all tokens of some heads), `all_gather` gives every GPU all keys and values and computes attention at once, and
    `ring` computes it in parts, one GPU's keys and values at a time, and merges them.
Costs: the whole denoiser's memory on every GPU: weights are replicated. Text encoders, VAE and scheduler run on the
    first GPU alone, while the others wait. The peer processes start and compile within the first call.
Needs: GPUs that this process sees, NVLink between them for all modes but `cfg`. `cfg`: a forward of two rows or more,
    or guidance in two calls; with one row (guidance off, or cut off), the first GPU computes alone. The others: a
    transformer with diffusers' context-parallel plan (`_cp_plan`), tokens that divide evenly, and heads that do for
    `ulysses`. `all_gather`: FLUX. `ring`: CUDA, and bf16 or fp16. Add `cuda_graph`: the less each GPU computes, the
    sooner it waits for its CPU.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; Liu et al., Ring Attention, arXiv 2310.01889. For FLUX,
    `ulysses` and `all_gather` are our own (`flux_tokens`); `ring`, and `ulysses` of other models, are diffusers'
    ContextParallelConfig. CFG parallel: Fang et al., xDiT, arXiv 2411.01738.

One ordinary call, in a script, a notebook or a server: the peer processes are started from it, and end with the session
or with its process (docs/adr/0006); what it gains is in docs/several-gpus.md. The denoiser as it is at this point of
the recipe, quantised or not, is copied to the other GPUs; later techniques (caches, compile, kernels) are applied in
each process to its own copy. `fused` goes with `all_gather`: where GPUs can write to each other's memory, each copies
its keys and values to all while it computes, and there is a barrier instead of the all-gathers. `cuda_graph` captures
attention's collectives with the rest, at the same call on every GPU; graphs that torch.compile captures by itself
(reduce-overhead) are refused for tokens, since each process would decide alone when. A step cache that keeps the
residual of all blocks works with sharded tokens: a computed step gathers the residual on every GPU, and a hit, which is
hardly any work, is computed by the first GPU alone. The same works between processes on a CPU, which is of use for
tests alone. `guidance` is the old name of `cfg`, and still accepted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from vivace.architectures import FAMILIES, family_of, pipeline_named
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.machinery.lora.hot import follow_writes
from vivace.machinery.multi_gpu.split_tokens import (
    attention_processors,
    can_pad_heads,
    needs_diffusers,
    num_heads,
)
from vivace.machinery.technique import (
    Effect,
    Rule,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
)

if TYPE_CHECKING:
    import torch


class Parallel(Technique):
    name: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "one image over several GPUs"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SHARD,
        owns="GPUs",
        same_picture=True,
        targetable=("denoiser",),
        default_targets=("denoiser",),
        provides=frozenset({Trait.SHARDED}),
        belongs_to_pipeline=True,
    )

    mode: Literal["cfg", "ulysses", "all_gather", "ring"] = knob(
        tune=["cfg", "ulysses", "all_gather", "ring"],
        about="what is sharded: the batch's rows (cfg), or a transformer's tokens",
    )
    gpus: int = knob(2, ge=2, le=8, tune=[2], about="number of GPUs, including this process's own")

    @field_validator("mode", mode="before")
    @classmethod
    def _renamed(cls, value: object) -> object:
        return "cfg" if value == "guidance" else value

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            num_gpus=self.gpus,
            excludes=self._excludes,
        )

    @property
    def _excludes(self) -> tuple[Rule, ...]:
        rules = [
            Rule(
                Trait.OFFLOADED, "offloading moves one GPU's copy of the weights, and every GPU has its own"
            ),
            Rule(Trait.SHARDED, "one technique at a time can shard it", earlier_only=True),
            Rule(Trait.CACHED, "apply the cache by the same recipe, to a fresh pipeline", earlier_only=True),
            Rule(
                Trait.HOOKED,
                "hooks in layers cannot be copied to other GPUs; to store weights in 8 bits take quantize(fp8_weight)",
                earlier_only=True,
            ),
        ]
        if self.mode == "cfg":
            reason = "this cache needs both branches of guidance in one forward, and they are on two GPUs"
            return (*rules, Rule(Trait.MIXES_ROWS, reason))
        rules.append(
            Rule(
                Trait.KEEPS_BLOCK_TENSORS,
                "this cache keeps tensors from inside the blocks, and each GPU has only its own tokens there; take "
                "teacache, magcache, seacache or taylorseer",
            )
        )
        rules.append(
            Rule(
                Trait.CAPTURED_BY_COMPILER,
                "graphs that torch.compile captures contain collectives, and each process would decide by itself when "
                "to capture anew; take compile in its default mode and cuda_graph",
            )
        )
        if self.mode == "ring":
            reason = (
                "ring chooses the attention kernel itself, one that returns the log-sum-exp; take ulysses"
            )
            rules.append(Rule(Trait.KERNEL_CHOSEN, reason))
        return tuple(rules)

    def unsupported(self, target: Target) -> str | None:
        import torch

        machine = target.machine
        if not torch.distributed.is_available():
            return "this PyTorch was built without torch.distributed, which connects the GPUs"
        if machine.backend in ("xpu", "mps"):
            return (
                f"the collectives are NCCL's (RCCL's on AMD GPUs), which {machine.maker}'s GPUs do not have"
            )
        if machine.is_gpu and machine.num_gpus is not None and machine.num_gpus < self.gpus:
            gpus_seen = "1 GPU" if machine.num_gpus == 1 else f"{machine.num_gpus} GPUs"
            return f"asked for {self.gpus} GPUs, and this process sees {gpus_seen} (CUDA_VISIBLE_DEVICES hides others)"
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        family = family_of(denoiser)
        if family is not None and family.rows_in_lists:
            return f"{type(denoiser).__name__} takes its rows in lists, which are not divided among GPUs"
        known = pipeline_named(type(target.pipe).__name__)
        keeps_sources = known is not None and known.keeps_sources
        if family is not None and (family.text_in_first_step_alone or keeps_sources):
            return f"{family.name} keeps keys and values of its first step, which are not divided among GPUs"
        if (
            target.model.has_weights
            and machine.is_gpu
            and not target.where.on_host
            and str(denoiser.device) not in _FIRST
        ):
            return (
                f"the pipeline is on {denoiser.device}, and this process must use the first GPU; move it to cuda:0, or "
                "reorder the GPUs with CUDA_VISIBLE_DEVICES"
            )
        return None if self.mode == "cfg" else self._tokens_unsupported(target, denoiser)

    def _tokens_unsupported(self, target: Target, denoiser: torch.nn.Module) -> str | None:
        kind = type(denoiser).__name__
        family = family_of(denoiser)
        if family is not None and family.text_of_any_length:
            return f"{kind} does not pad its text, and diffusers divides only numbers of tokens that the GPUs divide"
        if not getattr(denoiser, "_cp_plan", None):
            return (
                f"diffusers has no context-parallel plan (_cp_plan) for {kind}, so its tokens cannot be sharded; take "
                "parallel(cfg)"
            )
        if any(Trait.FUSED in technique.facts.provides for technique in target.request.earlier):
            if self.mode == "all_gather":
                return None
            return (
                f"fused gathers all keys and values on every GPU; take parallel(all_gather, gpus={self.gpus})"
            )
        if self.mode == "ulysses" and (reason := self._heads_unsupported(target, denoiser)) is not None:
            return reason
        if not attention_processors(denoiser):
            return f"{kind}'s attention processors do not support diffusers' context parallelism"
        by_diffusers = needs_diffusers(denoiser, self.mode, self.gpus)
        if self.mode == "all_gather" and by_diffusers:
            return (
                f"all_gather is there for {_own_tokens()} alone, with diffusers' own attention processors and default "
                f"attention backend, and this {kind} is not that; take parallel(ring) or parallel(ulysses)"
            )
        if by_diffusers and _later_provides(target, Trait.CACHED):
            return (
                "a step cache keeps and compares whole tensors, and tokens that diffusers shards cannot be gathered "
                f"for it; for {_own_tokens()} take parallel(all_gather), or ulysses with a number of GPUs that divides "
                "the heads"
            )
        return self._ring_unsupported(target, denoiser) if self.mode == "ring" else None

    def _ring_unsupported(self, target: Target, denoiser: torch.nn.Module) -> str | None:
        if not target.machine.is_cuda:
            return "ring merges parts of attention by their log-sum-exp, which in diffusers only CUDA kernels return"
        if str(denoiser.dtype) == "torch.float32":
            return "the attention kernels that ring needs compute in bf16 and fp16 alone; add bf16"
        return None

    def _heads_unsupported(self, target: Target, denoiser: torch.nn.Module) -> str | None:
        heads = num_heads(denoiser)
        if heads is None or heads % self.gpus == 0:
            return None
        instead = "ring" if needs_diffusers(denoiser, "all_gather", self.gpus) else "all_gather"
        if not can_pad_heads(heads, self.gpus):
            return (
                f"{heads} attention heads cannot be split among {self.gpus} GPUs; take fewer GPUs, or "
                f"parallel({instead})"
            )
        uneven = (
            f"{heads} attention heads on {self.gpus} GPUs take collectives whose sizes depend on the input, "
        )
        if _later_provides(target, Trait.COMPILED):
            return (
                f"{uneven}which torch.compile does not support; take parallel({instead}), a number of GPUs that "
                "divides the heads, or do not compile"
            )
        if _later_provides(target, Trait.CAPTURED):
            return (
                f"{uneven}which a CUDA graph cannot contain; take parallel({instead}), a number of GPUs that divides "
                "the heads, or leave out cuda_graph"
            )
        return None

    def apply(self, target: Target) -> Effect:
        from vivace.machinery.multi_gpu.sharded_denoiser import ShardedDenoiser

        pipe = target.pipe
        sharded = ShardedDenoiser(
            target.module("denoiser"),
            self.mode,
            self.gpus,
            target.machine.device,
            {
                "pipeline": type(pipe),
                "attribute": target.path("denoiser").removeprefix("pipe."),
                "scheduler": (type(pipe.scheduler), dict(pipe.scheduler.config)),
                "recipe": _recipe_of_peers(target),
                "defaults": target.model.defaults,
                "has_random_weights": target.model.has_random_weights,
            },
        )

        follow_writes(pipe, sharded.send_written)

        def refuted(_: dict[str, Any]) -> str | None:
            if sharded.num_shared:
                return None
            if sharded.num_alone:
                return (
                    "no forward had two rows to split, and no step two calls that are known: guidance was off"
                )
            return "the denoiser was never called through the session"

        return Effect(
            changed=self._changed,
            around=sharded.watched,
            evidence=sharded.evidence,
            refuted=refuted,
            finish=sharded.finish,
            close=sharded.peers.close,
        )

    def predict(self, target: Target) -> Effect:
        """Predict no change: this GPU holds the same weights as before."""
        return Effect(changed=self._changed)

    @property
    def _changed(self) -> dict[str, int | float | str]:
        return {"denoiser.shared_by": self.mode, "denoiser.gpus": self.gpus}


_FIRST = ("cuda", "cuda:0")


def _own_tokens() -> str:
    """Return the names of the families whose tokens vivace divides itself."""
    return ", ".join(family.name for family in FAMILIES if family.divides_tokens)


def _later_provides(target: Target, trait: Trait) -> bool:
    """Return whether a later technique gives the denoiser that trait."""
    return any(
        trait in technique.facts.provides and "denoiser" in technique.targets
        for technique in target.request.later
    )


def _recipe_of_peers(target: Target) -> str:
    """Return the later part of the recipe that concerns the denoiser, or its process, in recipe notation."""
    texts = [
        technique.model_copy(update={"targets": technique.targets and ("denoiser",)}).text
        for technique in target.request.later
        if "denoiser" in technique.targets or Trait.PROCESS_WIDE in technique.facts.provides
    ]
    return "+".join(texts) or BASELINE
