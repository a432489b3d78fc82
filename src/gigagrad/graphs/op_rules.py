"""The registry of op rules: one rule per operator, and all that is known of it.

A rule says which span of each input a span of the output needs (`needs`, asked per axis: every operator with a tile
rule treats y and x independently, so geometry is one-dimensional integer arithmetic), how the operator runs on crops
(`bind` makes a function of one place, once for all tiles of the same `form`; or `run`, which is given every tile's own
place; padding only where a crop touches the true border of the image), what autograd keeps of it, what it computes and
takes for itself, whether its gradient depends on values, how an error in its input passes. Planning, cost, memory and
execution ask the rule; nobody else knows operators by name.

A use that a rule does not cover tile by tile raises `NotTileable`; lowering then has the operator read its fields
whole. What nobody has registered has the rule `Whole()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from gigagrad.boxes import Span
from gigagrad.graphs import operators
from gigagrad.graphs.graph import IMAGE_AXES, Axes, Node, Patches, Ref, fill, references
from gigagrad.work import Work


class NotTileable(Exception):
    """A rule cannot run this particular use of its operator tile by tile; the text says why."""


class NoPixels(NotTileable):
    """The image is too small: a field would have no pixels. Nothing can be done about that by running it whole."""


class Saved(Enum):
    """Tensors that autograd keeps of an operator for its backward pass (for predicting memory)."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    OUTPUT = "output"


class Affine(Enum):
    """Operands in which an operator is affine: then its gradient is known before their values are."""

    NO = "none"
    JOINTLY = "all together"
    SEPARATELY = "each alone"
    FIRST = "the first alone"


class Layout(Enum):
    """Memory that an operator's output lies in."""

    OWN = "in memory of its own"
    VIEW = "in its input's"
    TURNED = "in its input's, the axes in another order"
    PACKED = "in its input's, or in a copy where that lies in another order"


Bound = Callable[[Sequence[Any]], torch.Tensor]
"""Computes an operator's output on a tile from its operands there, in the order of `Call.operands`; None: not read."""
Gains = Mapping[int, torch.Tensor]
"""Factors `(C,)` on the rounding errors of each quantised field, with which they arrive in each channel of another."""


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
    """Place of a crop: the spans `(y, x)` of the output, and of each operand (None for globals and unread fields)."""

    out: tuple[Span, Span]
    operands: tuple[tuple[Span, Span] | None, ...]
    values: bool = True
    """False where not the output's values are asked for, but only its vector-Jacobian product."""

    @property
    def inside(self) -> tuple[Span, Span]:
        """Return the spans of the first operand's crop, for operators that always read it."""
        first = self.operands[0]
        assert first is not None
        return first


class OpRule(ABC):
    """Rule that says how a family of operators maps boxes and runs on crops, and what both cost."""

    saved: Saved = Saved.INPUTS
    pixelwise: bool = False
    """True where every value depends on its own position only and costs next to nothing to compute again."""
    on_images: bool = False
    """True where it works on images: what a whole-field operator left behind is read by it box by box again."""
    backward_without_output: bool = False
    """True where `bind` can skip the computation for a `Site` whose values are not asked for, leaving its gradient."""
    differentiable: bool = True
    """True where gradients flow through it at all."""
    affine: Affine = Affine.NO
    work: Work = Work.VALUES
    """The kind of work that takes most of its time."""
    gradient_forwards: float = 2.0
    """The work of its vector-Jacobian product, in that of a forward."""
    copies: bool = False
    """True where the output is the only input's values again, at most in another dtype."""
    lies: Layout | None = None
    """Memory that the output lies in, if not as the operator's schema declares it."""
    compiled: bool = False
    """True where the library compiles code for it and keeps that (`compiled_for`)."""
    errors_reach_weight: bool = False
    """True where its weight's gradient is a sum of products of what it reads and its cotangents, so that rounding
    errors of what it reads pass to that gradient (docs/math.md)."""

    def __init__(self, **facts: Any) -> None:
        """Set as `facts` what differs from other rules of the class: `Whole(compiled=True)`."""
        for name, fact in facts.items():
            assert hasattr(type(self), name), f"no op rule states {name}"
            setattr(self, name, fact)

    @abstractmethod
    def axes(self, call: Call, rank: int) -> Axes:
        """Return the output's spatial axes (its rank is given). Raises `NotTileable` for uses this rule does not cover.

        `call.node.axes` is not known yet; everything else of the call is.
        """

    def patches(self, call: Call) -> Patches:
        """Return the output's patches, where one axis holds them: those of the fields it reads.

        Raises `NotTileable` for fields of different patches.
        """
        found = {operand.patches for operand in call.fields}
        if len(found) != 1 or None in found:
            raise NotTileable("its inputs hold different patches")
        return next(filter(None, found))

    @abstractmethod
    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        """Return for each operand the span (inside the field) along `axis` that output span `out` needs; None: nothing.

        The same for every call of the operator with such shapes, axes, dtypes and arguments, and off the border of the
        image a rounded linear function of where `out` begins and ends: planning looks at few tiles for all
        (`Grid.sample`).
        """

    def needing(self, call: Call, axis: int) -> Callable[[Span], tuple[Span | None, ...]]:
        """Make the function that answers as `needs` for this use along this axis, which planning asks often."""
        return partial(self.needs, call, axis)

    def needs_alike(self, call: Call, axis: int) -> bool:
        """Say whether an output span always needs that span of every field, so that nobody need ask."""
        return False

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        """Compute the output on `site.out`, from arguments whose fields are crops of exactly `site.operands`. A rule
        defines this, or `bind`.
        """
        raise NotImplementedError(f"the rule of {call.node.op} defines neither run nor bind")

    def bind(self, call: Call, site: Site) -> Bound:
        """Make the function that computes the output on `site.out` from crops of exactly `site.operands`."""
        lengths = crop_lengths(call.node, site.out)

        def run(operands: Sequence[Any]) -> torch.Tensor:
            remaining = iter(operands)
            arguments = {name: fill(value, remaining) for name, value in call.node.arguments.items()}
            output = self.run(call, arguments, site)
            assert [output.shape[axis] for axis in call.node.spatial] == lengths, (call.node.op, output.shape, site)
            return output

        return run

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        """Return what `bind` depends on along an axis beside how long these spans are: places of the same lengths and
        forms share one function. None: on the place itself, and every tile has its own.
        """
        return None

    def contiguous_only(self, call: Call) -> bool:
        """Tell whether this use should not run on channels-last crops: no kernel for them, or one that fails."""
        return False

    def saves(self, call: Call) -> set[int]:
        """Return the ids of the fields that autograd keeps for the backward pass."""
        if self.saved is Saved.OUTPUT:
            return {call.node.id}
        return {field.id for field in call.fields} if self.saved is Saved.INPUTS else set()

    @property
    def takes_workspace(self) -> bool:
        """Say whether it ever allocates anything beside its output."""
        return type(self).workspace_bytes is not OpRule.workspace_bytes

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count the bytes that the operator allocates beside its output of so many pixels, in either direction."""
        return 0

    def flops(self, call: Call) -> float:
        """Count multiplications and additions of products over the whole output; what only moves or maps values is
        memory traffic. By default as PyTorch counts them (`torch.utils.flop_counter`).
        """
        return operators.flops(call.node.op, call.node.arguments, call.operands)

    def work_of(self, call: Call) -> Work:
        """Return the kind of work of one use."""
        return self.work

    def weight_work_of(self, call: Call) -> Work:
        """Return the kind of work of its weight's gradient, which is one of its `gradient_forwards`."""
        return self.work_of(call)

    def layout(self, call: Call) -> Layout:
        """Return the memory that the output of this use lies in."""
        return self.lies or (Layout.VIEW if operators.is_view(call.node.op) else Layout.OWN)

    def compiled_for(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> tuple[int, ...]:
        """Return what code is compiled for, and kept, of a crop's extent along `axis`; nothing where none is."""
        return ()

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        """Return how rounding errors pass: those of the output from those of the fields it reads, in the order of
        `call.fields`; None where that is not known. `value` gives the float64 values of a global operand.
        """
        return read[0] if self.copies else None


class Whole(OpRule):
    """Rule of what runs on whole tensors only: numbers, and fields that are materialised for it."""

    def axes(self, call: Call, rank: int) -> Axes:
        raise NotTileable("it has no op rule")

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        raise AssertionError(call.node.op)

    def bind(self, call: Call, site: Site) -> Bound:
        raise AssertionError(call.node.op)


class Pointwise(OpRule):
    """Rule of what reads of every field the positions that it makes, and runs on crops as it is."""

    pixelwise = True
    temporaries: int = 0
    """Results of the output's size that its derivative formulas hold between the first and the last."""

    def axes(self, call: Call, rank: int) -> Axes:
        return common_axes(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        return per_operand(call, lambda _: out)

    def needs_alike(self, call: Call, axis: int) -> bool:
        return type(self).needs is Pointwise.needs

    @property
    def takes_workspace(self) -> bool:
        return self.temporaries > 0 or type(self).workspace_bytes is not Pointwise.workspace_bytes

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return self.temporaries * call.node.bytes_per_pixel * out_pixels

    def bind(self, call: Call, site: Site) -> Bound:
        return plain(call)

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        return ()

    def flops(self, call: Call) -> float:
        return 0.0


class OutputSelector(Whole):
    """One output of an operator that has several."""

    lies = Layout.VIEW

    def flops(self, call: Call) -> float:
        return 0.0


def plain(call: Call, **more: Any) -> Bound:
    """Bind an operator as it is, with the graph's arguments and these."""
    function, arguments = operators.function(call.node.op), {**call.node.arguments, **more}
    given = [*operators.positional(call.node.op)] if not more else []
    leading = len([*takewhile(lambda name: isinstance(arguments[name], Ref), given)])
    rest, named = [arguments[name] for name in given[leading:]], {n: v for n, v in arguments.items() if n not in given}
    if leading and not [*references([rest, named])]:

        def run(operands: Sequence[Any]) -> torch.Tensor:
            result: torch.Tensor = function(*operands, *rest, **named)
            return result

        return run

    def run_nested(operands: Sequence[Any]) -> torch.Tensor:
        remaining = iter(operands)
        result: torch.Tensor = function(**{name: fill(value, remaining) for name, value in arguments.items()})
        return result

    return run_nested


def sum_of_gains(terms: Iterable[Gains]) -> Gains:
    """Add up gains where values come together; of one field's errors in the worst case, in which they add up."""
    total = dict[int, torch.Tensor]()
    for term in terms:
        for i, gain in term.items():
            total[i] = total[i] + gain if i in total else gain
    return total


def scaled_gains(gains: Gains, factor: torch.Tensor | float) -> Gains:
    """Multiply gains by a factor."""
    return {i: gain * factor for i, gain in gains.items()}


_RULES: dict[str, OpRule] = {}


def register(rule: OpRule, operators: Sequence[str]) -> None:
    """Give each of `operators` (ATen names such as `aten.relu.default`) this rule."""
    for op in operators:
        assert op not in _RULES, f"{op} has two rules"
        _RULES[op] = rule


def aten(words: str) -> list[str]:
    """Return full names of ATen operators, overload `default` where none is given: `aten("relu add.Tensor")`."""
    return [f"aten.{word}" if "." in word else f"aten.{word}.default" for word in words.split()]


register(OutputSelector(), ["gigagrad.item"])
_UNKNOWN = Whole()


def lookup(op: str) -> OpRule:
    """Return the operator's rule; of one that nobody registered, that of an operator on whole fields."""
    return _RULES.get(op, _UNKNOWN)


def registered() -> tuple[str, ...]:
    """Return every operator with a rule, sorted."""
    return tuple(sorted(_RULES))


def crop_lengths(node: Node, spans: tuple[Span, Span]) -> list[int]:
    """Return how long a crop of a field is along its two axes; where these are one, the number of patches, twice."""
    y, x = (span.length for span in spans)
    return [y, x] if node.patches is None else [node.patches.before * y * x] * 2


def shape_on(node: Node, spans: tuple[Span, Span]) -> list[int]:
    """Return the shape of a crop of a field, as operators take it."""
    shape = list(node.shape)
    for axis, length in zip(node.spatial, crop_lengths(node, spans), strict=True):
        shape[axis] = length
    return shape


def per_operand(call: Call, need: Callable[[Node], Span | None]) -> tuple[Span | None, ...]:
    """Ask `need(operand)` for every field operand; None for globals."""
    return tuple([need(operand) if operand.is_field else None for operand in call.operands])


def common_axes(call: Call) -> Axes:
    """Return the one position at which all field operands hold their spatial axes, or the same patches."""
    found = {(operand.spatial, operand.patches) for operand in call.fields}
    if len(found) != 1:
        places = sorted({axes for axes, _ in found})
        raise NotTileable(f"its inputs hold their spatial axes at different positions, {places}")
    return found.pop()[0]


def axes_without(gone: Collection[int], axes: Axes) -> Axes:
    """Return the spatial axes of a field whose axes `gone` are removed; all are negative."""
    y, x = (axis + sum(other > axis for other in set(gone)) for axis in axes)
    return y, x


def single_field(call: Call) -> Node:
    """Return the only field operand; an operator whose weights are fields too has no tile rule."""
    fields = call.fields
    if len(fields) != 1 or call.operands[0] is not fields[0]:
        raise NotTileable("more than its first input depends on the image's pixels")
    return fields[0]


def require_nchw(call: Call) -> Axes:
    """Return the axes of the only field operand, if they are those of `(N, C, H, W)`."""
    field = single_field(call)
    if field.axes != IMAGE_AXES or len(field.shape) != 4:
        raise NotTileable("its input is not laid out as (N, C, H, W)")
    return IMAGE_AXES
