"""A weight as a product of two narrow matrices, in 16 bits, and a rest with a smaller range, for fewer bits.

The largest singular directions hold a weight's outliers. Without them the rest has smaller blocks' maxima, so that four
bits round it less. This is SVDQuant's low-rank branch. Its smoothing, which moves outliers of the inputs into the
weights, is left out: it needs calibration and one more pass over the inputs, and on the embedded models takes off 10 to
16 % of the error that the branch leaves (`benchmarks/block_formats.py`). Source: Li et al., SVDQuant, arXiv 2411.05007.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MORE = 8
"""Extra directions that are computed, so that the last kept one is accurate as well."""
_PASSES = 4


def branch(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight's `rank` largest singular directions as two matrices.

    They are found by subspace iteration from seeded noise, so that the same weight gives the same matrices.
    Source: Halko, Martinsson and Tropp, arXiv 0909.4061.

    Args:
        weight: (out_features, in_features), floating point.

    Returns:
        `up` (out_features, rank) and `down` (rank, in_features), in the weight's dtype, whose product is subtracted
        from the weight; each has the square roots of the singular values.
    """
    import torch

    matrix = weight.detach().float()
    width = min(rank + _MORE, *matrix.shape)
    noise = torch.randn(matrix.shape[1], width, generator=torch.Generator("cpu").manual_seed(0))
    basis = torch.linalg.qr(matrix @ noise.to(matrix.device))[0]
    for _ in range(_PASSES):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    left, sizes, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    roots = sizes[:rank].sqrt()
    up, down = (basis @ left[:, :rank]) * roots, roots[:, None] * right[:rank]
    return up.to(weight.dtype).contiguous(), down.to(weight.dtype).contiguous()


def rest_of(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return a weight less its branch, in fp32; the branch as it is stored."""
    rest: torch.Tensor = weight.detach().float() - up.float() @ down.float()
    return rest
