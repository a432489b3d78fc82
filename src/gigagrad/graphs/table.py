"""The operator table: one row per operator, and the two questions a row answers.

1. Which span of each input does a span of the output need (`needs`)? Asked per axis: every operator with a row treats
   y and x independently, so geometry is one-dimensional integer arithmetic.
2. How does the operator run on crops (`run`), padding only where a crop touches the true border of the image, so that
   the crop of the output is bit for bit of the same mathematics as the whole field's?

What has no row, or is used in a way its row does not cover, is refused by `Refused`; lowering then has the operator
read its fields whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from gigagrad.boxes import Span
from gigagrad.graphs.graph import Axes, Node


class Refused(Exception):
    """A row cannot run this particular use of its operator tile by tile; the text says why."""


class NoPixels(Refused):
    """The image is too small: a field would have no pixels. Nothing can be done about that by running it whole."""


class Saved(Enum):
    """What autograd keeps of an operator for its backward pass (for predicting memory)."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One use of an operator: its node and, in the order of `node.operands`, the nodes it reads."""

    node: Node
    operands: tuple[Node, ...]

    def __getitem__(self, argument: str) -> Any:
        return self.node.arguments[argument]

    @property
    def fields(self) -> tuple[Node, ...]:
        return tuple(operand for operand in self.operands if operand.is_field)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a crop lies: the spans `(y, x)` of the output, and of each operand (None for globals and unread fields)."""

    out: tuple[Span, Span]
    operands: tuple[tuple[Span, Span] | None, ...]
    values: bool = True
    """Whether the output's values are asked for; without them only its vector-Jacobian product is."""


class Row(ABC):
    """How one family of operators maps boxes and runs on crops."""

    saved: Saved = Saved.INPUTS
    pixelwise: bool = False
    """Whether every value depends on its own position only and costs next to nothing to compute again."""
    backward_without_output: bool = False
    """Whether `run` can skip the computation for a `Site` whose values are not asked for, leaving only its gradient."""

    @abstractmethod
    def axes(self, call: Call, rank: int) -> Axes:
        """The output's spatial axes (its rank is given). Raises `Refused` for uses this row does not cover.

        `call.node.axes` is not known yet; everything else of the call is.
        """

    @abstractmethod
    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        """For each operand the span (inside the field) along `axis` that output span `out` needs; None: nothing."""

    @abstractmethod
    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        """The output on `site.out`, from arguments whose fields are crops of exactly `site.operands`."""

    def contiguous_only(self, call: Call) -> bool:
        """Whether this use should not run on channels-last crops: no kernel for them, or one that fails."""
        return False

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Bytes the operator allocates besides its output, in either direction, for a crop of `out_pixels`."""
        return 0

    def compiled_for(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> tuple[int, ...]:
        """What of a crop's extent along `axis` code is compiled for, and kept; nothing where none is compiled."""
        return ()


_TABLE: dict[str, Row] = {}


def register(row: Row, operators: Sequence[str]) -> None:
    """Give each of `operators` (ATen names such as `aten.relu.default`) this row."""
    for op in operators:
        assert op not in _TABLE, f"{op} has two rows"
        _TABLE[op] = row


def lookup(op: str) -> Row | None:
    return _TABLE.get(op)


def operators() -> tuple[str, ...]:
    """Every operator with a row, sorted."""
    return tuple(sorted(_TABLE))


def per_operand(call: Call, need: Callable[[Node], Span | None]) -> tuple[Span | None, ...]:
    """`need(operand)` for every field operand, None for globals."""
    return tuple(need(operand) if operand.is_field else None for operand in call.operands)


def common_axes(call: Call) -> Axes:
    """The one position at which all field operands hold their spatial axes."""
    found = {operand.axes for operand in call.fields}
    if len(found) != 1:
        raise Refused(f"its inputs hold their spatial axes at different positions, {sorted(found, key=str)}")
    axes = found.pop()
    assert axes is not None
    return axes


def single_field(call: Call) -> Node:
    """The only field operand; an operator whose weights are fields too has no tile rule."""
    fields = call.fields
    if len(fields) != 1 or call.operands[0] is not fields[0]:
        raise Refused("more than its first input depends on the image's pixels")
    return fields[0]
