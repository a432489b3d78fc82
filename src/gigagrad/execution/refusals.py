"""Report what operators refuse only when they see values: a class that is out of range, dtypes that do not match."""

from __future__ import annotations

import dis
from types import TracebackType
from typing import Final

import torch

from gigagrad.errors import OperatorError
from gigagrad.graphs import Node
from gigagrad.graphs.capture.loss_module import is_user_code

_REMEDIES: Final = {
    "differentiation for outputs with complex dtype": "; multiply by a mask, or torch.where, in the place of writing "
    "into complex numbers: spectrum * kept",
    "not implemented for 'Long'": "; give it floats: x.double(), and .long() of what comes out",
    "not implemented for 'Byte'": "; give it floats: x.float(), and .byte() of what comes out",
}
"""Advice on what to write instead, by what PyTorch says."""
_RAISING: Final = frozenset({"RAISE_VARARGS", "RERAISE"})


def refused_by_pytorch(error: BaseException) -> OperatorError | None:
    """Say of an error of the model that runs by itself where it was raised; None for one that Python code raised."""
    trace = error.__traceback__
    line, innermost = "", trace
    while trace is not None:
        filename, module = trace.tb_frame.f_code.co_filename, trace.tb_frame.f_globals.get("__name__", "")
        if is_user_code(filename) and module.partition(".")[0] != __name__.partition(".")[0]:
            line = f"{filename}:{trace.tb_lineno}"
        innermost, trace = trace, trace.tb_next
    if innermost is None or not isinstance(error, RuntimeError | IndexError | TypeError):
        return None
    code = innermost.tb_frame.f_code.co_code
    if dis.opname[code[innermost.tb_lasti]] in _RAISING or isinstance(error, torch.OutOfMemoryError):
        return None
    return OperatorError("of PyTorch", "", line, _explanation(error), "the model or the loss")


def _explanation(error: BaseException) -> str:
    """Return the first line of what PyTorch says, and what to write instead where that is known."""
    reason = str(error).strip().splitlines()
    told = reason[0] if reason else type(error).__name__
    return told.rstrip(".") + next((remedy for said, remedy in _REMEDIES.items() if said in told), "")


class explained:  # noqa: N801 - reads as a statement
    """Raises what PyTorch raises inside as an OperatorError with the operator's name and place."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError | IndexError | TypeError) and not isinstance(error, torch.OutOfMemoryError):
            origin = self._node.origin
            raise OperatorError(self._node.op, origin.module_path, origin.source, _explanation(error)) from error
