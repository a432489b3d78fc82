"""Tile programs: a stage's operators, bound once for all tiles that are alike, and run on one tile at a time.

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
from typing import Any, Final

import torch

from gigagrad.allowances import ANNOUNCED_BYTES
from gigagrad.boxes import Box, Span
from gigagrad.execution.layout import laid_out
from gigagrad.execution.refusals import explained
from gigagrad.execution.rounding_error import Watch
from gigagrad.graphs import FIELD_BINS, MOMENTS, Call, Graph, Node, Site, lookup
from gigagrad.graphs.crops import View, parted
from gigagrad.graphs.operators import call as call_operator
from gigagrad.graphs.table import Bound
from gigagrad.plans import Stage, TileGeometry
from gigagrad.plans.geometry import AxisGeometry, reference
from gigagrad.plans.memory import crop_bytes, workspace_bytes
from gigagrad.stores import Rounding

_MOST_PROGRAMS: Final = 64
"""Of one stage. Where sizes are divided unevenly, no two tiles may be alike."""
_MOST_PLACES: Final = 4
"""Of one operator, of which functions that depend on the place are kept: enough for an image of few tiles."""

Values = dict[int, torch.Tensor]
"""By node id."""
_NONE: Final[Mapping[int, torch.Tensor]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class TileInputs:
    """What a tile is computed from, by node id. Backward, the shares of the stage's kept fields come along."""

    crops: Values
    """Of the fields that the stage reads."""
    cotangents: Values
    """Of the kept fields' shares, from later stages."""
    stored: Values
    """The kept fields' shares themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """What is the same for all tiles of a pass and belongs to one run."""

    layout: torch.memory_format = torch.contiguous_format
    """In which crops lie in memory."""
    roundings: Mapping[int, Rounding] = field(default_factory=dict)
    """Of kept fields: what is computed from them is computed from what their stores will give back."""
    make_room: Callable[[int], None] | None = None
    """Called with the bytes of every block before it is taken, but for the smallest."""


class TilePrograms:
    """The programs of a graph's stages, made when a tile first asks for one."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._stages: dict[Stage, StagePrograms] = {}

    def of(self, stage: Stage) -> StagePrograms:
        known = self._stages.get(stage)
        return known or self._stages.setdefault(stage, StagePrograms(self._graph, stage, self._device))


class StagePrograms:
    """The programs of one stage, by the signature of a tile."""

    def __init__(self, graph: Graph, stage: Stage, device: torch.device) -> None:
        self.graph, self.stage, self.device = graph, stage, device
        self.targets = stage.targets(graph)
        self.calls = [_on_device(Call(graph[i], graph.operands(graph[i])), device) for i in stage.fields]
        self.places = {i: place for place, i in enumerate((*stage.globals, *stage.reads, *stage.fields))}
        """Where values are found in the list that a tile's run fills; one more place is always empty."""
        self.silent = frozenset(i for i in stage.kept if lookup(graph[i].op).backward_without_output)
        """The kept fields whose operators need no output for their gradient."""
        self._reference = reference(graph, stage)
        self._forms: dict[tuple[int, Span], int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Hashable, Hashable] = {}
        self._programs: dict[tuple[int, int], TileProgram] = {}

    def at(self, tile: TileGeometry) -> TileProgram:
        """Return the program of a tile."""
        signature = self._form(0, tile.y), self._form(1, tile.x)
        program = self._programs.get(signature)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[signature] = program = TileProgram(self, tile)
        return program

    def _form(self, axis: int, geometry: AxisGeometry) -> int:
        """Return the number of a tile's form along one axis. Its share of the largest target fixes all of it."""
        place = axis, geometry.wanted[self._reference]
        number = self._forms.get(place)
        if number is None:
            form = self._form_of(axis, geometry)
            self._forms[place] = number = self._numbers.setdefault(form, len(self._numbers))
        return number

    def _form_of(self, axis: int, geometry: AxisGeometry) -> Hashable:
        spans = geometry.spans
        found: list[Hashable] = [i in spans and spans[i].length for i in self.stage.reads]
        for call in self.calls:
            out = spans.get(call.node.id)
            if out is None:
                found.append(None)
                continue
            needs = geometry.operand_spans[call.node.id]
            cuts = tuple(
                need and (need.start - spans[operand.id].start, need.length)
                for operand, need in zip(call.operands, needs, strict=True)
            )
            form = out.length, cuts, lookup(call.node.op).form(call, axis, out, needs)
            found.append(self._known.setdefault(form, form))
        for target, wanted in geometry.wanted.items():
            found.append(None if wanted.empty else (wanted.start - spans[target].start, wanted.length))
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One operator of a program."""

    node: Node
    inputs: tuple[tuple[int, View | None], ...]
    """Where each operand is found, and how it is cut to what the operator reads."""
    output: int
    frees: tuple[int, ...]
    """Places whose values nobody reads any more."""
    run: Bound | None
    """None: it depends on the place."""
    run_at: Callable[[Site], Bound]
    is_asked: bool
    """Whether its values are, and not only its vector-Jacobian product."""
    is_large: bool
    """Whether its result is announced."""
    has_large_operands: bool
    """Whether their gradients may be."""
    nbytes: int
    workspace_bytes: int

    def bound_at(self, tile: TileGeometry) -> Bound:
        """Return the function of a place."""
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

    def __init__(self, stage: StagePrograms, tile: TileGeometry) -> None:
        """`tile`: any one of them."""
        self._stage, self._graph = stage, stage.graph
        self._globals, self._reads = stage.stage.globals, stage.stage.reads
        reads = [(i, self._graph[i].spatial, box.shape) for i in self._reads if (box := tile.box(i)) is not None]
        self._crops = reads
        self._rest = [None] * (len(stage.stage.fields) + 1)
        computed = [call for call in stage.calls if tile.box(call.node.id) is not None]
        last = {i: call.node.id for call in computed for i in self._graph.reads[call.node.id]}
        frees: dict[int, list[int]] = {}
        for i, reader in last.items():
            if i not in stage.targets:
                frees.setdefault(reader, []).append(stage.places[i])
        step = partial(_step, stage, tile, frees)
        self._steps = [step(call, is_asked=True) for call in computed]
        silent = [call for call in computed if call.node.id in stage.silent]
        self._without_values = {call.node.id: step(call, is_asked=False) for call in silent}
        wanted = {i: tile.wanted(i) for i in stage.targets}
        self._shares = [
            (i, stage.places[i], _cut(self._graph, i, tile, (box.y, box.x)))
            for i, box in wanted.items()
            if not box.empty
        ]
        self._reductions = [self._graph[r] for r in stage.stage.reductions]

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
        values: list[Any] = [globals_[i] for i in self._globals]
        values += [crops.get(i) for i in self._reads]
        values += self._rest
        crops.clear()
        make_room, roundings = context.make_room, context.roundings
        for step in self._steps:
            node_id = step.node.id
            if node_id in silent:
                step = self._without_values[node_id]
            operands = [values[place] if view is None else view(values[place]) for place, view in step.inputs]
            if step.is_large and make_room is not None:
                make_room(step.nbytes + step.workspace_bytes)
            try:
                run = step.run or step.bound_at(tile)
                value = run(operands)
            except (RuntimeError, IndexError, TypeError):
                with explained(step.node):
                    raise
            if step.has_large_operands and make_room is not None:
                step.announce_gradients(value, operands, make_room)
            if watch is not None and node_id in watch:
                watch.attach(node_id, operands[0], value)
            del operands
            if node_id in roundings and step.is_asked:
                value = _rounded(step.node, value, roundings[node_id], tile)
            values[step.output] = value
            del value
            for place in step.frees:
                values[place] = None
        return {i: values[place] if view is None else view(values[place]) for i, place, view in self._shares}

    def partial_sums(self, tile: TileGeometry, shares: Values, known: Mapping[int, torch.Tensor] = _NONE) -> Values:
        """Compute the tile's contribution to each reduction of the stage whose field has a share. Those whose whole
        values are `known` are wanted for their gradients only.
        """
        sums = {}
        for node in self._reductions:
            read = node.operands[0]
            if read not in shares:
                continue
            arguments = {**node.arguments, "field": shares[read]}
            if node.op == MOMENTS:
                arguments["known"] = known.get(node.id)
            if node.op == FIELD_BINS:
                arguments |= self._bins(node, tile.wanted(read))
            try:
                sums[node.id] = call_operator(node.op, arguments)
            except (RuntimeError, IndexError, TypeError):
                with explained(node):
                    raise
        return sums

    def gradients(
        self,
        tile: TileGeometry,
        inputs: TileInputs,
        globals_: Values,
        leaves: Sequence[int],
        fields: Sequence[int],
        cotangents: Values,
        context: PassContext = PassContext(),
        watch: Watch | None = None,
        known: Mapping[int, torch.Tensor] = _NONE,
    ) -> tuple[Values, Values, Values]:
        """Compute the tile's partial sums and its vector-Jacobian product: of these `leaves` among the globals, and of
        these `fields` that the stage reads, the gradients that it has a share in. Where the sums are `known`, those
        that are returned mean nothing.
        """
        # Of its own: two threads that make the gradient's node of one tensor can wait for each other for ever, one with
        # Python's lock and one with the tensor's (PyTorch 2.13, torch::autograd::impl::grad_accumulator).
        own = {i: globals_[i].detach().requires_grad_() for i in leaves}
        crops = {i: inputs.crops[i].requires_grad_() for i in fields if i in inputs.crops}
        sums, outputs, seeds = self.outputs(tile, inputs, {**globals_, **own}, cotangents, context, watch, known)
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

    def outputs(
        self,
        tile: TileGeometry,
        inputs: TileInputs,
        globals_: Values,
        cotangents: Values,
        context: PassContext,
        watch: Watch | None = None,
        known: Mapping[int, torch.Tensor] = _NONE,
    ) -> tuple[Values, list[torch.Tensor], list[torch.Tensor]]:
        """Compute partial sums (off autograd's graph), and the tensors to differentiate with their cotangents.

        A kept field's share gets its cotangent from later stages and from its own reductions. Where its operator needs
        no output for its gradient, the share is not computed again: what the reductions need of it is stored.
        """
        with torch.enable_grad():
            stored = {i: inputs.stored[i].requires_grad_() for i in inputs.stored if i in self._without_values}
            shares = self.run(tile, inputs.crops, globals_, context, silent=stored, watch=watch)
            sums = self.partial_sums(tile, {**shares, **stored}, known)
        outputs = {i: shares[i] for i in inputs.cotangents if i in shares and shares[i].requires_grad}
        seeds = {i: inputs.cotangents[i] for i in outputs}
        pulled: dict[int, list[int]] = {}
        for reduction in cotangents:
            if reduction in sums and sums[reduction].requires_grad:
                read = self._graph[reduction].operands[0]
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
            weights = self._graph.constants[self._graph[node.arguments[name].id].arguments["name"]]
            found[name] = weights[:, span.start : span.stop].to(self._stage.device)
        return found


def _step(
    stage: StagePrograms, tile: TileGeometry, frees: Mapping[int, list[int]], call: Call, *, is_asked: bool
) -> _Step:
    graph, node, rule = stage.graph, call.node, lookup(call.node.op)
    out, operands = tile.site(node.id)
    nowhere = len(stage.places)
    inputs: list[tuple[int, View | None]] = []
    nbytes = 0
    for operand, spans in zip(call.operands, operands, strict=True):
        if not operand.is_field:
            inputs.append((stage.places[operand.id], None))
            nbytes += operand.nbytes
        elif spans is None:
            inputs.append((nowhere, None))
        else:
            inputs.append((stage.places[operand.id], _cut(graph, operand.id, tile, spans)))
            nbytes += spans[0].length * spans[1].length * operand.bytes_per_pixel
    needs = tile.y.operand_spans[node.id], tile.x.operand_spans[node.id]
    has_form = all(rule.form(call, axis, out[axis], needs[axis]) is not None for axis in (0, 1))
    run_at = lru_cache(maxsize=_MOST_PLACES)(partial(rule.bind, call))
    return _Step(
        node=node,
        inputs=tuple(inputs),
        output=stage.places[node.id],
        frees=tuple(frees.get(node.id, ())),
        run=rule.bind(call, Site(out, operands, is_asked)) if has_form else None,
        run_at=run_at,
        is_asked=is_asked,
        is_large=crop_bytes(graph, tile, node.id) >= ANNOUNCED_BYTES,
        has_large_operands=nbytes >= ANNOUNCED_BYTES,
        nbytes=crop_bytes(graph, tile, node.id),
        workspace_bytes=workspace_bytes(graph, tile, node.id),
    )


def _on_device(call: Call, device: torch.device) -> Call:
    """Return a use of an operator that makes tensors there."""
    if call.node.arguments.get("device") is None:
        return call
    return Call(replace(call.node, arguments={**call.node.arguments, "device": device}), call.operands)


def _cut(graph: Graph, node_id: int, tile: TileGeometry, spans: tuple[Span, Span]) -> View | None:
    """Return how a computed crop is cut to these spans; None where they are all of it."""
    whole = tile.y.spans[node_id], tile.x.spans[node_id]
    starts = [span.start - own.start for span, own in zip(spans, whole, strict=True)]
    return parted(graph[node_id].spatial, starts, [span.length for span in spans], [own.length for own in whole])


def _rounded(node: Node, value: torch.Tensor, rounding: Rounding, tile: TileGeometry) -> torch.Tensor:
    straight_through: Any = _StraightThrough.apply
    rounded: torch.Tensor = straight_through(value, rounding, tile.box(node.id), node.axes)
    return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounded values; the cotangent passes as if they had not been (docs/math.md)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounding: Rounding, box: Box, axes: tuple[int, int]) -> torch.Tensor:
        return rounding.round(value, box, axes)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cotangent, None, None, None
