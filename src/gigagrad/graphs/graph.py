"""The captured graph: frozen data, one node per value, every value with its true whole-image shape.

A node is a *field* when it keeps the image's two spatial axes (`axes` names them, counted from the end), or one axis of
patches, and otherwise *global*: a parameter, a constant, a reduction, or arithmetic on those. Two kinds of operators
lead from a field to a global: the reductions, whose partial results over tiles are merged, and `gigagrad.gather`, which
keeps the whole field because an operator that has no tile rule reads it. `gigagrad.scatter` leads back: a global laid
out like an image is read box by box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

import torch
from torch.utils._pytree import TreeSpec

from gigagrad.boxes import Box
from gigagrad.graphs.whole import WholeCost

Given = TypeVarTuple("Given")
Found = TypeVar("Found")

Axes = tuple[int, int]
"""The positions of a field's y and x axes, negative: `(-2, -1)` for NCHW, `(-3, -2)` for NHWC. The same one twice where
it holds the patches of an image, row by row, or those of a bag: `(-4, -4)` for `(N, C, h, w)`."""

IMAGE_AXES: Axes = (-2, -1)


class Patches(NamedTuple):
    """Arrangement of patches that lie in one axis, row by row; of each so many items, its tokens or heads, say. All of
    that again for each position of what was joined with them before: tokens, where these come first.
    """

    rows: int
    columns: int
    items: int = 1
    before: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and the width of the field."""
        return self.rows, self.columns * self.items


BAG_AXES: Axes = (-4, -4)
FIELD_SUM = "gigagrad.field_sum"
FIELD_MAX = "gigagrad.field_max"
FIELD_BINS = "gigagrad.field_bins"
MOMENTS = "gigagrad.moments"
REDUCTIONS = frozenset({FIELD_SUM, FIELD_MAX, FIELD_BINS, MOMENTS})
"""Partial results of tiles are added up, or merged as `operators.merge_of` says; `field_max` has no gradient."""
EACH = "each."
"""Begins the name of an operator that is to take the items of its batch apart (`ops/each.py`)."""
GATHER = "gigagrad.gather"
SCATTER = "gigagrad.scatter"
SOURCES = frozenset({"image", "target", "parameter", "buffer", "constant"})


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The properties of an input that capture needs: its shape with the batch axis, its dtype, and whether it is an
    image."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    field: bool
    differentiable: bool = False
    """True if the gradient for this input is asked for."""
    bag: bool = False
    """True for patches `(N, C, h, w)`, in tiles of several of them."""

    @property
    def read_dtype(self) -> torch.dtype:
        """The dtype in which a run reads it: where the gradient for integers is asked for, floats of their values."""
        asked = self.differentiable and not self.dtype.is_floating_point
        return (torch.float32 if self.dtype.itemsize <= 2 else torch.float64) if asked else self.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to another node's value inside a node's arguments."""

    id: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that a node came from: dotted module path in the user's model (`""` in the loss) and `file:line`."""

    module_path: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value of the graph and the operator that makes it.

    `arguments` are named and ordered as in the operator's schema, defaults filled in, with `Ref` for values.
    `shape` is that of the whole image, batch axis included.
    """

    id: int
    op: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes | None
    origin: Origin
    differentiable: bool
    """True if a gradient flows through this value to a parameter that asks for one."""
    whole: bool = False
    """True for a global that holds what a whole-field operator made of every pixel."""
    patches: Patches | None = None
    """The patches, where one axis holds them all: y and x of the field count these then, or their items."""
    # What follows is derived once: planning asks millions of times.
    operands: tuple[int, ...] = field(init=False)
    """Ids of the nodes this one reads, in the order of the arguments, with repetitions."""
    is_field: bool = field(init=False)
    is_source: bool = field(init=False)
    is_reduction: bool = field(init=False)
    nbytes: int = field(init=False)
    bytes_per_pixel: int = field(init=False)
    """Bytes that one spatial position of a field takes."""
    _sizes: tuple[int, ...] = field(init=False)
    """Height and width of a field in pixels, or in patches."""

    def __post_init__(self) -> None:
        def derive(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        derive("operands", tuple(ref.id for ref in references(self.arguments)))
        derive("is_field", self.axes is not None)
        derive("is_source", self.op in SOURCES)
        derive("is_reduction", self.op in REDUCTIONS)
        derive("nbytes", self.dtype.itemsize * prod(self.shape))
        axes, patches = self.axes or (), self.patches
        derive("_sizes", tuple(self.shape[axis] for axis in axes) if patches is None else patches.size)
        derive("bytes_per_pixel", self.nbytes // max(1, prod(self._sizes)) if axes else 0)
        assert patches is None or prod(patches) == self.shape[self.spatial[0]], self

    @property
    def operator(self) -> str:
        """Return the operator's name as PyTorch has it."""
        return self.op.removeprefix(EACH)

    @property
    def spatial(self) -> Axes:
        """The axes of a field."""
        assert self.axes is not None
        return self.axes

    def size(self, axis: int) -> int:
        """Return the length in pixels of the whole field along `axis` (0 is y, 1 is x)."""
        return self._sizes[axis]

    @property
    def extent(self) -> tuple[int, int]:
        """Return the height and width of a field, in pixels or in patches."""
        height, width = self._sizes
        return height, width

    @property
    def box(self) -> Box:
        """Return all of a field."""
        return Box.whole(*self._sizes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape with an axis each for rows and columns: that of patches, too, while they are stored."""
        if self.patches is None:
            return self.shape
        at, before = len(self.shape) + self.spatial[0], self.patches.before
        return (*self.shape[:at], *([before] if before > 1 else []), *self.patches.size, *self.shape[at + 1 :])

    @property
    def stored_axes(self) -> Axes:
        """Return the spatial axes of the stored shape."""
        y, x = self.spatial
        return (y - 1, x) if self.patches else (y, x)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """A whole captured `loss(model(image), target)` or `model(image)`, in topological order (`nodes[i].id == i`)."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    """The loss, or what the model returns. One field alone is delivered tile by tile; several values are all global."""
    has_loss: bool
    constants: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    closed: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Tensors that the model or the loss reads from outside of both, by the names of their nodes."""
    updates: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Buffers that the model writes while it runs (running statistics), and the nodes of their new values."""

    structure: TreeSpec | None = None
    """The nesting of the outputs in what the model returns; None for a single tensor."""
    whole: Mapping[bool, WholeCost] = field(default_factory=lambda: MappingProxyType({}))
    """The cost of plain autograd for the whole image, without and with gradients, where that is known."""
    coarse_whole: Callable[[int], Graph] | None = None
    """Makes the graph in which fields of at most so many pixels are computed whole, as PyTorch wrote them."""
    reads: tuple[tuple[int, ...], ...] = field(init=False)
    """For each node the fields that it reads, without repetitions."""
    others: tuple[tuple[int, ...], ...] = field(init=False)
    """For each node what it reads beside fields."""
    _gathers: Mapping[int, tuple[int, ...]] = field(init=False)
    _reductions: Mapping[int, tuple[int, ...]] = field(init=False)
    _known: dict[tuple[object, ...], Any] = field(init=False, repr=False, default_factory=dict)
    """Answers of functions that are `remembered`."""

    def __post_init__(self) -> None:
        reads = (tuple(i for i in dict.fromkeys(node.operands) if self.nodes[i].is_field) for node in self.nodes)
        object.__setattr__(self, "reads", tuple(reads))
        others = (tuple(i for i in node.operands if not self.nodes[i].is_field) for node in self.nodes)
        object.__setattr__(self, "others", tuple(others))
        gathers, reductions = dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()
        for node in self.nodes:
            if node.op == GATHER:
                gathers[node.operands[0]] = (*gathers.get(node.operands[0], ()), node.id)
            elif node.is_reduction:
                reductions[node.operands[0]] = (*reductions.get(node.operands[0], ()), node.id)
        object.__setattr__(self, "_gathers", gathers)
        object.__setattr__(self, "_reductions", reductions)

    def with_whole(self, pixels: int) -> Graph:
        """Return the graph in which fields of at most so many pixels are whole; itself for none."""
        if not pixels:
            return self
        assert self.coarse_whole is not None
        return self.coarse_whole(pixels)

    @property
    def output(self) -> int:
        """The only output, or the first."""
        return self.outputs[0]

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    def is_shaped_like(self, other: Graph) -> bool:
        """Tell whether another graph has the same operators on the same values, and differs at most in numbers."""
        return (
            len(self.nodes) == len(other.nodes)
            and (self.outputs, self.has_loss, dict(self.updates), self.structure)
            == (other.outputs, other.has_loss, dict(other.updates), other.structure)
            and all(_form(one) == _form(two) for one, two in zip(self.nodes, other.nodes, strict=True))
        )

    def is_same_as(self, other: Graph) -> bool:
        """Tell whether another graph computes the same from the same tensors."""
        return (
            self.is_shaped_like(other)
            and self.whole == other.whole
            and all(
                exactly(one.arguments) == exactly(two.arguments)
                for one, two in zip(self.nodes, other.nodes, strict=True)
            )
            and self.closed.keys() == other.closed.keys()
            and all(tensor is other.closed[name] for name, tensor in self.closed.items())
            and same_bits(self.constants, other.constants)
        )

    def operands(self, node: Node) -> tuple[Node, ...]:
        return tuple(self.nodes[i] for i in node.operands)

    def source(self, op: str) -> Node | None:
        """Find the `image` or `target` node; None if the graph never reads it."""
        return next((node for node in self.nodes if node.op == op), None)

    def gathers(self, field: int) -> tuple[int, ...]:
        """Return the nodes that hand a field whole to whole-field operators."""
        return self._gathers.get(field, ())

    def reductions(self, field: int) -> tuple[int, ...]:
        """Return the reductions of a field."""
        return self._reductions.get(field, ())

    def read_late(self) -> set[int]:
        """Find the globals made of parameters and constants alone that globals read which need the pixels, too.

        Pulling gradients back arrives at them late, from the tape and not from tiles.
        """
        early = set[int]()
        found = set[int]()
        for node in self.nodes:
            if node.is_field or node.is_reduction or node.op == GATHER:
                continue
            if early.issuperset(node.operands):
                early.add(node.id)
            else:
                found |= early.intersection(node.operands)
        return found

    def ancestors(self, targets: Iterator[int] | tuple[int, ...]) -> set[int]:
        """Find the targets and every node they depend on."""
        seen: set[int] = set()
        stack = list(targets)
        while stack:
            node_id = stack.pop()
            if node_id not in seen:
                seen.add(node_id)
                stack.extend(self.nodes[node_id].operands)
        return seen


def remembered(find: Callable[[Graph, Unpack[Given]], Found]) -> Callable[[Graph, Unpack[Given]], Found]:
    """Wrap a function of a graph and of what can be hashed, so that each answer is found once and goes with the
    graph.
    """

    @wraps(find)
    def known(graph: Graph, *given: *Given) -> Found:
        key = find, *given
        try:
            answer: Found = graph._known[key]
        except KeyError:
            answer = graph._known[key] = find(graph, *given)
        return answer

    return known


_NUMBERS: Final = frozenset({int, float, bool, str, type(None), torch.dtype})
"""Types of most arguments: whether they are mappings takes longer to find out."""


def references(value: Any) -> Iterator[Ref]:
    """Yield every `Ref` inside a nest of mappings, lists and tuples, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)
    elif type(value) not in _NUMBERS and isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)


def substitute(value: Any, replace: Mapping[int, Any]) -> Any:
    """Copy a nest with every `Ref` exchanged for `replace[ref.id]`."""
    if isinstance(value, Ref):
        return replace[value.id]
    if isinstance(value, list | tuple):
        return [substitute(item, replace) for item in value]
    return value


def fill(value: Any, values: Iterator[Any]) -> Any:
    """Copy a nest with every `Ref`, in the order of `references`, exchanged for the next of `values`."""
    if isinstance(value, Ref):
        return next(values)
    if isinstance(value, list | tuple):
        return [fill(item, values) for item in value]
    return value


def _form(node: Node) -> tuple[Any, ...]:
    form = node.shape, node.dtype, node.axes, node.patches
    return node.op, node.operands, *form, node.differentiable, node.whole


def exactly(value: Any) -> Any:
    """Turn arguments into values of which only the same compare equal: 1, 1.0 and True differ, 0.0 and -0.0, too."""
    if isinstance(value, Mapping):
        return tuple((name, exactly(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(exactly, value))
    return type(value), repr(value) if isinstance(value, float | complex) else value


def same_bits(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether tensors of the same names hold the same bits."""
    return some.keys() == others.keys() and all(_bits(tensor) == _bits(others[name]) for name, tensor in some.items())


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
