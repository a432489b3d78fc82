"""The optimizer APOLLO, by its paper: AdamW's steps with next to none of its state.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", MLSys 2025, algorithm 1, and Fira's limit of growth
(Chen et al., 2024). Of a matrix G of gradients, (m, n) with m <= n, AdamW's moments are kept for a random projection
R = P G alone, (rank, n). How much these would scale R is how much G itself is scaled, channel by channel, or as a whole
where the rank is 1 (APOLLO-Mini). P is drawn from the step, the same for all parameters, and never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_GROWTH = 1.01
"""The most that the norm of a scaled gradient grows by in a step."""
_MINI_SCALE = 128**0.5
"""APOLLO-Mini's factor, which makes up for one direction in the place of all."""


class Apollo(torch.optim.Optimizer):
    """Steps matrices by scaled gradients, and all else as AdamW does. Kernels of convolutions are matrices (O, I H W).

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decays of the two moments.
        eps: Added to the root of the second.
        weight_decay: Decoupled, as AdamW's.
        rank: Rows of the projection; matrices with no more rows or columns are stepped as by AdamW.
        gap: Steps until another projection is drawn.
        scale: Factor of scaled gradients; by default the root of 128 for rank 1, else 1.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 1,
        gap: int = 200,
        scale: float | None = None,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"got lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, expected 0 or more")
        if rank < 1 or gap < 1:
            raise ValueError(f"got rank={rank}, gap={gap}, expected whole numbers of 1 or more")
        scale = scale if scale is not None else _MINI_SCALE if rank == 1 else 1.0
        own = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "gap": gap, "scale": scale}
        super().__init__(params, {"lr": lr, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; returns what `closure`, which computes these, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _step(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    projected = _projected(gradient, group, state)
    seen = gradient if projected is None else projected[1]
    if not state:
        # On the host, as PyTorch's own: it is read in every step.
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(seen), torch.zeros_like(seen)
    (beta1, beta2), average, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    step = float(state["step"])
    average.lerp_(seen, 1 - beta1)
    square.mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
    root = (1 - beta2**step) ** 0.5
    direction = average / (square.sqrt() + group["eps"] * root)
    if projected is not None:
        matrix, seen = projected
        over = None if group["rank"] == 1 else 0
        factor = torch.linalg.vector_norm(direction, dim=over) / (torch.linalg.vector_norm(seen, dim=over) + 1e-8)
        scaled = matrix * factor
        norm = torch.linalg.vector_norm(scaled)
        if "norm" in state:
            limited = torch.minimum(norm, _GROWTH * state["norm"])
            scaled *= limited / (norm + 1e-30)
            norm = limited
        state["norm"] = norm
        scaled *= group["scale"]
        direction = (scaled if _is_wide(gradient) else scaled.mT).reshape(gradient.shape)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(direction, alpha=group["lr"] * root / (1 - beta1**step))


def _matrix(tensor: Tensor) -> Tensor:
    """View a tensor as (rows, columns), without axes of length 1; what has less than two others has one row."""
    sides = [side for side in tensor.shape if side > 1]
    return tensor.reshape(sides[0] if len(sides) > 1 else 1, -1)


def _is_wide(tensor: Tensor) -> bool:
    rows, columns = _matrix(tensor).shape
    return rows <= columns


def _projected(gradient: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the gradient as a matrix (m, n), m <= n, and its projection (rank, n); None where it is kept whole."""
    matrix = _matrix(gradient)
    matrix = matrix if _is_wide(gradient) else matrix.mT
    rank, rows = group["rank"], matrix.shape[0]
    if rows <= rank:
        return None
    draw = torch.Generator().manual_seed(int(state["step"]) // group["gap"] if state else 0)
    projection = torch.randn(rank, rows, generator=draw) / rank**0.5
    return matrix, projection.to(matrix) @ matrix
