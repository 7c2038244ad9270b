"""Names of a LoRA file's tensors: the layer of each, and its role in the layer's change.

The names are those of kohya's scripts, LyCORIS, diffusers (also before PEFT), PEFT, ComfyUI, XLabs and OneTrainer.
"""

from __future__ import annotations

import re
from typing import Literal

Role = Literal[
    "down", "up", "mid", "up_bias", "alpha", "diff", "diff_b",
    "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2",
    "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2",
    "dora", "glora", "oft", "ia3", "vera", "adalora", "embedding", "reshape", "inner_bias", "replacement", "trigger",
    "unknown",
]  # fmt: skip

_ADAPTER = r"(?:\.(?!(?:weight|bias|alpha)$)[\w-]+)?"  # PEFT's name of an adapter, mostly "default"
_ROLES: tuple[tuple[str, Role], ...] = (
    (rf"lora_[Aa]{_ADAPTER}(?:\.weight)?", "down"),
    (rf"lora_[Bb]{_ADAPTER}(?:\.weight)?", "up"),
    (r"(?:lora_down|lora\.down|lora_linear_layer\.down|down)\.weight", "down"),
    (r"(?:lora_up|lora\.up|lora_linear_layer\.up|up)\.weight", "up"),
    (r"(?:lora_mid|lora\.mid)\.weight", "mid"),
    (rf"(?:lora_B{_ADAPTER}|lora_up|lora\.up)\.bias", "up_bias"),
    (rf"(?:lora_A{_ADAPTER}|lora_down|lora\.down)\.bias", "inner_bias"),
    (r"(?:(?:lora_[AB]|lora_down|lora_up|lora)\.)?(?:lora_)?alpha", "alpha"),
    (r"(?:diff|w_norm)", "diff"),
    (r"(?:diff_b|b_norm)", "diff_b"),
    (rf"dora_scale|lora_magnitude_vector{_ADAPTER}(?:\.weight)?|(?:lora\.)?magnitude(?:_vector)?", "dora"),
    (r"(?:a1|a2|b1|b2|bm)(?:\.weight)?", "glora"),
    (r"(?:oft_(?:blocks|diag|[RS])|boft_[RS])(?:\.[\w-]+)*|rescale", "oft"),
    (rf"ia3_\w+{_ADAPTER}|on_input", "ia3"),
    (r"vera_\w+(?:\.\w+)?", "vera"),
    (rf"lora_E{_ADAPTER}|ranknum{_ADAPTER}", "adalora"),
    (rf"lora_embedding_[AB]{_ADAPTER}(?:\.weight)?", "embedding"),
    (r"reshape_weight", "reshape"),
    (r"set_weight|(?:modules_to_save\.(?:\w+\.)?)?(?:weight|bias|scale)", "replacement"),
    (r"(?:original_module|base_layer)\.\w+", "replacement"),
)  # fmt: skip
_PRODUCTS: tuple[Role, ...] = (
    "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2",
    "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2",
)  # fmt: skip
_NUMBERED = (*_ROLES, *((rf"{role}{_ADAPTER}(?:\.weight)?", role) for role in _PRODUCTS))
_KEY = re.compile(
    r"(?P<layer>.+?)\.(?:"
    + "|".join(f"(?P<r{k}>{pattern})" for k, (pattern, _) in enumerate(_NUMBERED))
    + ")"
)
_BUNDLED = re.compile(r"bundle_emb\..+|(?:.+\.)?string_to_param\..+|clip_[lg]|emb_params")

UNUSABLE: dict[Role, str] = {
    "dora": "DoRA, which rescales the weights after adding",
    "glora": "GLoRA, whose change depends on the weights",
    "oft": "OFT, which rotates the weights instead of adding to them",
    "ia3": "IA3, which scales the weights instead of adding to them",
    "vera": "VeRA, whose matrices are not all in the file",
    "adalora": "AdaLoRA, whose matrices have singular values between them",
    "embedding": "a LoRA of a token embedding",
    "reshape": "a LoRA that makes a weight larger",
    "inner_bias": "a LoRA with a bias between its matrices",
    "replacement": "values that replace those of the model instead of being added",
    "unknown": "of no kind that vivace knows",
}
"""Descriptions of tensors whose role vivace cannot apply."""


def split_key(key: str) -> tuple[str, Role]:
    """Return the layer's name, as the file writes it, and the tensor's role."""
    if _BUNDLED.fullmatch(key):
        return key, "trigger"
    match = _KEY.fullmatch(key)
    if match is None or match.lastgroup is None:
        return key, "unknown"
    return match["layer"], _NUMBERED[int(match.lastgroup[1:])][1]
