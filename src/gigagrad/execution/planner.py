"""From an image's size to a plan that is ready to run: captured and planned on first sight, kept, and kept honest.

Memory is that of the whole process, so a plan is only as good as what it assumed of the process around it. Before every
run the planner looks again; where the process has grown since (labels were made, a reader was opened), the plan is
made again with the same tiles, and with others only if those no longer fit.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from gigagrad.errors import BudgetError
from gigagrad.events import Events, Notice
from gigagrad.execution.allocator import return_freed_memory
from gigagrad.execution.budgets import Budgets
from gigagrad.execution.kernels import kernel_bytes
from gigagrad.execution.optimizer_state import coming_state_bytes, usual_state_bytes
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.process import (
    RESIDUE,
    UNNOTICED_BYTES,
    held_bytes,
    used_bytes,
)
from gigagrad.execution.sources import Source
from gigagrad.execution.trial import faster_layout
from gigagrad.graphs import Call, Composite, Graph, lookup
from gigagrad.plans import Costs, Limits, Machine, Plan, PlanAt, make_plan, split_stages
from gigagrad.plans.limits import MOST_COMPILED
from gigagrad.plans.memory import compiled_convolutions, whole_compiled_convolutions
from gigagrad.plans.packing import AS_THEY_ARE, Packing
from gigagrad.stores import Codec, Half, Rounding, faster_codec

_RUNTIME_BYTES = 64 * 2**20
"""What the first step of a process adds beside its tensors: kernels' code, thread stacks, the reader's code."""
_LATER_RUNTIME_BYTES = 24 * 2**20
"""What a later step may still add: kernels for shapes that have not been seen."""
_WORTH_A_TRIAL = 32
"""Fewer tiles than this are over before a trial of memory layouts would pay."""
_MOST_TRIED = 4
"""With more stages than this the trial would take longer than it saves."""
_UNSEEN_BYTES = UNNOTICED_BYTES // 2
"""By how much a process may use more than a plan counts on before it is planned for anew."""
_MOST_KEPT = 32
"""Sizes whose graph and plan are kept; the one unused for longest goes first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What planning decided for one size: enough to make the same plan again."""

    memory_format: str
    workers: int
    tiles: tuple[tuple[int, int], ...]
    """Height and width in pixels, one for each stage."""
    kept: tuple[tuple[int, str], ...]
    """The nodes of the fields kept, each with its tier."""

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        tiles = tuple(stage.tile for stage in plan.stages)
        return cls(plan.memory_format, plan.workers, tiles, tuple((field.node, field.tier) for field in plan.kept))

    def suits(self, graph: Graph) -> bool:
        """Whether the graph has these fields and as many stages: a choice may come from another version of a model."""
        fields = [i for i, _ in self.kept]
        computed = all(i < len(graph.nodes) and graph[i].is_field and not graph[i].is_source for i in fields)
        return computed and len(split_stages(graph, fields)) == len(self.tiles)

    def to_dict(self) -> dict[str, Any]:
        tiles = [list(tile) for tile in self.tiles]
        return {
            "memory_format": self.memory_format,
            "workers": self.workers,
            "tiles": tiles,
            "kept": [list(pair) for pair in self.kept],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Choice:
        tiles = tuple((int(h), int(w)) for h, w in data["tiles"])
        return cls(
            data["memory_format"], int(data["workers"]), tiles, tuple((int(i), str(tier)) for i, tier in data["kept"])
        )


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What it takes to ask what other budgets would give."""

    graph: Graph
    machine: Machine
    costs: Costs
    plan_at: PlanAt


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A plan, what it could count on, how many kernels its convolutions compile to, and whether it has run."""

    prepared: Prepared
    limits: Limits
    compiled: int
    ran: bool = False

    @property
    def fixed_bytes(self) -> int:
        """What the process holds beside the tiles, with what kernels add."""
        limits = self.limits
        return limits.fixed_bytes + limits.runtime_bytes + limits.compiled_bytes(self.compiled)


class Planner:
    """Makes and keeps what an engine runs. `tile` forces the shape of every stage's tiles."""

    def __init__(
        self,
        composite: Composite,
        events: Events,
        *,
        budgets: Budgets,
        device: torch.device,
        tile: tuple[int, int] | None,
        rounding: Rounding | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._composite = composite
        self._optimizer = optimizer
        self._rounding = rounding
        self._packing = _packing_of(rounding)
        self._events = events
        self._budgets = budgets
        self._device = device
        self._tile = tile
        self._kept: OrderedDict[tuple[bool, Graph], _Kept] = OrderedDict()
        self._choices: dict[str, Choice] = {}
        self._adopted: dict[str, Choice] = {}
        self._versions: int | None = None
        """Of the trainable parameters when a backward was first prepared: any write to one counts up."""
        self._stepped = False

    def prepare(self, graph: Graph, sources: dict[str, Source], *, backward: bool) -> Prepared:
        """The graph with a plan for these sources, under the memory that is there now. Raises as `Engine.plan`."""
        key = backward, graph
        kept = self._kept.get(key)
        if kept is None:
            kept = self._first(graph, sources, backward=backward)
        elif self._may_have_grown(kept):
            kept = self._under_todays_limits(kept, sources, backward=backward)
        self._kept[key] = kept
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        self._choices[_name(sources, backward=backward)] = Choice.of(kept.prepared.plan)
        return kept.prepared

    def finished(self, prepared: Prepared) -> None:
        """It has run: what it added to the process beside tensors is there."""
        RESIDUE.warm = True
        for key, kept in self._kept.items():
            if kept.prepared is prepared and not kept.ran:
                self._kept[key] = dataclasses.replace(kept, ran=True)
                RESIDUE.compiled = min(RESIDUE.compiled + kept.compiled, MOST_COMPILED)

    def _may_have_grown(self, kept: _Kept) -> bool:
        """Whether the process uses more than the plan counts on. What it holds beside that is what the last run freed:
        the next one takes it, and to give it back in order to look would cost a page fault for every page.
        """
        most = (kept.fixed_bytes if kept.ran else kept.prepared.plan.base_bytes) + _UNSEEN_BYTES
        used = used_bytes(most) if self._device.type == "cpu" else None
        return used is None or used > most

    def _under_todays_limits(self, kept: _Kept, sources: dict[str, Source], *, backward: bool) -> _Kept:
        """The plan itself where it still fits beside what the process holds now, else its tiles with other numbers."""
        limits = self._limits(kept.prepared.graph, sources, backward=backward)
        if kept.ran:  # and has compiled what it needs
            limits = dataclasses.replace(limits, compiled_room=0)
        if dataclasses.replace(kept, limits=limits).fixed_bytes <= kept.fixed_bytes + _UNSEEN_BYTES:
            return kept
        made = self._refit(kept.prepared, limits, backward=backward)
        ran = kept.ran and Choice.of(made.plan) == Choice.of(kept.prepared.plan)
        return _Kept(made, limits, _compiled(made, backward=backward), ran)

    def survey(self, graph: Graph, sources: dict[str, Source], *, backward: bool) -> Survey:
        """What other budgets would give the process as it is now. Raises as `Engine.plan`, but for `BudgetError`."""
        limits, machine = self._limits(graph, sources, backward=backward), self._machine()
        costs, image_shape = Costs(graph, machine, self._packing), sources["image"].spec.shape

        def plan_at(budget_bytes: int | None) -> Plan:
            limited = dataclasses.replace(limits, budget_bytes=budget_bytes)
            return self._plan(graph, image_shape, limited, None, backward=backward, costs=costs)

        return Survey(graph, machine, costs, plan_at)

    def state_dict(self) -> dict[str, Any]:
        choices = self._adopted | self._choices
        return {"choices": {name: choice.to_dict() for name, choice in choices.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.clear()
        self._adopted.update({name: Choice.from_dict(choice) for name, choice in state["choices"].items()})

    def _limits(self, graph: Graph, sources: dict[str, Source], *, backward: bool) -> Limits:
        """What the process holds and may come to hold whatever the plan; asked after capture, which loads much."""
        if self._device.type == "cpu":
            return_freed_memory()  # what an earlier run freed is there for this one
        return Limits(
            budget_bytes=self._budgets.memory_bytes,
            base_bytes=held_bytes(self._device),
            reader_cache_bytes=sum(source.cache_bytes for source in sources.values()),
            runtime_bytes=_runtime_bytes() + UNNOTICED_BYTES,
            compiled_room=MOST_COMPILED - RESIDUE.compiled,
            kernel_bytes=kernel_bytes(graph, self._device),
            optimizer_bytes=self._optimizer_bytes() if backward else 0,
            host_bytes=self._budgets.host_room() if self._device.type == "cuda" else 0,
            scratch_bytes=self._budgets.scratch_room(),
        )

    def _optimizer_bytes(self) -> int:
        """What an optimizer will hold after its first step; nothing once that is part of what the process holds. One
        that nobody named is taken for Adam, until a write to the parameters shows that it has stepped.
        """
        if self._optimizer is not None:
            return coming_state_bytes(self._optimizer)
        trained = [parameter for parameter in self._composite.model.parameters() if parameter.requires_grad]
        versions = sum(parameter._version for parameter in trained)
        if self._versions is None:
            self._versions = versions
        self._stepped = self._stepped or versions != self._versions
        return 0 if self._stepped else usual_state_bytes(trained)

    def _refit(self, kept: Prepared, limits: Limits, *, backward: bool) -> Prepared:
        """The same tiles in a process that has grown."""
        plan = self._again(kept.graph, kept.plan.image_shape, limits, Choice.of(kept.plan), backward=backward)
        plan = dataclasses.replace(plan, timed_seconds=kept.plan.timed_seconds)
        return self._prepared(kept.graph, plan)

    def _prepared(self, graph: Graph, plan: Plan) -> Prepared:
        stages = split_stages(graph, [field.node for field in plan.kept])
        codec = self._codec() if plan.scratch_bytes else None
        return Prepared(graph, plan, stages, self._device, self._budgets.scratch, self._rounding, codec)

    def _first(self, graph: Graph, sources: dict[str, Source], *, backward: bool) -> _Kept:
        """A first plan; both memory layouts are tried where the run is long enough to pay for it."""
        limits = self._limits(graph, sources, backward=backward)
        image_shape = sources["image"].spec.shape
        # A changed model is planned anew, so a choice is adopted once; what only counts or anneals stays as it was.
        adopted = self._adopted.pop(_name(sources, backward=backward), None)
        if adopted is None:
            of_this_kind = (kept.prepared for (also, _), kept in self._kept.items() if also == backward)
            adopted = next((Choice.of(p.plan) for p in of_this_kind if graph.is_shaped_like(p.graph)), None)
        if adopted is not None and not adopted.suits(graph):
            adopted = None
        if adopted is not None:
            plan = self._again(graph, image_shape, limits, adopted, backward=backward)
        else:
            plan = self._plan(graph, image_shape, limits, None, backward=backward)
        prepared = self._prepared(graph, plan)
        many = plan.tile_count >= _WORTH_A_TRIAL and len(plan.stages) <= _MOST_TRIED
        if adopted is None and many and plan.memory_format == "channels_last":
            layout, seconds = faster_layout(prepared)
            return_freed_memory()  # what the slower layout left behind would lie under the run's own peak
            RESIDUE.tried_bytes += max(0, held_bytes(self._device) - limits.base_bytes)
            plan = dataclasses.replace(plan, memory_format=layout, timed_seconds=seconds)
            prepared = dataclasses.replace(prepared, plan=plan)
        return _Kept(prepared, limits, _compiled(prepared, backward=backward))

    def _again(
        self, graph: Graph, image_shape: tuple[int, ...], limits: Limits, choice: Choice, *, backward: bool
    ) -> Plan:
        """The plan of an earlier choice; where it no longer fits, another one, and a notice that says so."""
        try:
            return self._plan(graph, image_shape, limits, choice, backward=backward)
        except BudgetError:
            if self._tile is not None:
                raise
        plan = self._plan(graph, image_shape, limits, None, backward=backward)
        self._events.emit(
            Notice(
                f"tiles of {choice.tiles[-1]} px no longer fit beside what the process holds; they are {plan.tile} px "
                "now, and sums are rounded otherwise",
                warning=True,
            )
        )
        return dataclasses.replace(plan, memory_format=choice.memory_format)

    def _plan(
        self,
        graph: Graph,
        image_shape: tuple[int, ...],
        limits: Limits,
        choice: Choice | None,
        *,
        backward: bool,
        costs: Costs | None = None,
    ) -> Plan:
        return make_plan(
            graph,
            limits,
            self._machine(choice.workers if choice else None),
            image_shape=image_shape,
            backward=backward,
            device=str(self._device),
            memory_format=choice.memory_format if choice else _usual_layout(graph),
            tiles=choice.tiles if choice else (self._tile,) if self._tile else None,
            kept=dict(choice.kept) if choice else None,
            packing=self._packing,
            costs=costs,
        )

    def _machine(self, workers: int | None = None) -> Machine:
        """The machine, with its measured rates where there are some."""
        if self._device.type != "cpu":
            return Machine.typical_gpu()
        threads = torch.get_num_threads()
        return Machine.detect(workers or threads, lambda text: self._events.emit_once(Notice(text, warning=True)))

    def _codec(self) -> Codec | None:
        """A lossless codec for files, where calibration says that it is faster than the disk."""
        machine = self._machine()
        return faster_codec(machine.disk_bytes_per_second, machine.codec_bytes_per_second, machine.codec_ratio)


def _compiled(prepared: Prepared, *, backward: bool) -> int:
    """How many kernels its convolutions are compiled to."""
    on_tiles = sum(compiled_convolutions(prepared.grid(stage), backward=backward) for stage in prepared.stages)
    return on_tiles + whole_compiled_convolutions(prepared.graph, backward=backward)


def _runtime_bytes() -> int:
    """What kernels, threads and readers will add to the process as it is."""
    return _LATER_RUNTIME_BYTES if RESIDUE.warm else max(_LATER_RUNTIME_BYTES, _RUNTIME_BYTES - RESIDUE.tried_bytes)


def _packing_of(rounding: Rounding | None) -> Packing:
    if isinstance(rounding, Half):
        return Packing(str(rounding), rounding.dtype.itemsize)
    return AS_THEY_ARE if rounding is None else Packing(str(rounding), files_only=True)


def _name(sources: dict[str, Source], *, backward: bool) -> str:
    shapes = ["x".join(map(str, source.spec.shape)) for name, source in sources.items() if name.startswith("image")]
    return " ".join(["backward" if backward else "forward", *shapes])


def _usual_layout(graph: Graph) -> str:
    """Channels last, unless an operator of the graph should not run so."""
    contiguous = any(lookup(node.op).contiguous_only(Call(node, graph.operands(node))) for node in graph.nodes)
    return "contiguous" if contiguous else "channels_last"
