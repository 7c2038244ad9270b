"""Pipelines of published architectures with random weights: speed and memory at full size without a download.

Each parameter is allocated once, on the target device and in its dtype, and filled there (`fill`). Shapes, kernels,
memory and the range of activations are those of the published model; what depends on training is not.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vivace.architectures import ARCHITECTURES, FAMILIES
from vivace.architectures.components import Architecture, ComponentConfig
from vivace.architectures.family import Rules
from vivace.architectures.gains import SHARED
from vivace.errors import UnknownModel, nearest
from vivace.models.quiet import quiet

_BIAS, _NORM_SPREAD = 0.02, 0.1
"""Biases are close to 0 and norm weights close to 1, but not exactly: a kernel that ignores them is detected."""


def build(architecture: Architecture | str, device: str, dtype: Any, seed: int = 0) -> Any:
    """Build the diffusers pipeline of an architecture, in evaluation mode and without gradients.

    Args:
        architecture: an Architecture, or the name of one in `ARCHITECTURES`.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: a torch dtype, for every component.
        seed: the same seed gives the same weights on the same kind of device in the same dtype.

    Returns:
        A pipeline of `architecture.pipeline`'s class, its progress bar off.
    """
    if isinstance(architecture, str):
        if architecture not in ARCHITECTURES:
            near = nearest(architecture, ARCHITECTURES)
            raise UnknownModel(
                f"no architecture '{architecture[:200]}'{near} (there are {', '.join(ARCHITECTURES)})"
            )
        architecture = ARCHITECTURES[architecture]
    return assemble(
        architecture, lambda name, component: build_component(component, device, dtype, seed, name)
    )


def assemble(architecture: Architecture, make: Callable[[str, ComponentConfig], Any]) -> Any:
    """Return the pipeline of an architecture, its progress bar off, with networks that `make` makes."""
    with quiet():
        import diffusers
    parts: dict[str, Any] = {}
    for name, component in architecture.components.items():
        parts[name] = make(name, component)
        if name in architecture.text_lengths:
            length = architecture.text_lengths[name]
            parts[name.replace("text_encoder", "tokenizer")] = tokenizer_for(parts[name].config, length)
    scheduler = getattr(diffusers, architecture.scheduler.class_name)(**architecture.scheduler.config)
    kind = getattr(diffusers, architecture.pipeline)
    parts = with_processor(kind, parts)
    pipe = kind(scheduler=scheduler, **parts, **architecture.arguments)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_component(
    component: ComponentConfig, device: str, dtype: Any, seed: int = 0, name: str | None = None
) -> Any:
    """Build one module with random weights, in evaluation mode and without gradients; see `build`."""
    import torch

    module = on_meta(component)
    _allocate(module, device, dtype)
    digest = hashlib.sha256(f"{seed} {name or component.class_name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    with torch.no_grad():
        fill(module, generator)
    return module


def on_meta(component: ComponentConfig, *, with_buffers: bool = True) -> Any:
    """Return the module with its parameters on the meta device in fp32, to count parameters and FLOPs. Its parameters
    take no memory."""
    import torch
    from accelerate import init_empty_weights

    where = contextlib.nullcontext() if with_buffers else torch.device("meta")
    # Not inside the context: constants of a module imported there would have no values for good.
    kind = _class_of(component)
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=()), where:
        if component.library == "transformers":
            # transformers writes into the dictionaries that it is given.
            module = kind(kind.config_class(**copy.deepcopy(component.config)))
        else:
            module = kind(**component.config)
    if hasattr(module, "tie_weights"):
        # init_empty_weights has replaced a shared tensor separately in each module.
        module.tie_weights()
    return module.eval().requires_grad_(False)


def num_parameters(component: ComponentConfig) -> int:
    """Count the parameters of a component, shared ones once."""
    return sum(p.numel() for p in on_meta(component, with_buffers=False).parameters())


def _class_of(component: ComponentConfig) -> Any:
    return getattr(importlib.import_module(component.library), component.class_name)


def _allocate(module: Any, device: str, dtype: Any) -> None:
    """Allocate uninitialised memory for parameters, shared ones once; buffers keep their values."""
    import torch

    allocated: dict[int, Any] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in allocated:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                # The old parameter is kept alive, so that its id is not reused.
                allocated[id(parameter)] = (parameter, torch.nn.Parameter(empty, requires_grad=False))
            setattr(child, name, allocated[id(parameter)][1])
        for name, buffer in child.named_buffers(recurse=False):
            # What is in no file stays in fp32 when a model is loaded, too: frequencies of embeddings.
            is_cast = buffer.is_floating_point() and name not in child._non_persistent_buffers_set
            kind = dtype if is_cast else buffer.dtype
            setattr(child, name, buffer.to(device, kind))


def fill(module: Any, generator: Any) -> None:
    """Fill every parameter of a component in place, in the order of `named_parameters`."""
    import torch

    kind = type(module).__name__
    of_families = (family.random_weights[kind] for family in FAMILIES if kind in family.random_weights)
    own = next(of_families, None) or SHARED[kind]
    gains, norms = own.gains(module), own.norms(module)
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 or name.endswith("gamma"):
            is_bias = name.endswith("bias")
            mean = 0.0 if is_bias else _first(norms, name)
            spread = _BIAS if is_bias else _NORM_SPREAD * min(1.0, abs(mean) or 1.0)
            parameter.normal_(mean, spread, generator=generator)
            continue
        gain = _first(gains, name)
        fan_in = 1 if id(parameter) in embeddings else parameter[0].numel()
        parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
    own.finish(module)


def _first(rules: Rules, name: str) -> float:
    return next((gain for pattern, gain in rules if re.search(pattern, name)), 1.0)


_PIECES = re.compile(r"[^\W\d_]{1,6}|\d|[^\w\s]|_")
"""Up to six letters, a digit or a sign make one token. This gives about as many tokens as byte-pair encoding."""
_WORDS = re.compile(r"<\|\w+\|>|</?think>|\[/?[A-Z_]+\]|\n+|[^\W\d_]{1,14}|\d|[^\w\s]|_")
"""A mark, newlines, a word, a digit or a sign make one token: large vocabularies hold most words."""
_IMAGE_MARK = "<|image_pad|>"
"""Text that stands for an image's token in the texts of Qwen's models."""
_MIN_PIXELS, _MAX_PIXELS = 3136, 12_845_056
"""Limits of the preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen-Image-Edit."""
Message = dict[str, Any]


class TokenBatch(dict[str, Any]):
    """`input_ids` and `attention_mask`, (prompts, tokens), by key or attribute as in transformers."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]

    def to(self, device: Any) -> TokenBatch:
        return TokenBatch({name: value.to(device) for name, value in self.items()})


@dataclass
class HashedTokenizer:
    """Replaces the tokenizer of CLIP, T5 or a language model, or the processor of Mistral 3, in a pipeline.

    Attributes:
        model_max_length: number of tokens to which a prompt is truncated or padded where the call names none, start and
            end included.
        first_word, last_word: the range of word ids, both included.
        has_words: whether the vocabulary is a language model's, which holds most words whole.
        template: the text of a conversation, from its messages and whether a reply without thinking is to follow.
        marks: ids of the tokens that no hash may give, because a model tells them from words.
        padding_side: set by pipelines, and ignored: padding is on the right.
    """

    model_max_length: int
    first_word: int
    last_word: int
    padding: int
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    has_words: bool = True
    template: Callable[[list[Message], bool], str] | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    padding_side: str = "right"

    def __call__(
        self,
        text: str | list[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> TokenBatch:
        """Tokenize prompts. Takes the transformers arguments that diffusers pipelines use, and ignores others."""
        prompts = [text] if isinstance(text, str) else text
        limit = self.model_max_length if max_length is None else max_length
        rows = [self.encode(prompt, limit if truncation else None) for prompt in prompts]
        width = limit if padding == "max_length" else max(len(row) for row in rows) if padding else 0
        rows, mask = self.padded(rows, width)
        if return_tensors == "pt":
            import torch

            return TokenBatch(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))
        flat = isinstance(text, str)
        return TokenBatch(input_ids=rows[0] if flat else rows, attention_mask=mask[0] if flat else mask)

    def padded(self, rows: list[list[int]], width: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return rows of ids of at least this width, and their mask."""
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return [row + [self.padding] * (width - len(row)) for row in rows], mask

    def pad(self, encoded: Mapping[str, Any], *, max_length: int | None = None, **_: Any) -> TokenBatch:
        """Return rows of ids, as tensors, of at least this width."""
        import torch

        rows, mask = self.padded(encoded["input_ids"], max_length or max(map(len, encoded["input_ids"])))
        return TokenBatch(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        count = self.last_word - self.first_word + 1
        words = [
            self.marks[token] if token in self.marks else self.first_word + zlib.crc32(token.encode()) % count
            for token in self.tokenize(text)
        ]
        if limit is not None:
            words = words[: max(0, limit - len(self.start) - len(self.end))]
        return [*self.start, *words, *self.end]

    def tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(text) if self.has_words else _PIECES.findall(text.lower())

    def apply_chat_template(
        self, messages: list[Any], *, tokenize: bool = True, enable_thinking: bool = True, **call: Any
    ) -> Any:
        """Return the text of a conversation or, with `tokenize`, the tokens of several."""
        assert self.template is not None
        if not tokenize:
            return self.template(messages, enable_thinking)
        return self([self.template(message, enable_thinking) for message in messages], **call)

    @property
    def pad_token_id(self) -> int:
        return self.padding

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        """Return the ids as text, since hashes cannot be inverted. Pipelines log it for truncated prompts."""
        return [" ".join(f"<{int(i)}>" for i in row) for row in rows]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return max(self.last_word, self.padding, *self.start, *self.end) + 1

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Empty: there are no added tokens for textual inversion."""
        return {}


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _turns(messages: list[Message]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{_text_of(m)}<|im_end|>\n" for m in messages)


def _qwen(messages: list[Message], thinking: bool) -> str:
    return _turns(messages) + "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n")


def _mistral(messages: list[Message], _: bool) -> str:
    marks = {"system": "SYSTEM_PROMPT", "user": "INST"}
    return "".join(f"[{marks[m['role']]}]{_text_of(m)}[/{marks[m['role']]}]" for m in messages)


def tokenizer_for(config: Any, length: int) -> HashedTokenizer:
    """Return the tokenizer for a text encoder's config of transformers."""
    text = getattr(config, "text_config", config)
    # The last ids are marks: a thousand of them in Mistral's and Qwen's vocabularies.
    last = text.vocab_size - (1001 if text.vocab_size > 100_000 else 1)
    kind = config.model_type
    if kind in ("qwen3", "qwen2_5_vl", "qwen3_vl"):
        # No word may have the id of an image's token.
        last = min(last, getattr(config, "vision_start_token_id", last + 1) - 1)
        marks = {_IMAGE_MARK: config.image_token_id} if hasattr(config, "image_token_id") else {}
        return HashedTokenizer(length, 0, last, padding=0, template=_qwen, marks=marks)
    if kind == "mistral3":
        return HashedTokenizer(length, 20, last, padding=11, start=(1,), template=_mistral)
    if kind == "gemma2":
        return HashedTokenizer(length, 5, last, padding=0, start=(2,))
    if kind == "glm":
        # Its marks, among them the two that begin a text and the padding, are behind 151,329 words.
        words = last + 1 - 223 if text.vocab_size > 100_000 else last - 2
        return HashedTokenizer(length, 0, words - 1, padding=words, start=(words + 2, words + 1))
    if kind == "t5":
        # 0 to 2 are padding, end, unknown; the last 128 are sentinels of T5's training, or unused.
        last = config.vocab_size - 129 if config.vocab_size > 1000 else config.vocab_size - 1
        return HashedTokenizer(length, 3, last, padding=0, end=(1,), has_words=False)
    # CLIP's start and end are the two highest ids. Encoders with the published eos_token_id of 2 take the pooled vector
    # at the highest id, so that must be the end token. It is also the padding.
    end = config.vocab_size - 1
    return HashedTokenizer(length, 0, end - 2, padding=end, start=(end - 1,), end=(end,), has_words=False)


@dataclass
class HashedProcessor:
    """Replaces Qwen2VLProcessor or Qwen3VLProcessor: hashed text, and real patches of images.

    An image becomes patches as it does when published, so that the vision tower and the language model get as many
    tokens: 5,476 patches and 1,369 tokens of a megapixel.

    Attributes:
        place: the id of an image's token, whose embedding the vision tower replaces.
        merged: patches that make one token.
    """

    tokenizer: HashedTokenizer
    images: Any
    place: int
    merged: int

    def __call__(self, *, text: list[str], images: Any = None, padding: bool = False, **_: Any) -> TokenBatch:
        """Return the ids and mask of texts (texts, tokens), and of images the patches and their grids. Each
        `<|image_pad|>` of a text becomes the tokens of the next image."""
        import torch

        processed = {} if images is None else dict(self.images(images=images, return_tensors="pt"))
        counts = iter([int(grid.prod()) // self.merged for grid in processed.get("image_grid_thw", ())])
        rows = [self._ids(line, counts) for line in text]
        rows, mask = self.tokenizer.padded(rows, max(map(len, rows)) if padding else 0)
        return TokenBatch(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), **processed)

    def apply_chat_template(self, messages: list[Message], **_: Any) -> list[list[int]]:
        """Return the ids of a conversation that still awaits its reply, as the only one of a list. Qwen-Image 2.1 asks
        for the length of its first turn."""
        return [self.tokenizer.encode(_turns(messages))]

    def _ids(self, text: str, counts: Any) -> list[int]:
        words = self.tokenizer.tokenize(text)
        ids = self.tokenizer.encode(text)
        return [
            token
            for word, id_ in zip(words, ids, strict=True)
            for token in ([self.place] * next(counts) if word == _IMAGE_MARK else [id_])
        ]


def with_processor(pipeline: type, parts: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline's components with the processor that it takes, if it takes one."""
    accepted = inspect.signature(pipeline.__init__).parameters  # type: ignore[misc]
    name = next((each for each in ("processor", "text_processor") if each in accepted), None)
    if name is None:
        return parts
    with quiet():
        import transformers

    # Without torchvision the usual name is that of the other one, with a warning.
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    config = parts["text_encoder"].config
    vision = config.vision_config
    images = kind(
        min_pixels=_MIN_PIXELS,
        max_pixels=_MAX_PIXELS,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
    )
    processor = HashedProcessor(
        parts["tokenizer"], images, config.image_token_id, vision.spatial_merge_size**2
    )
    # Qwen-Image 2.1 takes the tokenizer in its processor alone.
    return {part: value for part, value in parts.items() if part in accepted} | {name: processor}
