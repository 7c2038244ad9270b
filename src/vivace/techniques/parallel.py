"""One picture over several GPUs of a host: each computes its share of every forward of the denoiser.

Why: nearly all of a picture's time is the denoiser's. `guidance` splits the rows of its batch: with classifier-free
    guidance one GPU computes the conditional and one the unconditional branch, which then meet once a step. `ulysses`
    and `ring` split a transformer's tokens. Each GPU runs all layers on its own tokens; in attention, ulysses exchanges
    tokens for heads (each GPU has all tokens of some heads), ring hands all keys and values to everybody.
Costs: the whole denoiser's memory on every GPU. What is not the denoiser (text encoders, VAE, scheduler) runs on the
    first GPU alone, while the others wait. The other processes start and compile in the first call's time.
Needs: GPUs that the process sees, NVLink between them for ulysses and ring. `guidance`: a forward of two rows or more,
    as UNets with guidance have; where it has one (guidance off, or cut off), the first GPU computes alone. `ulysses`
    and `ring`: a transformer that diffusers can split (`_cp_plan`), tokens and for ulysses heads that divide evenly.
    Add `cuda_graph`: the less each GPU has to compute, the sooner it waits for its CPU. `messages=copies`: Triton, and
    GPUs that reach each other's memory.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; Liu et al., Ring Attention, arXiv 2310.01889; for FLUX both
    our own (`flux_tokens`), for other models diffusers' ContextParallelConfig. The branches of guidance on two GPUs:
    Fang et al., xDiT, arXiv 2411.01738.

One ordinary call, in a script, a notebook or a server: the other processes are started from it, and end with the
session or with its process (docs/adr/0006); what it gains is in docs/several-gpus.md. The denoiser as it is at this
point of the recipe, quantised or not, goes to the other GPUs; what comes later (caches, compile, kernels) each process
does to its own copy. `cuda_graph` records attention's messages with the rest, at the same call on every GPU; graphs
that torch.compile records by itself (reduce-overhead) are refused for tokens, since each process would decide alone
when. A step cache that keeps what the blocks make of whole tensors goes with tokens too: in a computed step its
residual is put together on every GPU, and a hit, which is hardly any work, is the first GPU's alone. On a CPU the same
works between processes, which is of use for tests alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.contract import Component, Effect, Stage, Target, Technique, knob
from vivace.multi_gpu.sharded_denoiser import MARK, Shared
from vivace.multi_gpu.split_tokens import attentions_of, can_pad, needs_diffusers, num_heads
from vivace.spec.recipe import BASELINE
from vivace.step_caching.step_cache import has_step_cache


class Parallel(Technique):
    name: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "one picture over several GPUs"
    stage: ClassVar[Stage] = Stage.SHARD
    owns: ClassVar[str] = "GPUs"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    mode: Literal["guidance", "ulysses", "ring"] = knob(
        tune=["guidance", "ulysses", "ring"],
        about="what is split: the batch's rows, or a transformer's tokens",
    )
    gpus: int = knob(2, ge=2, le=8, tune=[2], about="GPUs that share, this process's own among them")
    messages: Literal["collectives", "copies"] = knob(
        "collectives",
        tune=["collectives", "copies"],
        about="how tensors travel inside of FLUX's attention: by NCCL's kernels, or by copy engines beside the kernels",
    )

    @property
    def num_gpus(self) -> int:
        return self.gpus

    def unsupported(self, target: Target) -> str | None:
        import torch

        machine = target.machine
        if not torch.distributed.is_available():
            return "this PyTorch was built without torch.distributed, by which the GPUs talk to each other"
        if machine.is_cuda and machine.num_gpus is not None and machine.num_gpus < self.gpus:
            seen = "1 GPU" if machine.num_gpus == 1 else f"{machine.num_gpus} GPUs"
            return f"asked for {self.gpus} GPUs, and this process sees {seen} (CUDA_VISIBLE_DEVICES hides others)"
        if target.pipe is None:
            return None
        if any(t.stage is Stage.OFFLOAD for t in target.asked.later):
            return "offloading moves one GPU's copy of the weights, and every GPU has its own; leave out one of both"
        denoiser = target.module("denoiser")
        if hasattr(denoiser, MARK) or getattr(denoiser, "_parallel_config", None) is not None:
            return "the denoiser is shared among GPUs already"
        if has_step_cache(denoiser):
            return "the denoiser has a step cache already; apply the cache by the same recipe, with a fresh pipeline"
        if any(hasattr(module, "_diffusers_hook") for module in denoiser.modules()):
            return (
                "hooks hang in the denoiser's layers, as of layerwise casting, which cannot be copied to other GPUs; "
                "to store the weights in 8 bits take quantize(fp8_weight)"
            )
        if (
            target.model.has_weights
            and machine.is_cuda
            and not target.where.on_host
            and str(denoiser.device) not in _FIRST
        ):
            return (
                f"the pipeline is on {denoiser.device}, and the first of the GPUs is taken for its own; move it to "
                "cuda:0, or reorder them with CUDA_VISIBLE_DEVICES"
            )
        return self._no_rows(target) if self.mode == "guidance" else self._no_tokens(target, denoiser)

    def _no_rows(self, target: Target) -> str | None:
        if self.messages == "copies":
            return (
                f"attention sends nothing where rows are shared; leave out {COPIES}, or take ulysses or ring"
            )
        if _has_slot(target, "step cache", looks_beyond_rows=True):
            return "this step cache works with both branches of guidance at once, which here are on two GPUs"
        return None

    def _no_tokens(self, target: Target, denoiser: Any) -> str | None:
        kind = type(denoiser).__name__
        if not getattr(denoiser, "_cp_plan", None):
            return f"diffusers has no plan by which {kind} could be split by tokens; take parallel(guidance)"
        if self.mode == "ulysses" and (reason := self._no_heads(target, denoiser)) is not None:
            return reason
        if not attentions_of(denoiser):
            return f"{kind}'s attention is not computed by a processor that diffusers can share"
        by_diffusers = needs_diffusers(denoiser, self.mode, self.gpus)
        if (reason := _no_cache(target, by_diffusers)) is not None:
            return reason
        if self.messages == "copies" and (reason := self._no_copies(target, by_diffusers)) is not None:
            return reason
        if self.mode == "ring" and by_diffusers:
            if not target.machine.is_cuda:
                return (
                    "diffusers' ring adds up parts of attention by their log-sum-exp, which it takes from CUDA kernels "
                    "alone"
                )
            if str(denoiser.dtype) == "torch.float32":
                return "the kernels that a ring is made of compute in bf16 and fp16 alone; add bf16"
            if _has_slot(target, "attention kernel"):
                return (
                    "diffusers' ring takes the kernel that tells its log-sum-exp, and no other; take ulysses"
                )
        return None

    def _no_copies(self, target: Target, by_diffusers: bool) -> str | None:
        import torch

        if by_diffusers:
            return (
                "tokens that are split in diffusers' way (not FLUX, heads that do not divide, or a kernel that "
                f"set_attention_backend chose) are sent by collectives; leave out {COPIES}"
            )
        if not target.machine.is_cuda or not target.model.has_weights:
            return None
        if not target.machine.has_package("triton"):
            return f"GPUs that copy meet in a Triton kernel, and triton is not installed; leave out {COPIES}"
        unreached = [k for k in range(1, self.gpus) if not torch.cuda.can_device_access_peer(0, k)]
        if unreached:
            numbers = ", ".join(str(k) for k in unreached)
            return f"the first GPU does not reach the memory of {numbers}, as it would over NVLink; leave out {COPIES}"
        return None

    def _no_heads(self, target: Target, denoiser: Any) -> str | None:
        heads = num_heads(denoiser)
        if heads is None or heads % self.gpus == 0:
            return None
        if not can_pad(heads, self.gpus):
            return f"{heads} attention heads cannot be shared out among {self.gpus} GPUs; take fewer, or parallel(ring)"
        uneven = f"{heads} attention heads on {self.gpus} GPUs take messages whose sizes are known as they arrive, "
        if _has_slot(target, "compilation"):
            return (
                f"{uneven}which torch.compile cannot follow; take parallel(ring), a number of GPUs that divides the "
                "heads, or do not compile"
            )
        if _has_slot(target, "recording"):
            return (
                f"{uneven}which a CUDA graph cannot hold; take parallel(ring), a number of GPUs that divides the "
                "heads, or leave out the recording"
            )
        return None

    def apply(self, target: Target) -> Effect:
        changed: dict[str, int | float | str] = {"denoiser.shared_by": self.mode, "denoiser.gpus": self.gpus}
        if not target.model.has_weights:
            return Effect(changed=changed)  # what this GPU holds stays what it was
        pipe = target.pipe
        shared = Shared(
            target.module("denoiser"),
            self.mode,
            self.gpus,
            target.machine.device,
            self.messages == "copies",
            {
                "pipeline": type(pipe),
                "attribute": target.path("denoiser").removeprefix("pipe."),
                "scheduler": (type(pipe.scheduler), dict(pipe.scheduler.config)),
                "recipe": _for_each_copy(target),
                "defaults": target.model.defaults,
                "has_random_weights": target.model.has_random_weights,
            },
        )

        def refuted(_: dict[str, Any]) -> str | None:
            if shared.num_shared:
                return None
            if shared.num_alone:
                return "no forward had two rows to be shared: guidance was off, or takes two forwards of one row each"
            return "the denoiser was never called through the session"

        return Effect(
            changed=changed,
            around=shared.watched,
            evidence=shared.evidence,
            refuted=refuted,
            finish=shared.finish,
            close=shared.peers.close,
        )


_FIRST = ("cuda", "cuda:0")
COPIES = "messages=copies"


def _has_slot(target: Target, owns: str, looks_beyond_rows: bool | None = None) -> bool:
    """Whether a later technique owns that slot of the denoiser."""
    return any(
        technique.owns == owns
        and "denoiser" in technique.targets
        and (looks_beyond_rows is None or getattr(technique, "looks_beyond_rows", False) == looks_beyond_rows)
        for technique in target.asked.later
    )


def _no_cache(target: Target, by_diffusers: bool) -> str | None:
    """Why a later step cache cannot work on tokens that are split, or None."""
    for technique in target.asked.later:
        if technique.owns != "step cache":
            continue
        if not getattr(technique, "shares_tokens", False):
            return (
                f"{technique.name} keeps tensors inside of the blocks, and each GPU has its own tokens of them; take "
                "teacache, magcache, seacache or taylorseer"
            )
        if by_diffusers:
            return (
                "a step cache keeps and compares whole tensors, and tokens that are split in diffusers' way cannot be "
                "put together for it; take parallel(ring), or a number of GPUs that divides the heads"
            )
    return None


def _for_each_copy(target: Target) -> str:
    """The later part of the recipe that concerns the denoiser, or its process, in recipe notation."""
    told = [
        technique.model_copy(update={"targets": ("denoiser",)}).text
        if "denoiser" in technique.targets
        else technique.text
        for technique in target.asked.later
        if "denoiser" in technique.targets or getattr(technique, "of_the_process", False)
    ]
    return "+".join(told) or BASELINE
