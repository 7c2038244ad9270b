"""A LoRA's change of the weight and the bias of one layer, from the tensors that a file has for it.

All are sums: W + change. Forms that are none (DoRA, GLoRA, OFT, IA3) depend on W, and reading a file refuses them.

Sources: Hu et al., LoRA, arXiv 2106.09685; Yeh et al., LyCORIS, arXiv 2309.14859.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vivace.machinery.technique import Component

if TYPE_CHECKING:
    import torch

Scale = Callable[[int], float]
"""Returns alpha / rank for a rank."""
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


Rows = tuple[tuple[int, int], ...]
"""Slices (first, end) of a weight's rows, in a layer's order."""


class WeightChange(Protocol):
    """A change of a weight."""

    def size(self) -> tuple[int, int]:
        """The number of rows, and of values in a row."""

    def sizes(self) -> str:
        """The sizes of its tensors, for messages."""

    def values(self, device: Any) -> torch.Tensor:
        """Compute the change in fp32: (rows, ...)."""


@dataclass(frozen=True)
class Matrices:
    """scale B A: down is A, (rank, in_features) or (rank, in_channels, height, width); up is B; scale is alpha /
    rank."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def size(self) -> tuple[int, int]:
        return len(self.up), self.down[0].numel()

    def sizes(self) -> str:
        return f"matrices are {sizes_of(self.down)} and {sizes_of(self.up)}"

    def values(self, device: Any) -> torch.Tensor:
        down, up = _fp32(device, self.down, self.up)
        return self.scale * (up @ down.flatten(1))

    def rows(self, rows: Rows) -> Matrices:
        return replace(self, up=_rows_of(self.up, rows))


@dataclass(frozen=True)
class Tucker:
    """A convolution's B core A with a core (rank, rank, height, width), LyCORIS's LoCon."""

    down: torch.Tensor
    core: torch.Tensor
    up: torch.Tensor
    scale: float

    def size(self) -> tuple[int, int]:
        return len(self.up), self.down[0].numel() * self.core[0, 0].numel()

    def sizes(self) -> str:
        return f"matrices are {sizes_of(self.down)}, {sizes_of(self.core)} and {sizes_of(self.up)}"

    def values(self, device: Any) -> torch.Tensor:
        down, core, up = _fp32(device, self.down.flatten(1), self.core, self.up)
        return self.scale * _tucker(core, up, down)


@dataclass(frozen=True)
class Hadamard:
    """LoHa: the product, value by value, of two B A. With cores, both are Tucker's."""

    factors: tuple[torch.Tensor, ...]
    cores: tuple[torch.Tensor, ...]
    scale: float

    def size(self) -> tuple[int, int]:
        first, second = self.factors[:2]
        if self.cores:  # (rank, out) and (rank, in)
            return first.shape[1], second.shape[1] * self.cores[0][0, 0].numel()
        return len(first), second[0].numel()

    def sizes(self) -> str:
        return f"matrices are {' and '.join(map(sizes_of, self.factors))}"

    def values(self, device: Any) -> torch.Tensor:
        a1, b1, a2, b2 = _fp32(device, *self.factors)
        if self.cores:
            t1, t2 = _fp32(device, *self.cores)
            return self.scale * _tucker(t1, a1.t(), b1) * _tucker(t2, a2.t(), b2)
        return self.scale * (a1 @ b1.flatten(1)) * (a2 @ b2.flatten(1))


@dataclass(frozen=True)
class Kronecker:
    """LoKr: the Kronecker product of two matrices, each whole or a product A B; the second with a Tucker core behind
    it."""

    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    scale: float

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = self.first[0].shape if len(self.first) == 1 else (len(self.first[0]), self.first[1].shape[1])
        if len(self.second) == 3:
            a, b, core = self.second
            second: Sequence[int] = (a.shape[1], b.shape[1], *core.shape[2:])
        elif len(self.second) == 2:
            second = (len(self.second[0]), *self.second[1].shape[1:])
        else:
            second = self.second[0].shape
        return tuple(first), tuple(second)

    def size(self) -> tuple[int, int]:
        first, second = self._shapes()
        return first[0] * second[0], first[1] * math.prod(second[1:])

    def sizes(self) -> str:
        return f"matrices are {' and '.join(map(sizes_of, (*self.first, *self.second)))}"

    def values(self, device: Any) -> torch.Tensor:
        import torch

        first, second = _fp32(device, *self.first), _fp32(device, *self.second)
        left = first[0] if len(first) == 1 else first[0] @ first[1]
        if len(second) == 3:
            other = _tucker(second[2], second[0].t(), second[1])
        else:
            other = second[0] if len(second) == 1 else second[0] @ second[1].flatten(1)
        other = other.reshape(self._shapes()[1])
        product = torch.kron(left.reshape(*left.shape, *[1] * (other.dim() - 2)), other.contiguous())
        return self.scale * product.flatten(1)


@dataclass(frozen=True)
class Whole:
    """The change itself, as a whole tensor."""

    tensor: torch.Tensor

    def size(self) -> tuple[int, int]:
        return len(self.tensor), self.tensor[0].numel()

    def sizes(self) -> str:
        return f"change is {sizes_of(self.tensor)}"

    def values(self, device: Any) -> torch.Tensor:
        return _fp32(device, self.tensor)[0]


@dataclass(frozen=True)
class RowsOf:
    """Rows of a change that a file has for several layers in one."""

    whole: WeightChange
    rows: Rows

    def size(self) -> tuple[int, int]:
        return sum(stop - start for start, stop in self.rows), self.whole.size()[1]

    def sizes(self) -> str:
        return self.whole.sizes()

    def values(self, device: Any) -> torch.Tensor:
        return _rows_of(self.whole.values(device), self.rows)


@dataclass(frozen=True)
class LoraLayer:
    """A file's change of one layer: of its weight, its bias, or both."""

    weight: WeightChange | None
    bias: WeightChange | None = None

    @property
    def matrices(self) -> Matrices | None:
        """The two matrices, if the change is nothing else: such a layer can be beside another."""
        return self.weight if isinstance(self.weight, Matrices) and self.bias is None else None


LoraLayers = Mapping[Component, Mapping[str, LoraLayer]]
"""The layers that a file changes, by component and by their names in it."""


class BadForm(ValueError):
    """The tensors of a layer do not go together."""


@dataclass
class Group:
    """The tensors that a file has for one layer, which it calls `layer`."""

    layer: str
    tensors: dict[Role, torch.Tensor] = field(default_factory=dict)
    keys: dict[Role, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


def form_of(group: Group, scale: Scale) -> LoraLayer:
    """Return the change that the tensors make; BadForm where some are missing, too many, or do not go together."""
    roles = set(group.tensors) - {"alpha"}
    for role in roles:
        tensor = group.tensors[role]
        least = 1 if role in ("diff", "diff_b", "up_bias") else 2
        if tensor.dim() < least or not tensor.numel():
            raise BadForm(f"{group.layer} has a tensor of {sizes_of(tensor)} as {role}")
    if roles & {"down", "up", "mid", "up_bias"}:
        return _of_matrices(group, roles, scale)
    if any(role.startswith("hada_") for role in roles):
        return LoraLayer(_hadamard(group, roles, scale))
    if any(role.startswith("lokr_") for role in roles):
        return LoraLayer(_kronecker(group, roles, scale))
    if roles <= {"diff", "diff_b"}:
        return LoraLayer(_whole(group, "diff"), _whole(group, "diff_b"))
    raise BadForm(f"{group.layer} has {_listed(roles)}, which do not go together")


def has_no_effect(group: Group) -> bool:
    def is_zero(*roles: Role) -> bool:
        return any(role in group.tensors and not bool(group.tensors[role].float().any()) for role in roles)

    roles = set(group.tensors) - {"alpha"}
    products: tuple[tuple[Role, ...], ...] = (
        ("down", "up", "mid"),
        ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
        ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
        ("diff",),
        ("diff_b",),
        ("up_bias",),
        ("inner_bias",),
        ("embedding",),
    )
    used = [product for product in products if roles & set(product)]
    handled = {role for product in products for role in product}
    return roles <= handled and all(is_zero(*product) for product in used)


def _of_matrices(group: Group, roles: set[Role], scale: Scale) -> LoraLayer:
    if not {"down", "up"} <= roles or not roles <= {"down", "up", "mid", "up_bias", "diff_b"}:
        raise BadForm(f"{group.layer} has {_listed(roles)}, not two matrices")
    down, up = group.tensors["down"], group.tensors["up"]
    rank = down.shape[0]
    if up[0].numel() != rank:
        raise BadForm(
            f"the matrices of {group.layer} do not go together ({sizes_of(down)} and {sizes_of(up)})"
        )
    amount = scale(rank)
    weight: WeightChange = Matrices(down, up.flatten(1), amount)
    core = group.tensors.get("mid")
    if core is not None:
        if core.dim() != 4 or core.shape[:2] != (rank, rank) or down[0, 0].numel() != 1:
            sizes = f"{sizes_of(down)}, {sizes_of(core)} and {sizes_of(up)}"
            raise BadForm(f"the matrices of {group.layer} do not go together ({sizes})")
        weight = Tucker(down, core, up.flatten(1), amount)
    bias = _whole(group, "diff_b")
    if "up_bias" in roles:
        if bias is not None:
            raise BadForm(f"{group.layer} has two biases")
        bias = Whole(group.tensors["up_bias"].float() * amount)
    return LoraLayer(weight, bias)


def _hadamard(group: Group, roles: set[Role], scale: Scale) -> WeightChange:
    names: tuple[Role, ...] = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    cores: tuple[Role, ...] = ("hada_t1", "hada_t2") if "hada_t1" in roles else ()
    _check_roles(group, roles, {*names, *cores})
    a1, b1, a2, b2 = factors = tuple(group.tensors[name] for name in names)
    ranks = [f.shape[0] if cores else f.shape[1] for f in (a1, a2)]
    fits = ranks == [b1.shape[0], b2.shape[0]]
    if not fits or (a1.shape[1 if cores else 0], b1[0].numel()) != (
        a2.shape[1 if cores else 0],
        b2[0].numel(),
    ):
        raise BadForm(
            f"the matrices of {group.layer} do not go together ({', '.join(map(sizes_of, factors))})"
        )
    return Hadamard(factors, tuple(group.tensors[name] for name in cores), scale(b1.shape[0]))


def _kronecker(group: Group, roles: set[Role], scale: Scale) -> WeightChange:
    first: tuple[Role, ...] = ("lokr_w1",) if "lokr_w1" in roles else ("lokr_w1_a", "lokr_w1_b")
    second: tuple[Role, ...] = ("lokr_w2",) if "lokr_w2" in roles else ("lokr_w2_a", "lokr_w2_b")
    if "lokr_t2" in roles:
        second = (*second, "lokr_t2")
    _check_roles(group, roles, {*first, *second})
    left, other = (tuple(group.tensors[role] for role in part) for part in (first, second))
    ranks = [part[1].shape[0] for part in (other, left) if len(part) > 1]
    # Two whole matrices have no rank: LyCORIS then ignores its alpha, and only PEFT's settings scale.
    has_alpha = "alpha" in group.tensors
    return Kronecker(left, other, scale(ranks[0]) if ranks else 1.0 if has_alpha else scale(0))


def _whole(group: Group, role: Role) -> WeightChange | None:
    tensor = group.tensors.get(role)
    return None if tensor is None else Whole(tensor)


def _check_roles(group: Group, roles: set[Role], expected: set[Role]) -> None:
    if roles != expected:
        raise BadForm(f"{group.layer} has {_listed(roles)}, not {_listed(expected)}")


def _listed(roles: set[Role]) -> str:
    return ", ".join(sorted(roles)) or "nothing"


# The names are those of kohya's scripts, LyCORIS, diffusers (also before PEFT), PEFT, ComfyUI, XLabs and OneTrainer.
def split_key(key: str) -> tuple[str, Role]:
    """Return the layer's name, as the file writes it, and the tensor's role."""
    if _BUNDLED.fullmatch(key):
        return key, "trigger"
    match = _KEY.fullmatch(key)
    if match is None or match.lastgroup is None:
        return key, "unknown"
    return match["layer"], _NUMBERED[int(match.lastgroup[1:])][1]


def rows_of(change: WeightChange, rows: Rows) -> WeightChange:
    return change.rows(rows) if isinstance(change, Matrices) else RowsOf(change, rows)


def sizes_of(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one value"


def _rows_of(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    import torch

    return torch.cat([values[start:stop] for start, stop in rows])


def _fp32(device: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    import torch

    return [tensor.to(device, torch.float32) for tensor in tensors]


def _tucker(core: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return (out, in x height x width) of a core (rank, rank, height, width), up (out, rank) and down (rank, in)."""
    import torch

    return torch.einsum("ijhw,oi,jn->onhw", core, up.flatten(1), down).flatten(1)
