"""Tile programs: a segment's operators, bound once for all tiles that are alike, and run on one tile at a time.

Two tiles are alike where their crops have the same sizes, lie in one another alike and touch the image's border alike:
that is their signature. A program of one signature is a flat list of steps: a function, where its inputs are found and
its output is put, and what is freed after it. It keeps nothing of a tile, so that several threads may run it at once.
What depends on where a tile lies (random numbers by position, say) is bound for each tile when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from gigagrad.allowances import ANNOUNCED_BYTES
from gigagrad.boxes import Box, Span
from gigagrad.execution.refusals import explained
from gigagrad.execution.rounding_error import Watch
from gigagrad.graphs import FIELD_BINS, MOMENTS, Call, Graph, Node, Site, lookup
from gigagrad.graphs.crops import View, as_stored, batched, bound_view, laid_out
from gigagrad.graphs.op_rules import Bound
from gigagrad.graphs.operators import call as call_operator
from gigagrad.plans import Segment, TileGeometry
from gigagrad.plans.geometry import AxisGeometry, reference
from gigagrad.plans.memory import workspace_bytes
from gigagrad.stores import Rounding

_MOST_PROGRAMS: Final = 64
"""Programs kept of a segment: where sizes are divided unevenly, few tiles may be alike."""
_MOST_STEPS: Final = 256
"""Steps kept of an operator, on average over those of a segment."""
_MOST_PLACES: Final = 64
"""Places for which a function that depends on the place is kept: enough for an image of few tiles."""

Values = dict[int, torch.Tensor]
"""Values by node id."""
_NONE: Final[Mapping[int, torch.Tensor]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class TileInputs:
    """Tensors that a tile is computed from, by node id. Backward, the shares of the segment's kept fields come
    along.
    """

    crops: Values
    """Crops of the fields that the segment reads."""
    cotangents: Values
    """Cotangents of the kept fields' shares, from later segments."""
    stored: Values
    """The kept fields' shares themselves."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.crops.values(), *self.cotangents.values(), *self.stored.values())


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Results of a tile's forward, with autograd's graph back to its leaves, until its cotangents are known."""

    shares: Values
    """The tile's share of every target."""
    stored: Values
    """Shares of kept fields as they were stored, where they were not computed again."""
    globals: Values
    """The leaves among the globals."""
    crops: Values
    """The leaves among the fields read."""


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """Settings and values that all tiles of a pass have in common and that belong to one run."""

    layout: torch.memory_format = torch.contiguous_format
    """The memory format of crops."""
    roundings: Mapping[int, Rounding] = field(default_factory=dict)
    """Roundings of kept fields: all that reads them reads what their stores will give back."""
    make_room: Callable[[int], None] | None = None
    """Called with the bytes of every block before it is taken, but for the smallest."""
    globals: Values = field(default_factory=dict)
    """Values of the globals that the segment reads, detached."""
    leaves: Sequence[int] = ()
    """The globals whose gradients are asked for."""
    fields: Sequence[int] = ()
    """The fields read whose gradients are."""
    cotangents: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Cotangents of the segment's reductions."""
    known: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Values of those reductions that are known: then sums of a tile are wanted for their gradients only."""


class SegmentPrograms:
    """The programs of one segment, by the signature of a tile."""

    def __init__(self, graph: Graph, segment: Segment, device: torch.device) -> None:
        self.graph, self.segment, self.device = graph, segment, device
        self.targets = segment.targets(graph)
        self.calls = [_on_device(Call(graph[i], graph.operands(graph[i])), device) for i in segment.fields]
        self.places = {i: place for place, i in enumerate((*segment.globals, *segment.reads, *segment.fields))}
        """Places of values in the list that a tile's run fills; one more place is always empty."""
        self.silent = frozenset(i for i in segment.kept if lookup(graph[i].op).backward_without_output)
        """The kept fields whose operators need no output for their gradient."""
        self._reference = reference(graph, segment)
        self._forms: dict[tuple[int, Span], _Form] = {}
        self._known: dict[Hashable, _Form] = {}
        self._programs: dict[tuple[_Form, _Form], TileProgram] = {}
        self._steps: dict[Hashable, _Step] = {}

    def at(self, tile: TileGeometry) -> TileProgram:
        """Return the program of a tile."""
        signature = self._form(0, tile.y), self._form(1, tile.x)
        program = self._programs.get(signature)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[signature] = program = TileProgram(self, tile, *signature)
        return program

    def step(self, call: Call, tile: TileGeometry, y: _Extent, x: _Extent, *, is_asked: bool) -> _Step:
        """Return the step of an operator, which programs have in common where its own extents are the same."""
        key = call.node.id, y, x, is_asked
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _MOST_STEPS * len(self.calls):
                self._steps.clear()
            self._steps[key] = step = _step(self, call, tile, y, x, is_asked=is_asked)
        return step

    def _form(self, axis: int, geometry: AxisGeometry) -> _Form:
        """Return a tile's form along one axis. Its share of the largest target fixes all of it."""
        place = axis, geometry.wanted[self._reference]
        form = self._forms.get(place)
        if form is None:
            form = self._form_of(axis, geometry)
            self._forms[place] = form = self._known.setdefault((form.reads, form.operators, form.shares), form)
        return form

    def _form_of(self, axis: int, geometry: AxisGeometry) -> _Form:
        spans = geometry.spans

        def extent(call: Call) -> _Extent | None:
            out = spans.get(call.node.id)
            if out is None:
                return None
            needs = geometry.needs(call.node.id)
            pairs = zip(call.operands, needs, strict=True)
            cuts = tuple(None if need is None else _Cut.of(need, spans[operand.id]) for operand, need in pairs)
            return _Extent(out.length, cuts, lookup(call.node.op).form(call, axis, out, needs))

        wanted = ((i, geometry.wanted[i]) for i in self.targets)
        return _Form(
            tuple(spans[i].length if i in spans else 0 for i in self.segment.reads),
            tuple(map(extent, self.calls)),
            tuple(None if span.empty else _Cut.of(span, spans[i]) for i, span in wanted),
        )


class _Cut(NamedTuple):
    """Part of a crop along one axis."""

    start: int
    length: int
    whole: int
    """Length of the crop."""

    @classmethod
    def of(cls, span: Span, crop: Span) -> _Cut:
        return cls(span.start - crop.start, span.length, crop.length)


class _Extent(NamedTuple):
    """Extent of one operator in a tile, along one axis."""

    length: int
    cuts: tuple[_Cut | None, ...]
    """Chunks that it reads of its operands' crops."""
    form: Hashable | None
    """See `OpRule.form`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Half of a signature: all that tiles have in common along one axis. One object stands for all that are equal."""

    reads: tuple[int, ...]
    """Lengths of the crops of the fields read; 0 where there is none."""
    operators: tuple[_Extent | None, ...]
    shares: tuple[_Cut | None, ...]
    """Parts of the targets' crops that are the tile's own."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One operator of a program."""

    node: Node
    inputs: tuple[tuple[int, View | None], ...]
    """For each operand its place, and the view of what the operator reads of it."""
    output: int
    run: Bound | None
    """The bound operator; None where it depends on the place."""
    run_at: Callable[[Site], Bound] | None
    """Binds it to a place, where it does."""
    is_asked: bool
    """False where only its vector-Jacobian product is asked for."""
    is_large: bool
    """True where its result is announced."""
    has_large_operands: bool
    """True where their gradients may be."""
    nbytes: int
    workspace_bytes: int

    def bound_at(self, tile: TileGeometry) -> Bound:
        """Return the operator bound for a tile."""
        assert self.run_at is not None
        return self.run_at(Site(*tile.site(self.node.id), self.is_asked))

    def announce_gradients(
        self, value: torch.Tensor, operands: Sequence[torch.Tensor | None], make_room: Callable[[int], None]
    ) -> None:
        """Have room made for what its backward makes, before it does."""
        nbytes = sum(x.nbytes for x in operands if x is not None and x.requires_grad)
        if value.grad_fn is not None and nbytes >= ANNOUNCED_BYTES:
            value.grad_fn.register_prehook(lambda _: make_room(nbytes + self.workspace_bytes))


class TileProgram:
    """The steps of all tiles of one signature."""

    def __init__(self, programs: SegmentPrograms, tile: TileGeometry, y: _Form, x: _Form) -> None:
        """Take any `tile` of the signature `y`, `x`."""
        graph, segment, places = programs.graph, programs.segment, programs.places
        self.graph, self.segment = graph, segment
        self._crops = [
            (i, graph[i].stored_axes, size)
            for i, size in zip(segment.reads, zip(y.reads, x.reads, strict=True), strict=True)
            if all(size)
        ]
        self._rest = [None] * (len(segment.fields) + 1)
        extents = zip(programs.calls, y.operators, x.operators, strict=True)
        computed = [(call, tile, own_y, own_x) for call, own_y, own_x in extents if own_y and own_x]
        last = {i: call.node.id for call, *_ in computed for i in graph.reads[call.node.id]}
        frees: dict[int, list[int]] = {}
        for i, reader in last.items():
            if i not in programs.targets:
                frees.setdefault(reader, []).append(places[i])
        self._steps = [(programs.step(*of, is_asked=True), frees.get(of[0].node.id, ())) for of in computed]
        silent = [of for of in computed if of[0].node.id in programs.silent]
        self._without_values = {of[0].node.id: programs.step(*of, is_asked=False) for of in silent}
        cuts = zip(programs.targets, y.shares, x.shares, strict=True)
        self._shares = [(i, places[i], _share(graph[i], own_y, own_x)) for i, own_y, own_x in cuts if own_y and own_x]
        self._bags = [(places[i], graph[i]) for i, *_ in self._crops if graph[i].patches]

    def run(
        self,
        tile: TileGeometry,
        crops: Values,
        globals_: Values,
        context: PassContext = PassContext(),
        *,
        silent: Container[int] = (),
        watch: Watch | None = None,
    ) -> Values:
        """Compute the tile's share of every target that has one, by node id. `crops` of the fields read is emptied.

        With autograd on, the results carry its graph back to whichever of `crops` and `globals_` ask for gradients; the
        values of `silent` targets are not computed then.
        """
        assert all((crops[i].shape[y], crops[i].shape[x]) == size for i, (y, x), size in self._crops)
        values: list[Any] = [globals_[i] for i in self.segment.globals]
        values += [crops.get(i) for i in self.segment.reads]
        values += self._rest
        crops.clear()
        for place, node in self._bags:
            values[place] = laid_out(batched(values[place], node), context.layout)
        make_room, roundings = context.make_room, context.roundings
        for step, frees in self._steps:
            node_id = step.node.id
            if node_id in silent:
                step = self._without_values[node_id]
            operands = [values[place] if view is None else view(values[place]) for place, view in step.inputs]
            if step.is_large and make_room is not None:
                make_room(step.nbytes + step.workspace_bytes)
            with explained(step.node):
                run = step.run or step.bound_at(tile)
                value = run(operands)
            if step.has_large_operands and make_room is not None:
                step.announce_gradients(value, operands, make_room)
            if watch is not None and node_id in watch:
                watch.attach(node_id, operands[0], value)
            del operands
            if node_id in roundings and step.is_asked:
                value = _rounded(step.node, value, roundings[node_id], tile)
            values[step.output] = value
            del value
            for place in frees:
                values[place] = None
        return {i: values[place] if view is None else view(values[place]) for i, place, view in self._shares}

    def partial_sums(self, tile: TileGeometry, shares: Values, known: Mapping[int, torch.Tensor] = _NONE) -> Values:
        """Compute the tile's contribution to each reduction of the segment whose field has a share. Those whose whole
        values are `known` are wanted for their gradients only.
        """
        sums = {}
        for reduction in self.segment.reductions:
            node = self.graph[reduction]
            read = node.operands[0]
            if read not in shares:
                continue
            arguments = {**node.arguments, "field": batched(shares[read], self.graph[read])}
            if node.op == MOMENTS:
                arguments["known"] = known.get(reduction)
            if node.op == FIELD_BINS:
                arguments |= self._bins(node, tile.wanted(read))
            with explained(node):
                sums[reduction] = call_operator(node.op, arguments)
        return sums

    def gradients(
        self,
        tile: TileGeometry,
        inputs: TileInputs,
        context: PassContext,
        watch: Watch | None = None,
        saved: Activations | None = None,
    ) -> tuple[Values, Values, Values]:
        """Compute the tile's partial sums and its vector-Jacobian product: of leaves among the globals, and of fields
        that the segment reads, the gradients that it has a share in. Sums that are known mean nothing. What was `saved`
        is not computed again.

        A kept field's share gets its cotangent from later segments and from its own reductions. Where its operator
        needs no output for its gradient, the share is not computed again: what the reductions need of it is stored.
        """
        if saved is None:
            stored = {i: inputs.stored[i].requires_grad_() for i in inputs.stored if i in self._without_values}
            saved = self.activations(tile, inputs.crops, context, stored=stored, watch=watch)
        sums, outputs, seeds = self._outputs(tile, saved, inputs.cotangents, context)
        own, crops = saved.globals, saved.crops
        if not outputs or not (own or crops):
            return sums, {}, {}
        seeds = [laid_out(seed, context.layout) for seed in seeds]
        found = torch.autograd.grad(outputs, [*own.values(), *crops.values()], seeds, allow_unused=True)
        of_own, of_crops = found[: len(own)], found[len(own) :]
        return (
            sums,
            {i: gradient for i, gradient in zip(own, of_own, strict=True) if gradient is not None},
            {i: gradient for i, gradient in zip(crops, of_crops, strict=True) if gradient is not None},
        )

    def activations(
        self,
        tile: TileGeometry,
        crops: Values,
        context: PassContext,
        *,
        stored: Values | None = None,
        watch: Watch | None = None,
    ) -> Activations:
        """Compute the tile's share of every target with autograd on; `stored` ones are there. `crops` is emptied."""
        stored = stored or {}
        # Of its own: two threads that make the gradient's node of one tensor can wait for each other for ever, one with
        # Python's lock and one with the tensor's (PyTorch 2.13, torch::autograd::impl::grad_accumulator).
        own = {i: context.globals[i].detach().requires_grad_() for i in context.leaves}
        asked = {i: crops[i].requires_grad_() for i in context.fields if i in crops}
        with torch.enable_grad():
            shares = self.run(tile, crops, {**context.globals, **own}, context, silent=stored, watch=watch)
        return Activations(shares, stored, own, asked)

    def _outputs(
        self, tile: TileGeometry, saved: Activations, of_shares: Values, context: PassContext
    ) -> tuple[Values, list[torch.Tensor], list[torch.Tensor]]:
        """Compute partial sums (off autograd's graph), and the tensors to differentiate with their cotangents, which
        are given of shares and, in the context, of reductions.
        """
        shares, stored, cotangents = saved.shares, saved.stored, context.cotangents
        with torch.enable_grad():
            sums = self.partial_sums(tile, {**shares, **stored}, context.known)
        outputs = {i: shares[i] for i in of_shares if i in shares and shares[i].requires_grad}
        seeds = {i: of_shares[i] for i in outputs}
        pulled: dict[int, list[int]] = {}
        for reduction in cotangents:
            if reduction in sums and sums[reduction].requires_grad:
                read = self.graph[reduction].operands[0]
                if read in stored:
                    pulled.setdefault(read, []).append(reduction)
                else:
                    outputs[reduction], seeds[reduction] = sums[reduction], cotangents[reduction]
        for read, reductions in pulled.items():
            if read in outputs:
                (found,) = torch.autograd.grad(
                    [sums[r] for r in reductions], stored[read], [cotangents[r] for r in reductions]
                )
                seeds[read] = seeds[read] + found
        sums = {i: value.detach() for i, value in sums.items()}
        return sums, list(outputs.values()), list(seeds.values())

    def _bins(self, node: Node, wanted: Box) -> dict[str, torch.Tensor]:
        """Return the weights that the pixels of a tile have in the bins of a grid."""
        found = {}
        for name, span in (("weights_y", wanted.y), ("weights_x", wanted.x)):
            weights = self.graph.constants[self.graph[node.arguments[name].id].arguments["name"]]
            found[name] = weights[:, span.start : span.stop]
        return found


def _step(
    programs: SegmentPrograms, call: Call, tile: TileGeometry, y: _Extent, x: _Extent, *, is_asked: bool
) -> _Step:
    node, rule, places = call.node, lookup(call.node.op), programs.places
    inputs: list[tuple[int, View | None]] = []
    operand_bytes = 0
    for operand, along_y, along_x in zip(call.operands, y.cuts, x.cuts, strict=True):
        if not operand.is_field:
            inputs.append((places[operand.id], None))
            operand_bytes += operand.nbytes
        elif along_y is None or along_x is None:
            inputs.append((len(places), None))
        else:
            inputs.append((places[operand.id], _view(operand, along_y, along_x)))
            operand_bytes += along_y.length * along_x.length * operand.bytes_per_pixel
    nbytes = y.length * x.length * node.bytes_per_pixel
    is_large, has_large_operands = nbytes >= ANNOUNCED_BYTES, operand_bytes >= ANNOUNCED_BYTES
    has_form = y.form is not None and x.form is not None
    return _Step(
        node=node,
        inputs=tuple(inputs),
        output=places[node.id],
        run=rule.bind(call, Site(*tile.site(node.id), is_asked)) if has_form else None,
        run_at=None if has_form else lru_cache(maxsize=_MOST_PLACES)(partial(rule.bind, call)),
        is_asked=is_asked,
        is_large=is_large,
        has_large_operands=has_large_operands,
        nbytes=nbytes,
        workspace_bytes=workspace_bytes(call, tile) if is_large or has_large_operands else 0,
    )


def _on_device(call: Call, device: torch.device) -> Call:
    """Return a use of an operator that makes tensors there."""
    if call.node.arguments.get("device") is None:
        return call
    return Call(replace(call.node, arguments={**call.node.arguments, "device": device}), call.operands)


def _view(node: Node, y: _Cut, x: _Cut) -> View | None:
    """Return how a crop of a field is cut; None where all of it is taken."""
    return bound_view(node.spatial, (y.start, x.start), (y.length, x.length), (y.whole, x.whole))


def _share(node: Node, y: _Cut, x: _Cut) -> View | None:
    """Return how the tile's own part of a target is cut, and laid out to be stored."""
    view = _view(node, y, x)
    if node.patches is None:
        return view
    return lambda crop: as_stored(crop if view is None else view(crop), node, (y.length, x.length))


def _rounded(node: Node, value: torch.Tensor, rounding: Rounding, tile: TileGeometry) -> torch.Tensor:
    straight_through: Any = _StraightThrough.apply
    box = tile.box(node.id)
    assert box is not None
    rounded: torch.Tensor = straight_through(as_stored(value, node, box.shape), rounding, box, node.stored_axes)
    return batched(rounded, node)


class _StraightThrough(torch.autograd.Function):
    """Rounding of values; the cotangent passes as if they had not been rounded (docs/math.md)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounding: Rounding, box: Box, axes: tuple[int, int]) -> torch.Tensor:
        return rounding.round(value, box, axes)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cotangent, None, None, None
