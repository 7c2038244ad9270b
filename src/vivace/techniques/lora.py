"""Your own LoRA: merged into the weights, or kept beside them and exchanged between calls.

Why: a style or a subject that the model does not know, in a file of a few MB. Merged, it adds no cost per step, and
    the result is quantised, fused, compiled or captured as any model. With `hot=True` it stays apart, y = W x + B A
    x: it rides on compiled, captured, quantised and fused layers, and `session.set_lora(...)` exchanges or rescales
    it between calls without compiling, capturing or quantising anything again.
Costs: another image, as wanted. Merged: nothing, and no way back. Hot: two small matmuls beside every changed layer in
    each step, which matter most where layers are small, and the memory of its matrices.
Needs: a .safetensors file (of diffusers, PEFT, kohya's scripts, LyCORIS, OneTrainer, XLabs or ComfyUI). Every tensor is
    used, or adds zero, or is named. LoHa, LoKr, LoCon, biases and norms are merged; DoRA, GLoRA, OFT and IA3, which are
    no sums, are refused, and so are pickles.
Source: Hu et al., LoRA, arXiv 2106.09685; diffusers, "LoRA".

PATH is a file, a folder with one, or on the Hugging Face hub `'org/repo'` or `'org/repo/FILE.safetensors'`, each also
with `@REVISION`. Quote it unless it is a plain word; a quote or backslash in it is escaped as in Python. A recipe may
have several: what they add is summed in fp32, whatever their order in the text, and rounded once. `sha256` is the first
digits of the file's. vivace adds it to the recipes that it stores, so that a changed file is another recipe; a file
that differs is refused.

PEFT's alpha is in the adapter_config.json beside the file. Text encoders' parts are merged too, unless @denoiser leaves
them out; a hot LoRA must not have them. `max_rank` and `layers` of a hot LoRA reserve what `set_lora` loads later: a
larger rank, and layers that this file leaves alone. After `distilled`, the weights are rounded a second time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import field_validator, model_validator

from vivace.architectures import family_of_pipeline
from vivace.errors import NoEffect, UnusableModel
from vivace.foundation.untrusted.files import user_path
from vivace.machinery.lora.by_diffusers import adds_the_same
from vivace.machinery.lora.changes import LoraLayers
from vivace.machinery.lora.hot import HotLora, attach, chosen, why_not_hot
from vivace.machinery.lora.lora_files import digest, locate_lora, on_hub, short_name
from vivace.machinery.lora.read_lora import LoraFile, merge_all, read_lora
from vivace.machinery.quantization.layers import is_quantised
from vivace.machinery.technique import (
    Effect,
    Rule,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    attribute_of,
    knob,
)
from vivace.machinery.technique.anatomy import TEXT_ENCODERS
from vivace.machinery.technique.script import Script, literal, written_call

_READ = "_vivace_loras_read"


class Lora(Technique):
    name: ClassVar[str] = "lora"
    summary: ClassVar[str] = "a LoRA of yours, merged or exchangeable"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.MERGE,
        owns="LoRA",
        same_picture=False,
        targetable=("denoiser", *TEXT_ENCODERS),
        default_targets=("denoiser", *TEXT_ENCODERS),
    )

    path: str = knob(
        about="a .safetensors file, a folder, or a file on the hub, e.g. 'org/repo/FILE.safetensors'"
    )
    scale: float = knob(1.0, ge=-100, le=100, about="factor of what it adds")
    hot: bool = knob(False, about="keep it beside the weights, to exchange and rescale it between calls")
    max_rank: int = knob(0, ge=0, le=4096, about="hot: the largest rank of a later LoRA; 0: this one's")
    layers: Literal["file", "all"] = knob(
        "file", about="hot: the layers of a later LoRA: this file's, or any"
    )
    sha256: str = knob("", about="the first digits of the file's sha256; vivace adds them to what it stores")

    @field_validator("path")
    @classmethod
    def _path_is_set(cls, path: str) -> str:
        if not path.strip():
            raise ValueError("path must not be empty")
        return path

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        if not self.hot and (self.max_rank or self.layers != "file"):
            raise ValueError("max_rank and layers are for hot=True; a merged LoRA is not exchanged")
        return self

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            owns=f"{self.declared.owns} {self.path}",
            stage=Stage.ADAPT if self.hot else Stage.MERGE,
            excludes=self._excludes,
            is_stored=not self.hot,
        )

    @property
    def label(self) -> str:
        aimed = "" if self.targets == self.declared.default_targets else f"@{','.join(self.targets)}"
        return f"{self.name}({short_name(self.path)}){aimed}"

    @property
    def _excludes(self) -> tuple[Rule, ...]:
        if not self.hot:
            fused = "its layers to_q, to_k and to_v are one layer there; apply both by one recipe, to a fresh pipeline"
            return (Rule(Trait.PROJECTIONS_FUSED, fused, earlier_only=True),)
        merge = "; merge the LoRA (without hot)"
        return (
            Rule(Trait.PROJECTIONS_FUSED, "the LoRA's layers to_q, to_k and to_v are one layer there" + merge),
            Rule(Trait.PRUNED, "the blocks that stay have other numbers than the LoRA's" + merge),
            Rule(Trait.SHARDED, "apply both by the same recipe, to a fresh pipeline", earlier_only=True),
            Rule(Trait.HOOKED, "the layers' hooks would store its matrices in 8 bits too" + merge, earlier_only=True),
            Rule(
                Trait.OFFLOADED_BY_LAYER,
                "its matrices would be copied to the GPU with each layer in each step; take offload(model)",
            ),
            Rule(Trait.OFFLOADED, "apply both by the same recipe, to a fresh pipeline", earlier_only=True),
        )  # fmt: skip

    def pinned(self) -> Lora:
        """Return the technique with the identity of its file, so that a changed file is another recipe.

        Raises:
            UnusableModel, Unsupported: the file cannot be read or found.
        """
        return self if self.sha256 else self.model_copy(update={"sha256": digest(locate_lora(self.path))})

    @property
    def local_file(self) -> Path | None:
        """The file, if it is one of this machine and not of the hub."""
        return locate_lora(self.path) if user_path(self.path).exists() else None

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        kind = type(target.pipe)
        if not hasattr(kind, "lora_state_dict") and family_of_pipeline(kind.__name__) is None:
            return f"diffusers reads no LoRAs for {kind.__name__}"
        read = self._read(target.pipe)
        if (reason := read.problem(self.targets)) is not None:
            return reason
        layers = chosen(read.layers, self.targets)
        if not layers:
            parts = " and the ".join(dict.fromkeys((*read.layers, *read.problems)))
            return f"{self.path} changes the {parts}, not the {' or the '.join(self.targets)}"
        if self.hot:
            return why_not_hot(target.pipe, self.path, layers)
        for component, changed in layers.items():
            for name in changed:
                if is_quantised(target.module(component).get_submodule(name)):
                    return (
                        f"the {component}'s weights are quantised already ({name}), and nothing can be added to them; "
                        "keep the LoRA beside them: hot=True"
                    )
        return None

    def apply(self, target: Target) -> Effect:
        read = self._read(target.pipe)
        if self.hot:
            return self._beside(target, read)
        effect = self._merged(read)
        # The last of them merges all, so that their sum is rounded once.
        if not any(_is_merged(technique) for technique in target.request.later):
            others = [
                cast("Lora", technique) for technique in target.request.earlier if _is_merged(technique)
            ]
            merge_all(target.pipe, [(lora._taken(target.pipe), lora.scale) for lora in (*others, self)])
            target.pipe.__dict__.pop(_READ, None)
        return effect

    def predict(self, target: Target) -> Effect:
        """Add the matrices of a hot LoRA; a merged one takes no memory."""
        read = self._read(target.pipe)
        return self._beside(target, read) if self.hot else self._merged(read)

    def _merged(self, read: LoraFile) -> Effect:
        """Merge the LoRA into the weights.

        Raises:
            NoEffect: the scale is 0.
        """
        if not self.scale:
            raise NoEffect(f"scale=0 adds nothing from {self.path}; leave it out", already_so=True)
        changed: dict[str, int | float | str] = {
            f"{component}.merged_layers": len(part)
            for component, part in chosen(read.layers, self.targets).items()
        }
        return Effect(changed=self._identity(read) | changed, notes=self._notes(read))

    def _beside(self, target: Target, read: LoraFile) -> Effect:
        everywhere = self.layers == "all"
        lora: HotLora = attach(
            target.pipe,
            self.path,
            self.sha256,
            read,
            self.scale,
            self.targets,
            self.max_rank,
            everywhere=everywhere,
        )
        changed: dict[str, int | float | str] = {
            "denoiser.layers_beside": len(lora.rows),
            "reserved_rank": lora.max_rank,
        }
        return Effect(changed=self._identity(read) | changed, evidence=lora.facts, notes=self._notes(read))

    def _identity(self, read: LoraFile) -> dict[str, int | float | str]:
        """Return the LoRA's identity and its used parts, for the Record."""
        facts: dict[str, int | float | str] = {
            "lora": self.path,
            "sha256": self.sha256,
            "scale": self.scale,
            "tensors": read.num_tensors,
            "tensors_that_add_zero": read.num_without_effect,
            "unused": read.unused,
            "alpha": read.alpha,
        }
        return {name: value for name, value in facts.items() if value or name in ("sha256", "scale")}

    def _notes(self, read: LoraFile) -> tuple[str, ...]:
        return tuple(f"{short_name(self.path)}: {note}" for note in read.notes)

    def _taken(self, pipe: Any) -> LoraLayers:
        """Return the file's parts for the targets."""
        return chosen(self._read(pipe).layers, self.targets)

    def _read(self, pipe: Any) -> LoraFile:
        """Return the file, read once for a pipeline until they are merged.

        Raises:
            UnusableModel: the file is damaged, no LoRA, or not the one that the recipe was stored with.
        """
        files: dict[str, LoraFile] = pipe.__dict__.setdefault(_READ, {})
        key = f"{self.path} {self.sha256}"
        if key not in files:
            file = locate_lora(self.path)
            sha256 = digest(file)
            if self.sha256 and not sha256.startswith(self.sha256) and not self.sha256.startswith(sha256):
                raise UnusableModel(
                    f"{self.path} is not the file of this recipe: its sha256 begins with {sha256}, not {self.sha256}; "
                    "restore that file, or leave out sha256= to take this one"
                )
            files[key] = read_lora(pipe, file, self.path)
        return files[key]

    def script(self, target: Target) -> Script | None:
        if not adds_the_same(target.pipe, locate_lora(self.path), self._taken(target.pipe)):
            return None  # the script calls vivace
        pipe, name = target.pipe, "".join(c if c.isalnum() else "_" for c in short_name(self.path))
        load = written_call(
            "pipe.load_lora_weights", *self._arguments(), adapter_name=literal(name)
        ).splitlines()
        if self.hot:
            earlier = [t for t in target.request.earlier if isinstance(t, Lora) and t.hot]
            names = [
                "".join(c if c.isalnum() else "_" for c in short_name(lora.path)) for lora in (*earlier, self)
            ]
            weights = [lora.scale for lora in (*earlier, self)]
            swap = [] if earlier else [f"pipe.enable_lora_hotswap(target_rank={self._reserved(pipe)})"]
            lines = [
                "# Needs peft. Another LoRA is loaded over this one with hotswap=True.",
                *swap,
                *load,
                f"pipe.set_adapters({literal(names)}, adapter_weights={literal(weights)})",
            ]
            return Script(lines=tuple(lines), unless_stage=Stage.QUANTIZE)
        arguments = {} if self.scale == 1 else {"lora_scale": f"{self.scale:g}"}
        layers = self._read(pipe).layers
        if set(layers) - set(self.targets):
            arguments["components"] = literal(
                [attribute_of(pipe, component) for component in layers if component in self.targets]
            )
        return Script(
            lines=(
                "# Needs peft. The LoRA is merged into the weights, so that it adds no cost per step;",
                "# vivace sums in fp32 and rounds once, so the last bits may differ.",
                *load,
                *written_call("pipe.fuse_lora", **arguments).splitlines(),
                "pipe.unload_lora_weights()",
            )
        )

    def _reserved(self, pipe: Any) -> int:
        layers = self._taken(pipe)["denoiser"].values()
        return self.max_rank or max(layer.matrices.rank for layer in layers if layer.matrices is not None)

    def _arguments(self) -> list[str]:
        """Return the arguments of `pipe.load_lora_weights` that load the file."""
        file, remote = locate_lora(self.path), on_hub(self.path)
        if Path(self.path).expanduser().exists() or remote is None:
            return [literal(str(file.resolve()))]
        revision = [] if remote.revision is None else [f"revision={literal(remote.revision)}"]
        return [literal(remote.repo), f"weight_name={literal(remote.file or file.name)}", *revision]


def _is_merged(technique: Technique) -> bool:
    return isinstance(technique, Lora) and not technique.hot
