"""What operators refuse only when they see values: a class that is out of range, two dtypes that do not go together."""

from __future__ import annotations

from types import TracebackType
from typing import Final

import torch

from gigagrad.errors import OperatorError
from gigagrad.graphs import Node

_REMEDIES: Final = {
    "differentiation for outputs with complex dtype": "; multiply by a mask, or torch.where, in the place of writing "
    "into complex numbers: spectrum * kept",
    "not implemented for 'Long'": "; give it floats: x.double(), and .long() of what comes out",
    "not implemented for 'Byte'": "; give it floats: x.float(), and .byte() of what comes out",
}
"""What to write instead, by what PyTorch says."""


class explained:  # noqa: N801 - reads as a statement
    """What PyTorch raises inside, as an OperatorError with the operator's name and place."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError | IndexError | TypeError) and not isinstance(error, torch.OutOfMemoryError):
            node, reason = self._node, str(error).strip().splitlines()
            told = reason[0] if reason else type(error).__name__
            remedy = next((remedy for said, remedy in _REMEDIES.items() if said in told), "")
            raise OperatorError(
                node.op, node.origin.module_path, node.origin.source, told.rstrip(".") + remedy
            ) from error
