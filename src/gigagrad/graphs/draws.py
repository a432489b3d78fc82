"""Find the calls in which a model draws random numbers, where PyTorch runs it by itself on the whole image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

DROPOUTS: Final = frozenset({F.dropout, torch.dropout})
"""Functions whose mask has the shape of their operand."""
DRAWING: Final = DROPOUTS | {
    *(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout),
    *(F.alpha_dropout, F.feature_alpha_dropout, F.scaled_dot_product_attention),
    *(torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_),
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like),
}
"""Functions that may draw, once a call. A model that draws with any other is computed in tiles."""
_OFF: Final = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments with which an operator that may draw does not."""


def draws(function: Any, arguments: Mapping[str, Any]) -> bool:
    """Tell whether an operator of PyTorch draws random numbers, given these arguments by name."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
    return is_random and not any(arguments.get(name, None) == off for name, off in _OFF.items())


class Draw(NamedTuple):
    """One call that draws."""

    function: str
    """The name of the function that is called."""
    op: str
    """The operator that draws in it, without the mark of one that writes in place."""
    shape: tuple[int, ...]
    """The shape of what the operator makes."""


class DrawingCalls(TorchFunctionMode):
    """Note the calls of functions that may draw, in the block; `met` is told of each operator that does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Draw | None] = []
        self._called: str | None = None
        self._unknown = False

    @property
    def calls(self) -> tuple[Draw | None, ...] | None:
        """The calls in their order, each with what it draws or None; None where something else drew, too."""
        return None if self._unknown else tuple(self._calls)

    def met(self, op: str, result: torch.Tensor) -> None:
        """Note an operator that draws."""
        if self._called is None or self._calls[-1] is not None:
            self._unknown = True
            return
        self._calls[-1] = Draw(self._called, op.removesuffix("_"), tuple(result.shape))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DRAWING:
            return func(*args, **kwargs or {})
        self._calls.append(None)
        self._called = func.__name__
        try:
            return func(*args, **kwargs or {})
        finally:
            self._called = None
