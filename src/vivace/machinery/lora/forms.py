"""Combine the tensors that a file has for one layer into the layer's change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.machinery.lora.changes import (
    Hadamard,
    Kronecker,
    LoraLayer,
    Matrices,
    Tucker,
    WeightChange,
    Whole,
    sizes_of,
)
from vivace.machinery.lora.keys import Role

if TYPE_CHECKING:
    import torch

Scale = Callable[[int], float]
"""Returns alpha / rank for a rank."""


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
    """Return the change that the tensors make.

    Raises:
        BadForm: some are missing, too many, or of sizes that do not go together.
    """
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
    """Whether the change of a group is zero."""

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
    amount = scale(ranks[0]) if ranks else _scale_of_whole(group, scale)
    return Kronecker(left, other, amount)


def _scale_of_whole(group: Group, scale: Scale) -> float:
    return 1.0 if "alpha" in group.tensors else scale(0)


def _whole(group: Group, role: Role) -> WeightChange | None:
    tensor = group.tensors.get(role)
    return None if tensor is None else Whole(tensor)


def _check_roles(group: Group, roles: set[Role], expected: set[Role]) -> None:
    if roles != expected:
        raise BadForm(f"{group.layer} has {_listed(roles)}, not {_listed(expected)}")


def _listed(roles: set[Role]) -> str:
    return ", ".join(sorted(roles)) or "nothing"
