"""Plan from an image's size, on first sight, what is ready to run, and keep it true to the process around it.

Memory is that of the whole process, so a plan is only as good as what it assumed of the process around it. Before every
run the planner looks again; where the process has grown since (labels were made, a reader was opened), the plan is
made again with the same tiles, and with others only if those no longer fit.

Of several ranks the first one plans, for the least that any of them has, and all run its plan: by tiles of its own, a
rank would compute other chunks than those that are left to it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from gigagrad.allowances import MOST_COMPILED, UNNOTICED_BYTES
from gigagrad.devices import Device, Machine
from gigagrad.errors import BudgetError
from gigagrad.events import Events, Notice
from gigagrad.execution.agreement import Agreement
from gigagrad.execution.drawn import draws_by_call
from gigagrad.execution.model_state import OptimizerState
from gigagrad.execution.prepared import PlanKey, Prepared, plan_key, read_plan_key, suits
from gigagrad.execution.seeds import drawing
from gigagrad.execution.sinks import Sink
from gigagrad.execution.sources import Source, reading_of
from gigagrad.execution.trial import faster_layout, trial_seconds
from gigagrad.graphs import Call, Graph, LossModule, WholeCost, lookup
from gigagrad.plans import Amount, Plan, Problem, estimate, make_plan
from gigagrad.plans.memory import compiled_convolutions, whole_compiled_convolutions
from gigagrad.plans.plan import amount_of, total
from gigagrad.plans.whole import whole_plan
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import mismatched_numerics
from gigagrad.stores import Rounding, Tier
from gigagrad.stores.store import least_room

_IMAGES_SHARE = 0.25
"""The share of a device's memory that images may take for the whole of a step."""
_WORTH_A_TRIAL = 32
"""Fewer tiles than this are over before a trial of memory layouts would pay."""
_MOST_TRIED = 4
"""With more segments than this the trial would take longer than it saves."""
_CHEAP, _SOON = 0.02, 2.0
"""A tile of every pass is timed before a first run where that takes at most this share of it, and so many seconds."""
_LAYOUTS = 6
"""A trial of memory layouts takes as long as so many tiles of every pass; it may take as many seconds as above."""
_MOST_OF_A_BOX = 1024
"""Pixels a side of tiles that are computed when somebody looks at them: a screen meets a few."""
_UNSEEN_BYTES = UNNOTICED_BYTES // 2
"""Bytes that a process may use more than a plan counts on before it is planned for anew."""
_MOST_SIZES = 32
"""Sizes whose plan is remembered; the one unused for longest goes first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineOptions:
    """Settings of an engine, as `compile` has read them."""

    device: Device
    budget_bytes: int | None
    tiers: tuple[Tier, ...]
    """Tiers for fields: those that do not fit in the budget go to the second and later ones, in this order."""
    precision: torch.dtype | None
    rounding: Rounding | None
    optimizer: torch.optim.Optimizer | None
    tile: tuple[int, int] | None
    """The shape of every segment's tiles, where that is forced."""
    seed: int | None
    progress: bool
    ranks: Ranks
    journal: Path | None


class Planner:
    """Makes and remembers what an engine runs."""

    def __init__(self, composite: LossModule, events: Events, options: EngineOptions) -> None:
        self._composite, self._events, self._options = composite, events, options
        self._device, self._ranks, self._tile = options.device, options.ranks, options.tile
        asked = any(setting is not None for setting in (options.tile, options.rounding, options.journal))
        self.in_tiles = asked or options.precision not in (None, torch.bfloat16)
        """Plan tiles, too, for what fits as it is."""
        settings = {
            "tile": options.tile,
            "seed": options.seed,
            "storage": options.rounding and str(options.rounding),
            "precision": options.precision,
            "scratch": [tier.name for tier in options.tiers],
            "device": options.device.sum_dtype,
        }
        self._optimizer = OptimizerState(composite.model, options.optimizer)
        self.records = options.device.records
        """Plan steps so that they can be recorded and replayed."""
        self._planned: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()
        self._agreement = Agreement(options.ranks, composite, settings)
        self._plan_keys: dict[str, PlanKey] = {}
        self._adopted: dict[str, PlanKey] = {}

    def prepare(
        self, graph: Graph, sources: dict[str, Source], sink: Sink | None, *, backward: bool, content: bool = True
    ) -> Prepared:
        """Return the graph with a plan for these sources, under the memory that is there now: on every rank the same,
        made by the first for the least that any of them has. Raises as `Engine.plan`; ConfigError where ranks were
        given different things to compute: from other weights and images, too, if their `content` is to be compared.
        """
        key = backward, graph, None if sink is None else sink.kind, _handed(graph, sink, backward=backward)
        planned = self._planned.get(key)
        known = None if planned is None or self._may_have_grown(planned) else _digest(plan_key(planned.plan))
        told = self._agreement.all_gather_object(known, graph, sources, backward=backward, content=content)
        if planned is None or None in told or len(set(told)) > 1:
            ran = planned is not None and planned.ran
            problem = self.problem(graph, sources, sink, backward=backward, ran=ran)
            planned = self._made(planned, problem, sources)
        self._planned[key] = planned
        self._planned.move_to_end(key)
        if len(self._planned) > _MOST_SIZES:
            self._planned.popitem(last=False)
        self._plan_keys[_name(sources, backward=backward)] = plan_key(planned.plan)
        return planned

    def prepare_boxes(self, graph: Graph, sources: dict[str, Source]) -> Prepared:
        """Return the graph with a plan for boxes of a prediction that are read one by one: it keeps no fields, and its
        tiles are not larger than what somebody may look at. Raises as `Engine.plan`.
        """
        problem, layout = self.problem(graph, sources, None, backward=False), _usual_layout(graph, self._device)
        tiles = (self._tile,) if self._tile else None
        with self._events.preparing("plan") as tried:
            plan = make_plan(problem, memory_format=layout, tiles=tiles, kept={}, tried=tried)
            if tiles is None and max(plan.tile) > _MOST_OF_A_BOX:
                smaller = (min(plan.tile[0], _MOST_OF_A_BOX), min(plan.tile[1], _MOST_OF_A_BOX))
                plan = make_plan(problem, memory_format=layout, tiles=(smaller,), kept={}, tried=tried)
        return self._prepared(problem, plan)

    @property
    def forces_tiles(self) -> bool:
        """Say whether somebody said what tiles to take."""
        return self._tile is not None

    def finished(self, prepared: Prepared, pass_seconds: tuple[float, ...] | None) -> None:
        """Record that it has run: what it added to the process beside tensors is there, and what its passes took is
        known.
        """
        if not prepared.ran:
            self._device.note_compiled(prepared.compiled)
        prepared.ran, prepared.taken = True, pass_seconds

    def _made(self, known: Prepared | None, problem: Problem, sources: dict[str, Source]) -> Prepared:
        if others := mismatched_numerics(self._ranks):
            told = f"the processors of ranks {others} round otherwise than that of the first rank"
            self._agreement.drift = True
            self._events.emit_once(Notice(f"{told}: bits depend on how many ranks there are", warning=True))
        planned = None
        if self._ranks.index == 0:
            planned = self._first(problem, sources) if known is None else self._as_things_are(known, problem)
        if self._ranks.count > 1:
            first = self._ranks.all_gather_object(None if planned is None else planned.plan.to_dict())[0]
            planned = planned or self._as_first(known, problem, Plan.from_dict(first))
        assert planned is not None
        return planned

    def problem(
        self,
        graph: Graph,
        sources: dict[str, Source],
        sink: Sink | None,
        *,
        backward: bool,
        machine: Machine | None = None,
        ran: bool = False,
    ) -> Problem:
        """Return what there is to plan for, here or on another `machine`: the least that any rank has. Asked after
        capture, which loads much. `ran`: on this rank its plan has run, and has compiled what it needs.

        Raises StoreError for a missing folder, ConfigError where ranks were given different things to compute.
        """
        device, options = self._device, self._options
        device.trim()  # what an earlier run freed is there for this one
        dtypes = {node.dtype for node in graph.nodes if lookup(node.op).compiled}
        held = (
            Amount(estimate.PROCESS, device.held_bytes()),
            Amount(estimate.READERS, sum(source.cache_bytes for source in sources.values())),
            Amount(estimate.OPTIMIZER, self._optimizer.coming_bytes() if backward else 0),
            Amount(estimate.STEP, device.step_bytes()),
        )
        handed, compiled_bytes = _handed(graph, sink, backward=backward), partial(device.compiled_bytes, dtypes=dtypes)
        others = [tier for tier in options.tiers if not tier.in_budget]
        own = (
            options.budget_bytes,
            [amount.size_bytes for amount in held],
            [(tier.room_bytes() or 0, tier.shared_room()) for tier in others],
            (ran, compiled_bytes(1), compiled_bytes(MOST_COMPILED)),
        )
        machine = machine or device.machine(lambda text: self._events.emit_once(Notice(text, warning=True)))
        told = self._agreement.all_gather_object(own, graph, sources, backward=backward, content=False)
        budgets, sizes, rooms, compiled = zip(*told, strict=True)
        problem = Problem(
            graph=graph,
            backward=backward,
            machine=machine,
            device=str(device),
            sum_dtype=device.sum_dtype,
            budget_bytes=min((budget for budget in budgets if budget is not None), default=None),
            held=tuple(Amount(one.name, max(sizes)) for one, sizes in zip(held, zip(*sizes, strict=True), strict=True)),
            compiled_bytes=_most_compiled(compiled, compiled_bytes),
            output_bytes=sink.held_bytes if sink is not None else lambda tile_height, shape: 0,
            handed=handed,
            tiers=options.tiers,
            rooms={tier.name: least_room(found) for tier, found in zip(others, zip(*rooms, strict=True), strict=True)},
            ranks=self._ranks.count,
            rounding=options.rounding,
            saves=options.journal is None,
            whole=self._whole(graph, sink, backward=backward),
            free_bytes=device.free_bytes() if options.budget_bytes is None else None,
            reading=reading_of(sources, device, machine.threads),
        )
        return self._placed(problem, sources, in_pieces=_comes_in_pieces(graph, sink, backward=backward))

    def _placed(self, problem: Problem, sources: dict[str, Source], *, in_pieces: bool) -> Problem:
        """Return the problem of a run whose images the device holds, where it has room for them: that of a step that it
        records, or of a field that comes in pieces.
        """
        options = self._options
        shared = self._ranks.count > 1 or options.rounding is not None or options.journal is not None
        if shared or not self.records or options.precision is torch.float16:
            return problem
        nbytes = sum(prod(one.spec.shape) * one.spec.read_dtype.itemsize for one in sources.values())
        if problem.room_bytes is not None and nbytes > _IMAGES_SHARE * problem.room_bytes:
            return problem
        placed = dataclasses.replace(problem, image_bytes=nbytes, unplaced=problem)
        if in_pieces:
            return placed
        machine = problem.machine.replaying()
        return dataclasses.replace(placed, is_recorded=True, machine=machine, tiers=problem.tiers[:1], rooms={})

    def _whole(self, graph: Graph, sink: Sink | None, *, backward: bool) -> WholeCost | None:
        """Return what the whole image takes at once, or None where it is to be computed in tiles: images that leave in
        pieces come from tiles, the model must be where it is computed, and what it draws at random has to be what it
        draws in tiles, which compiled code cannot be told.
        """
        if self.in_tiles or self._ranks.count > 1 or _comes_in_pieces(graph, sink, backward=backward):
            return None
        cost = graph.whole.get(backward)
        if drawing(graph) and (cost is None or self._composite.is_compiled or draws_by_call(graph, cost.draws) is None):
            return None
        here = self._device.torch_device
        stored = (*self._composite.parameters(), *self._composite.buffers())
        at_home = all(one.device.type == here.type and here.index in (None, one.device.index) for one in stored)
        return cost if at_home else None

    def make(self, problem: Problem) -> Plan:
        """Return the plan for a problem, as `prepare` makes one on first sight. Raises BudgetError."""
        tiles, layout = (self._tile,) if self._tile else None, _usual_layout(problem.graph, self._device)
        with self._events.preparing("plan") as tried:
            return make_plan(problem, memory_format=layout, tiles=tiles, tried=tried)

    def record_steps(self, asked: bool) -> None:
        """Plan anew from the next run on, for steps that are recorded where the device does so, or for others."""
        if asked != self.records:
            self.records = asked and self._device.records
            self._planned.clear()

    def choose_tiles(self, *, only: bool) -> None:
        """Plan anew from the next run on, `only` in tiles or in either way."""
        if only != self.in_tiles:
            self.in_tiles = only
            self._planned.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"choices": copy.deepcopy(self._adopted | self._plan_keys)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planned.clear()
        self._adopted.update({name: read_plan_key(key) for name, key in state["choices"].items()})

    def _may_have_grown(self, planned: Prepared) -> bool:
        """Say whether the process uses more than the plan counts on. What it holds beside that is what the last run
        freed: the next one takes it, and to give it back in order to look would cost a page fault for every page.
        """
        counted = planned.fixed_bytes if planned.ran else amount_of(planned.problem.held, estimate.PROCESS)
        most = counted + _UNSEEN_BYTES
        used = self._device.used_bytes(most)
        return used is None or used > most

    def _as_things_are(self, planned: Prepared, problem: Problem) -> Prepared:
        """Return the plan itself where it still fits beside what the process holds now, else its tiles with other
        numbers.
        """
        if total(problem.held) + problem.compiled_bytes(planned.compiled) <= planned.fixed_bytes + _UNSEEN_BYTES:
            return planned
        plan = self._again(problem, plan_key(planned.plan))
        plan = dataclasses.replace(plan, timed_seconds=planned.plan.timed_seconds)
        return self._prepared(problem, plan, ran=planned.has_run_as(plan))

    def _as_first(self, known: Prepared | None, problem: Problem, plan: Plan) -> Prepared:
        """Return the first rank's plan on this one."""
        plan = dataclasses.replace(plan, device=problem.device)
        if known is not None and plan == known.plan:
            return known
        return self._prepared(problem, plan, ran=known is not None and known.has_run_as(plan))

    def _prepared(self, problem: Problem, plan: Plan, *, ran: bool = False) -> Prepared:
        problem = estimate.problem_of(plan, problem).of(plan.whole_pixels)
        prepared = Prepared(plan, self._device, problem, ran=ran)
        prepared.compiled = _compiled(prepared)
        return prepared

    def _first(self, problem: Problem, sources: dict[str, Source]) -> Prepared:
        """Make a first plan; both memory layouts are tried where the run is long enough to pay for it."""
        graph, backward = problem.graph, problem.backward
        # A changed model is planned anew, so a plan key is adopted once; what only counts or anneals stays as it was.
        adopted = self._adopted.pop(_name(sources, backward=backward), None)
        if adopted is None:
            alike = (
                plan_key(p.plan)
                for p in self._planned.values()
                if p.problem.backward == backward and graph.with_whole(p.plan.whole_pixels).is_shaped_like(p.graph)
            )
            adopted = next(alike, None)
        if adopted is not None and not suits(adopted, graph):
            adopted = None
        plan = self.make(problem) if adopted is None else self._again(problem, adopted)
        prepared = self._prepared(problem, plan)
        if plan.whole or self._device.records:  # one tile tells nothing of a step that is replayed
            return prepared
        seconds = _predicted_trial_seconds(plan)
        pays = plan.tile_count >= _WORTH_A_TRIAL and len(plan.segments) <= _MOST_TRIED and _LAYOUTS * seconds <= _SOON
        if adopted is None and pays and plan.memory_format == "channels_last":
            with self._events.preparing("time tiles"):
                layout, timed = faster_layout(prepared)
            self._tried(problem)
            plan = dataclasses.replace(plan, memory_format=layout, timed_seconds=timed)
        elif seconds <= min(_CHEAP * plan.predicted_seconds, _SOON):
            with self._events.preparing("time tiles"):
                plan = dataclasses.replace(plan, timed_seconds=trial_seconds(prepared, plan.memory_format))
            self._tried(problem)
        prepared.plan = plan
        return prepared

    def _tried(self, problem: Problem) -> None:
        """Free what a trial left behind, which would lie under the run's own peak; what it loaded the run need not load
        again.
        """
        self._device.trim()
        self._device.tried(max(0, self._device.held_bytes() - amount_of(problem.held, estimate.PROCESS)))

    def _again(self, problem: Problem, key: PlanKey) -> Plan:
        """Return the plan of an earlier plan key; where it no longer fits, another one, and a notice that says so."""
        if key["whole"]:
            return self._whole_again(problem, key)
        tiles = tuple((height, width) for height, width in key["tiles"])
        try:
            plan = make_plan(
                dataclasses.replace(problem, workers=key["workers"]),
                memory_format=key["memory_format"],
                tiles=tiles,
                kept=dict(key["kept"]),
                whole_pixels=key["whole_pixels"],
                saved=tuple(key["saved"]),
            )
            return dataclasses.replace(plan, threads=key["threads"])
        except BudgetError:
            if self._tile is not None:
                raise
        plan = self.make(problem)
        self._events.emit(
            Notice(
                f"tiles of {tiles[-1]} px no longer fit beside what the process holds; they are {plan.tile} "
                "px now, and sums are rounded otherwise",
                warning=True,
            )
        )
        return dataclasses.replace(plan, memory_format=key["memory_format"])

    def _whole_again(self, problem: Problem, key: PlanKey) -> Plan:
        plan = whole_plan(problem, key["memory_format"])
        if plan is None:
            told = "the whole image no longer fits at once beside what the process holds; it is computed in tiles now"
            self._events.emit(Notice(told, warning=True))
            plan = self.make(problem)
        return plan


def _digest(value: object) -> str:
    """Hash something whose `repr` says all of it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _most_compiled(told: Sequence[tuple[bool, int, int]], own: Callable[[int], int]) -> Callable[[int], int]:
    """Return what so many compiled convolutions will add on the rank where that is most. Each reports whether its plan
    has run, and what one of them would add and as many as are ever held; none adds more than the first. `own`: of this
    rank.
    """
    if all(ran for ran, _, _ in told):
        return lambda count: 0
    if len(told) == 1:
        return own
    _, of_one, of_most = map(max, zip(*told, strict=True))
    return lambda count: min(count * of_one, of_most)


def _comes_in_pieces(graph: Graph, sink: Sink | None, *, backward: bool) -> bool:
    """Say whether a run delivers a field tile by tile: to a sink, or without one to whoever asked."""
    return sink is not None or (graph[graph.output].is_field and not backward)


def _handed(graph: Graph, sink: Sink | None, *, backward: bool) -> int | None:
    """Return the image whose gradient a sink takes in strips; None where a whole-field operator reads the image."""
    image = graph.source("image")
    strips = backward and sink is not None and image is not None and not graph.gathers(image.id)
    return image.id if strips and image is not None else None


def _compiled(prepared: Prepared) -> int:
    """Count the kernels that its convolutions are compiled to."""
    backward = prepared.problem.backward
    if prepared.plan.whole:
        return prepared.graph.whole[backward].compiled
    on_tiles = sum(compiled_convolutions(prepared.grid(segment), backward=backward) for segment in prepared.segments)
    return on_tiles + whole_compiled_convolutions(prepared.graph, backward=backward)


def _predicted_trial_seconds(plan: Plan) -> float:
    """Predict what one tile of each pass takes, by the cost model."""
    tiles = [plan.segments[p.segment].tile_count for p in plan.passes]
    shares = sum(share / count for share, count in zip(plan.pass_shares, tiles, strict=True))
    return plan.workers * shares * plan.predicted_seconds


def _name(sources: dict[str, Source], *, backward: bool) -> str:
    shapes = ["x".join(map(str, source.spec.shape)) for name, source in sources.items() if name.startswith("image")]
    return " ".join(["backward" if backward else "forward", *shapes])


def _usual_layout(graph: Graph, device: Device) -> str:
    """Return channels last, unless an operator of the graph should not run so; or on a processor weights with windows
    have more elements than what convolutions read and write: these, too, are copied, once a pass, and their gradients
    back.
    """
    calls = [Call(node, graph.operands(node)) for node in graph.nodes]
    if any(lookup(call.node.op).contiguous_only(call) for call in calls):
        return "contiguous"
    if not device.is_host:  # whose convolutions are twice as fast so
        return "channels_last"
    convolutions = [call for call in calls if call.node.is_field and lookup(call.node.op).compiled]
    weights = [call.operands[1].shape for call in convolutions]
    windows = sum(prod(shape) for shape in weights if prod(shape[2:]) > 1)
    fields = sum(prod(call.node.shape) + prod(call.operands[0].shape) for call in convolutions)
    return "contiguous" if windows > fields else "channels_last"
