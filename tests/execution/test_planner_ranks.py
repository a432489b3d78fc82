"""Several ranks run one plan, which fits all of them, or none runs anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.allowances import FREE_SHARE, MOST_COMPILED
from gigagrad.devices import Machine, cpu
from gigagrad.errors import BudgetError, ConfigError, GigagradError, RankError
from gigagrad.events import Notice
from gigagrad.execution import planner
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.sources import opened_sources
from gigagrad.graphs import Graph
from gigagrad.losses import bce
from gigagrad.plans import Plan, estimate
from gigagrad.plans.plan import amount_of
from gigagrad.ranks import Ranks, SingleRank, run_threaded
from gigagrad.stores import DiskTier
from tests.devices.fake import FakeCpu
from tests.execution.by_ranks import RankRun, outcome

MIB = 2**20
PLENTY = 800 * MIB


class Device(FakeCpu):
    """Of one thread, whatever is known of this machine."""

    def machine(self, say: Callable[[str], None] = lambda text: None) -> Machine:
        return Machine()


def network(side: int, *, frozen: bool = False) -> tuple[nn.Module, Graph]:
    """Captured once: tracing is not for several threads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    model[0].requires_grad_(not frozen)
    engine = gg.compile(model, bce)
    with opened_sources(engine._composite, *pair(side)) as sources:
        return model, engine._captures.get(sources).graph


def pair(side: int) -> tuple[torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, side, side, generator=generator), np.zeros((1, side, side), np.uint8)


class Job:
    def __init__(self) -> None:
        self.model, self.graph = network(1000)
        self.image, self.mask = pair(1000)
        self.notices: list[Notice] = []

    def engine(self, ranks: Ranks, device: FakeCpu | None = None, **options: Any) -> gg.Engine:
        arguments: dict[str, Any] = {"memory": PLENTY, "device": device or Device(), "mesh": ranks}
        engine = gg.compile(self.model, bce, **arguments | options)
        engine.events.subscribe(lambda event: self.notices.append(event) if isinstance(event, Notice) else None)
        return engine

    def prepared(self, engine: gg.Engine, graph: Graph | None = None, *, backward: bool = True) -> Prepared:
        with engine.ranks.error_scope(), opened_sources(engine._composite, self.image, self.mask) as sources:
            return engine._planner.prepare(graph or self.graph, sources, None, backward=backward)

    def rooms(self, ranks: Ranks, **options: Any) -> dict[str, int]:
        engine = self.engine(ranks, **options)
        with opened_sources(engine._composite, self.image, self.mask) as sources:
            return dict(engine._planner.problem(self.graph, sources, None, backward=True).rooms)

    def plans(self, devices: list[Device], **options: Any) -> list[Plan]:
        """What each rank plans at first."""

        def work(ranks: Ranks) -> Plan:
            return self.prepared(self.engine(ranks, devices[ranks.index], **options)).plan

        return run_threaded(len(devices), work, timeout=60)

    def tight(self, ranks: int) -> int:
        """A budget that a plan fills, if nothing is to be compiled."""
        memory, needed = PLENTY + 1, PLENTY
        while needed < memory:
            memory = needed
            needed = without_kernels(self.plans(devices_of(*[MOST_COMPILED] * ranks), memory=memory)[0])
        return memory

    def least(self, ranks: int) -> int:
        """A budget that is a little too small, if everything is to be compiled."""
        with pytest.raises(BudgetError) as raised:
            self.plans(devices_of(*[0] * ranks), memory=1)
        return raised.value.needed_bytes - MIB


@pytest.fixture(scope="module")
def captured() -> Job:
    return Job()


@pytest.fixture
def job(captured: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(cpu, "KERNEL_BYTES", MIB)
    monkeypatch.setattr(planner, "_SOON", 0.0)  # no tiles are timed, so that equal problems have equal plans
    captured.notices.clear()
    return captured


def devices_of(*compiled_kernels: int) -> list[Device]:
    devices = [Device() for _ in compiled_kernels]
    for device, count in zip(devices, compiled_kernels, strict=True):
        device.residue.compiled = count
    return devices


def compiled(plan: Plan) -> int:
    return amount_of(plan.fixed, estimate.COMPILED)


def without_kernels(plan: Plan) -> int:
    """What its tiles cannot do without."""
    return plan.predicted_peak_bytes - amount_of(plan.fixed, estimate.ALLOCATOR_CACHE, estimate.COMPILED)


@pytest.mark.parametrize("there", [(MOST_COMPILED, 0), (0, MOST_COMPILED)])
def test_a_rank_that_has_compiled_nothing_is_planned_for_on_all(job, there):
    """The other one may have scored a fold by itself."""
    memory = job.tight(2)
    found = job.plans(devices_of(*there), memory=memory)
    assert found == job.plans(devices_of(0, 0), memory=memory)
    assert compiled(found[0]) > 0
    warm, _ = job.plans(devices_of(MOST_COMPILED, MOST_COMPILED), memory=memory)
    assert (warm.tile, warm.kept) != (found[0].tile, found[0].kept)


def test_kernels_count_as_where_they_are_largest_and_most(job):
    class Large(Device):
        def compiled_bytes(self, count, dtypes):
            return 2 * super().compiled_bytes(count, dtypes)

    def counted(*devices: Device) -> int:
        found = job.plans([*devices], memory=None, tile=(90, 110))
        assert found[0] == found[1]
        return compiled(found[0])

    assert counted(Device(), Large()) == 2 * counted(*devices_of(0, 0)) > 20 * MIB
    assert counted(*devices_of(MOST_COMPILED, MOST_COMPILED - 10)) == 10 * MIB


def test_what_does_not_fit_beside_the_kernels_of_one_rank_is_refused_by_the_first(job):
    devices, told, memory = devices_of(MOST_COMPILED, MOST_COMPILED, 0), dict[int, Exception](), job.least(3)
    job.plans(devices_of(*[MOST_COMPILED] * 3), memory=memory)

    def work(ranks: Ranks) -> None:
        try:
            job.prepared(job.engine(ranks, devices[ranks.index], memory=memory))
        except GigagradError as error:
            told[ranks.index] = error

    run_threaded(3, work)
    assert isinstance(told[0], BudgetError)
    assert [(type(told[rank]), str(told[rank])) for rank in (1, 2)] == [(RankError, f"rank 0 failed: {told[0]}")] * 2


@pytest.mark.parametrize("grown", [0, 1])
def test_a_plan_that_has_run_is_made_again_with_its_tiles_on_all(job, grown):
    """Its kernels are there: a rank that counts them once more has no room for them."""
    devices = devices_of(0, 0)

    def work(ranks: Ranks) -> tuple[Plan, Plan]:
        device = devices[ranks.index]
        engine = job.engine(ranks, device)
        before, step_bytes = job.prepared(engine), device.step_bytes()
        plan = before.plan
        engine._planner.finished(before, None)
        ranks.barrier()
        if ranks.index == grown:  # so that all but kernels fits
            device.held += PLENTY - without_kernels(plan) + step_bytes - device.step_bytes()
        after = job.prepared(engine)
        assert job.prepared(engine) is after
        return plan, after.plan

    (before, after), other = run_threaded(2, work)
    assert other == (before, after)
    assert [segment.tile for segment in after.segments] == [segment.tile for segment in before.segments]
    assert compiled(after) == 0 < compiled(before)
    assert not job.notices


def test_kernels_count_until_the_plan_has_run_on_all_ranks(job):
    devices = devices_of(0, 0)

    def work(ranks: Ranks) -> tuple[Plan, Plan]:
        engine = job.engine(ranks, devices[ranks.index])
        before = job.prepared(engine)
        if ranks.index == 0:
            engine._planner.finished(before, None)
        ranks.barrier()
        devices[ranks.index].held += 60 * MIB
        return before.plan, job.prepared(engine).plan

    (before, after), other = run_threaded(2, work)
    assert other == (before, after)
    assert before != after
    assert compiled(after) == compiled(before) > 0


def test_a_plan_that_serves_on_is_the_same_one_on_all_ranks(job):
    """With what is known of it: who holds what, and what its passes took."""
    devices = devices_of(0, 0)

    def work(ranks: Ranks) -> bool:
        device = devices[ranks.index]
        device.tells = False  # so that there is a look before every step
        engine = job.engine(ranks, device)
        return job.prepared(engine) is job.prepared(engine)

    assert run_threaded(2, work) == [True, True]


def test_plans_that_ranks_made_apart_are_not_run(job):
    devices, memory = devices_of(MOST_COMPILED, 0), job.tight(1)

    def work(ranks: Ranks) -> tuple[Plan, Plan]:
        engine = job.engine(ranks, devices[ranks.index], memory=memory)
        engine._planner._ranks = engine._planner._agreement._ranks = SingleRank()
        apart = job.prepared(engine).plan
        engine._planner._ranks = engine._planner._agreement._ranks = ranks
        ranks.barrier()
        return apart, job.prepared(engine).plan

    (one, plan), (two, other) = run_threaded(2, work)
    assert (one.tile, one.kept) != (two.tile, two.kept)
    assert plan == other


REFUSED = {
    "gradients": "would compute something else than rank 0, first at 0.weight; give all ranks the same model",
    "direction": "and rank 0 were asked for different things; call the same",
    "tile": "was compiled with another tile than rank 0;",
    "scratch": "was compiled with another scratch than rank 0;",
    "size": "would compute something else than rank 0, first at image",
}


@pytest.mark.parametrize("differs", REFUSED)
def test_ranks_that_are_given_different_things_are_refused(job, differs, tmp_path):
    options: dict[str, Any] = {"tile": {"tile": (64, 64)}, "scratch": {"scratch": tmp_path}}.get(differs, {})
    graphs = {"gradients": lambda: network(1000, frozen=True)[1], "size": lambda: network(200)[1]}
    graph = graphs.get(differs, lambda: job.graph)()
    told: dict[int, str] = {}

    def work(ranks: Ranks) -> None:
        odd = ranks.index == 2
        engine = job.engine(ranks, **options if odd else {})
        try:
            job.prepared(engine, graph if odd else None, backward=not odd or differs != "direction")
        except ConfigError as error:
            told[ranks.index] = str(error)

    run_threaded(3, work)
    assert [*told.values()] == [told[0]] * 3
    assert told[0].startswith(f"rank 2 {REFUSED[differs]}")


def test_ranks_meet_once_before_a_step_and_four_times_where_they_plan(job):
    def work(ranks: Ranks) -> list[int]:
        words, met, counts = ranks._gather, list[bytes](), list[int]()
        ranks._gather = lambda payload: met.append(payload) or words(payload)  # type: ignore[func-returns-value,method-assign]
        engine = job.engine(ranks)
        for _ in range(2):
            with opened_sources(engine._composite, job.image, job.mask) as sources:
                engine._planner.prepare(job.graph, sources, None, backward=True)
            counts.append(len(met))
        return counts

    assert run_threaded(2, work) == [[4, 5]] * 2


def test_a_step_by_ranks_that_have_compiled_differently_has_the_bits_of_one(job):
    devices, memory = devices_of(MOST_COMPILED, 0, 0), job.tight(3)

    def work(ranks: Ranks) -> tuple[RankRun, str]:
        engine = job.engine(ranks, devices[ranks.index], memory=memory)
        run = RankRun(engine, job.prepared(engine), job.image, job.mask)
        return run, outcome(run, ranks)[0]

    found = run_threaded(3, work, timeout=60)
    alone, _ = outcome(found[0][0], SingleRank())
    assert [bits for _, bits in found] == [alone] * 3


def disk_has(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))


def test_ranks_divide_what_is_free_on_their_disk(job, monkeypatch, tmp_path):
    disk_has(monkeypatch, 100 * MIB)
    whole = int(100 * MIB * FREE_SHARE)
    assert job.rooms(SingleRank(), scratch=tmp_path) == {"disk": whole}
    for limit, room in ((None, whole // 4), (10 * MIB, 10 * MIB), (50 * MIB, whole // 4)):
        found = run_threaded(4, partial(job.rooms, scratch=tmp_path, scratch_bytes=limit))
        assert found == [{"disk": room}] * 4


def test_ranks_with_disks_of_their_own_have_all_of_them(job, tmp_path):
    class Disk(DiskTier):
        def __init__(self, name: str, free: int) -> None:
            super().__init__(tmp_path)
            self._found = name, free

        def _disk(self) -> tuple[str, int]:
            return self._found

    def rooms(*disks: tuple[str, int]) -> list[dict[str, int]]:
        return run_threaded(len(disks), lambda ranks: job.rooms(ranks, scratch=Disk(*disks[ranks.index])))

    assert rooms(("one", 100), ("two", 90)) == [{"disk": 90}] * 2
    assert rooms(("one", 100), ("two", 60), ("one", 100)) == [{"disk": 50}] * 3
    assert rooms(("one", 100), ("two", 40), ("one", 100)) == [{"disk": 40}] * 3


def test_ranks_keep_no_more_on_a_disk_than_it_holds_for_all_of_them(job, monkeypatch, tmp_path):
    memory = job.least(2)

    def kept(free: int) -> int:
        """By all."""
        disk_has(monkeypatch, free)
        found = job.plans(devices_of(0, 0), memory=memory, scratch=tmp_path)
        assert found[0] == found[1]
        return sum(plan.bytes_in("disk") for plan in found)

    wanted = kept(2**40)
    assert wanted > 0
    assert kept(int(1.1 * wanted)) == wanted
    with pytest.raises(BudgetError, match="does not fit"):
        kept(int(0.9 * wanted))
