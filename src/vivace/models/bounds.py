"""Check configurations before anything is built from them, with limits ten times those of published models: a million
layers or a tokenizer that pads to 10**30 tokens become a loop without end or an endless allocation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from vivace.errors import UnusableModel, VivaceError
from vivace.foundation.untrusted.files import is_below, open_plain, read_object, reading

_WIDEST = 600_000  # of 53,248
# Key, smallest and largest value; the first pattern that fits the whole key holds. The comment is what is published.
_BOUNDS: tuple[tuple[str, int, int], ...] = (
    (r"num_train_timesteps|original_inference_steps|timesteps", 1, 10_000),  # 1,000
    (r"num_(key_value_|query_)?groups|(.+_)?norm_(num_)?groups|(.+_)?num_groups|groups", 1, 10_000),  # 96
    (r"(.+_)?num_(.+_)?heads|n_heads?|encoder_hid_dim_heads", 1, 10_000),  # 128
    (r"extra_.+_channels|projection_dim|(?!attention_)(.+_)?head_dim", 0, _WIDEST),  # 512; 0 is none
    (r"attention_head_dim|d_kv|(.+_)?patch_size(_t)?", 1, 10_000),  # 512
    (r"kernel_size|conv_(in_|out_)?kernel|(conv_)?stride", 1, 1_000),  # 14
    (r"layers_per_block", 0, 40),  # 4, in each of up to 5 blocks
    (r"(.+_)?layers_per_(.+_)?block|(.+_)?num_(.+_)?(layers|blocks)|depths?|n_layers?", 0, 1_000),  # 100
    (r"max_position_embeddings|n_positions|original_max_position_embeddings", 1, 100_000_000),  # 10 million
    (r"(.+_)?vocab_size", 0, 3_000_000),  # 262,208
    (r"(.+_)?channels|(.+_)?hidden_size|intermediate_size|d_model|d_ff|n_embd|n_inner", 1, _WIDEST),
    (r"(.+_)?(attention|embeds?|proj|projection|inner|hidden|ffn|mlp|latent|z|time|cond)_dim", 1, _WIDEST),
    (r"projection_class_embeddings_input_dim|(.+_)?embedding_dim|encoder_hid_dim", 1, _WIDEST),
    (r"(.+_)?(sample|image|crop|input)_size|height|width|(shortest|longest)_edge", 1, 80_000),  # 8,192
    (r"max_(.+_)?seq_len(gth)?|(.+_)?max_len(gth)?|(.+_)?sequence_length", 1, 100_000_000),  # 10 million
    (r"num_(local_|routed_|shared_)?experts", 0, 200_000),  # 16,384
    (r"relative_attention_(num_buckets|max_distance)", 1, 10_000),  # 256
    (r"solver_order", 1, 10),  # 3
    (r"steps_offset", 0, 100),  # 1
)
# CLIP's own: its pipelines pad every prompt to the tokenizer's length, and it has an embedding for each position.
_CLIP_BOUNDS: tuple[tuple[str, int, int], ...] = (
    (r"model_max_length|max_position_embeddings", 1, 2_500),  # 248
)
# Tokenizers without a limit are published with int(1e30).
_TOKENIZER_BOUNDS: tuple[tuple[str, int, int], ...] = ((r"model_max_length", 1, 10**30 + 10**15),)
_LARGEST = 10**15
"""Limit of all other numbers."""
_MAX_LIST = 1_000
"""Elements of a list of sizes."""
_MAX_VALUES = 2_000_000
_TOKENIZER_MAX_BYTES = 500_000_000
_CONFIGURATIONS = re.compile(r"(.+_)?config\.json|model_index\.json|special_tokens_map\.json")
_SHARDS = re.compile(r".*\.safetensors\.index(\.\w+)?\.json")
ADAPTER = "adapter_config.json"


def check_files(
    folder: Path,
    small: Iterable[str],
    weights: Collection[str],
    label: str,
    error: type[VivaceError] = UnusableModel,
) -> None:
    """Check the files of a model before a library reads them.

    Args:
        folder: the model's folder; no file may lie outside of it.
        small: names of configurations, tokenizers and indices ("unet/config.json").
        weights: names of the weights; those that are not downloaded yet need not exist.
        label: the model's name for error messages.
    """
    for name in (*small, *weights):
        path, file = folder / name, PurePosixPath(name).name
        if file == ADAPTER:
            # transformers would take it for an order to load another model first.
            raise error(f"{label} has an adapter ({name}), which vivace does not load; give the merged model")
        with reading(path, error, "copy or download it again", problem="cannot be used"):
            if not is_below(path, folder):
                raise ValueError(f"it is a link out of {folder}")
            if name in weights:
                continue
            if _SHARDS.fullmatch(file):
                _check_shards(name, read_object(path), weights)
            elif _CONFIGURATIONS.fullmatch(file):
                _check_configuration(name, file, read_object(path), label, error)
            else:
                open_plain(path, _TOKENIZER_MAX_BYTES).close()


def check_places(folder: Path, components: Iterable[str]) -> None:
    """Raise UnusableModel for anything in a model's folder that is neither a file nor a folder, or links out of it.
    Libraries read more files than `check_files` checks, and would wait for a pipe or read a device without end."""
    for place in (*(folder / name for name in components), folder):
        if not place.is_dir():
            continue
        for path in place.iterdir():
            if path.is_file():
                if is_below(path, folder):
                    continue
                raise UnusableModel(
                    f"{path} cannot be used: it is a link out of {folder}; put the file itself there"
                )
            if path.is_symlink() and path.is_dir():
                raise UnusableModel(f"{path} is a link; put the folder itself there")
            if not path.is_dir():
                raise UnusableModel(f"{path} cannot be used: it is not a regular file or a folder; remove it")


def check_numbers(config: Any, kind: str = "") -> None:
    """Raise ValueError for the first number of a configuration beyond ten times that of any published model."""
    own = _CLIP_BOUNDS if _is_clip(config) else ()
    bounds = [*own, *(_TOKENIZER_BOUNDS if kind == "tokenizer_config.json" else ()), *_BOUNDS]
    patterns = [(re.compile(pattern), low, high) for pattern, low, high in bounds]
    ranges: dict[str, tuple[int, int] | None] = {}
    for number, (key, value) in enumerate(_values(config)):
        if number > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values")
        if key not in ranges:
            ranges[key] = next(((low, high) for p, low, high in patterns if p.fullmatch(key)), None)
        bound = ranges[key]
        if isinstance(value, list):
            if bound is not None and len(value) > _MAX_LIST:
                raise ValueError(
                    f"its {key} has {len(value):,} elements; no model has more than {_MAX_LIST:,}"
                )
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if bound is not None and not bound[0] <= value <= bound[1]:
                raise ValueError(f"its {key} is {_short(value)}; models have {_range(*bound)}")
            if bound is None and abs(value) > _LARGEST and abs(value) != float("inf"):
                raise ValueError(f"its {key} is {_short(value)}, a number that no model has")
        elif isinstance(value, str) and bound is not None:
            raise ValueError(f"its {key} is {_short(value)}, not a number")


def _check_configuration(
    name: str, file: str, config: dict[str, Any], label: str, error: type[VivaceError]
) -> None:
    for key, value in _values(config):
        if key == "auto_map" and value:
            raise error(f"{label} needs its own code (auto_map in {name}); vivace runs no code from models")
        if key == "quantization_config" and value:
            raise error(
                f"{label} is quantised already (quantization_config in {name}), which vivace does not read; give the "
                "model in full precision, and quantise it with a recipe, e.g. quantize(int8)"
            )
        if key == "use_pretrained_backbone" and value:
            raise error(
                f"{label} loads another model (use_pretrained_backbone in {name}), which vivace does not"
            )
    check_numbers(config, file)


def _check_shards(name: str, index: dict[str, Any], weights: Collection[str]) -> None:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError("it has no weight_map")
    beside = PurePosixPath(name).parent
    for shard in set(map(str, weight_map.values())):
        is_name = PurePosixPath(shard).name == shard and "\\" not in shard
        if not is_name or not shard.endswith(".safetensors") or (beside / shard).as_posix() not in weights:
            raise ValueError(
                f"it names {shard[:200]!r}, which is not a safetensors file of this model; vivace reads no others"
            )


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]


def _is_clip(config: Any) -> bool:
    if not isinstance(config, dict):
        return False
    named = [config.get("model_type"), config.get("tokenizer_class"), config.get("processor_class")]
    return any(isinstance(name, str) and name.lower().startswith("clip") for name in named)


def _range(low: int, high: int) -> str:
    return f"{low} to {high:,}" if high < 10**9 else f"at least {low}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
