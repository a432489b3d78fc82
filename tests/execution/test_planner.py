"""The planner keeps its plans true to the process around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gigagrad as gg
from gigagrad.allowances import KERNEL_BYTES, MOST_COMPILED
from gigagrad.devices import Machine, cpu
from gigagrad.errors import BudgetError
from gigagrad.events import Notice, Preparing
from gigagrad.execution import planner
from gigagrad.losses import bce
from gigagrad.plans import estimate
from gigagrad.plans.plan import amount_of
from gigagrad.threads import operator_threads
from tests.devices.fake import FakeCpu

MIB = 2**20


@pytest.fixture
def job():
    """An engine with a budget of 1000 MiB whose process holds as much as the test says: `device.held`."""
    device = FakeCpu(400 * MIB)
    torch.manual_seed(0)
    engine = gg.compile(gg.models.resolve("paper-unet"), bce, memory=1000 * MIB, device=device)
    image = np.zeros((3, 3000, 3000), np.uint8)
    mask = np.zeros((1, 3000, 3000), np.uint8)
    notices: list[Notice] = []
    engine.events.subscribe(lambda event: notices.append(event) if isinstance(event, Notice) else None)
    return engine, lambda: engine.plan(image, mask), device, notices


def runtime(plan):
    return amount_of(plan.memory_at_peak, estimate.STEP, estimate.COMPILED, estimate.ALLOCATOR_CACHE)


def parameters(plan):
    return amount_of(plan.memory_at_peak, estimate.OPTIMIZER, estimate.GRADIENTS, estimate.SUMS)


def test_a_process_that_grew_is_in_the_next_prediction(job):
    """Whatever it has loaded since: kernels and their code are still to come."""
    _, plan, held, notices = job
    before = plan()
    held.held += 250 * MIB
    after = plan()
    assert after.predicted_peak_bytes - before.predicted_peak_bytes == 250 * MIB
    assert (after.tile, after.workers, after.memory_format) == (before.tile, before.workers, before.memory_format)
    assert not notices


def test_what_a_run_added_is_not_added_again(job):
    engine, plan, held, _ = job
    before = plan()
    pair = np.zeros((3, 3000, 3000), np.uint8), np.zeros((1, 3000, 3000), np.uint8)
    engine.backward(*pair)
    held.held += 40 * MIB
    assert plan() is before  # the first run's allowance covers it
    held.held += 60 * MIB
    after = plan()
    assert 0 < after.predicted_peak_bytes - before.predicted_peak_bytes < 60 * MIB
    assert plan() is after
    compiled = held.residue.compiled
    assert 0 < compiled < MOST_COMPILED
    engine.backward(*pair)
    assert held.residue.compiled == compiled
    other = gg.compile(engine.model, engine.loss, memory=1000 * MIB, device=held)
    image = np.zeros((3, 3000, 3016), np.uint8)
    assert runtime(other.plan(image, image[:1])) > runtime(after)  # other shapes are compiled anew
    held.residue.compiled = MOST_COMPILED
    other = gg.compile(engine.model, engine.loss, memory=1000 * MIB, device=held)
    assert runtime(other.plan(image, image[:1])) == runtime(after)


def test_kernels_count_as_what_they_take_on_this_processor(job, monkeypatch):
    engine, plan, held, _ = job
    before = runtime(plan())
    monkeypatch.setattr(cpu, "KERNEL_BYTES", KERNEL_BYTES + 1000)
    other = gg.compile(engine.model, engine.loss, memory=1000 * MIB, device=held)
    image = np.zeros((3, 3000, 3000), np.uint8)
    more = runtime(other.plan(image, image[:1])) - before
    assert more > 0
    assert more % 3000 == 0  # a thousand for each kernel, forward and twice backward


def test_what_a_trial_of_layouts_brought_is_not_added_again(job, monkeypatch):
    """Its kernels are those that the first run needs: the plan that was announced is the one that runs."""
    engine, _, held, _ = job
    small = gg.compile(
        torch.nn.Conv2d(3, 1, 3, padding=1), engine.loss, memory=1000 * MIB, tile=(256, 256), device=held
    )
    image = np.zeros((3, 3000, 3000), np.float32)

    def trial(prepared):
        held.held += 30 * MIB
        return "channels_last", 1.0

    monkeypatch.setattr(planner, "faster_layout", trial)
    before = small.plan(image, image[:1])
    assert held.held == 430 * MIB
    assert small.plan(image, image[:1]) is before
    held.held += 20 * MIB
    after = small.plan(image, image[:1])
    assert after.predicted_peak_bytes == before.predicted_peak_bytes + 20 * MIB
    held.residue.tried_bytes = 500 * MIB
    held.held += 200 * MIB
    assert runtime(small.plan(image, image[:1])) > 24 * MIB  # threads, readers and the optimizer's kernels


@pytest.mark.parametrize("told", [True, False])
def test_freed_memory_is_given_back_only_where_the_process_may_have_grown(job, told):
    """It is what the next step would take: giving it back before every step costs a page fault for every page."""
    _, plan, held, _ = job
    held.tells = told
    plan()
    given_back = held.trimmed
    plan()
    assert held.trimmed == given_back + (not told)
    held.held += 250 * MIB
    plan()
    assert held.trimmed > given_back + (not told)


def too_large_for_half(plan):
    """Bytes of a process beside which a plan's tiles no longer fit, but tiles of half their bytes may."""
    tiles = plan.predicted_peak_bytes - 400 * MIB - runtime(plan)
    needed = runtime(plan) - amount_of(
        plan.memory_at_peak, estimate.ALLOCATOR_CACHE
    )  # freed blocks are held only where there is room
    return 1000 * MIB - needed - tiles // 2


def test_tiles_that_no_longer_fit_are_chosen_again_with_a_notice(job):
    _, plan, held, notices = job
    before = plan()
    held.held = too_large_for_half(before)
    after = plan()
    assert after.predicted_peak_bytes <= 1000 * MIB
    assert after.tile[0] * after.tile[1] * after.workers < before.tile[0] * before.tile[1] * before.workers
    assert [notice.warning for notice in notices] == [True]
    held.held = 1000 * MIB
    with pytest.raises(BudgetError):
        plan()


def test_adopted_tiles_that_do_not_fit_are_chosen_again(job):
    engine, plan, held, notices = job
    before = plan()
    other = gg.compile(engine.model, engine.loss, memory=1000 * MIB, device=held)
    other.events.subscribe(lambda event: notices.append(event) if isinstance(event, Notice) else None)
    other.load_state_dict(engine.state_dict())
    held.held = too_large_for_half(before)
    image = np.zeros((3, 3000, 3000), np.uint8)
    assert other.plan(image, image[:1]).predicted_peak_bytes <= 1000 * MIB
    assert [notice.warning for notice in notices] == [True]


def test_an_optimizer_is_counted_until_a_step_shows_what_it_holds():
    model = torch.nn.Conv2d(1, 512, 16, stride=16)
    image, target = torch.zeros(1, 64, 64), torch.zeros(512, 4, 4)
    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    engine = gg.compile(model, torch.nn.functional.mse_loss, memory=4 * 2**30, device=FakeCpu())
    before = parameters(engine.plan(image, target))
    engine.backward(image, target)
    assert parameters(engine.plan(image, target)) == before
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    other = gg.compile(model, torch.nn.functional.mse_loss, memory=4 * 2**30, device=FakeCpu())
    image, target = torch.zeros(1, 64, 80), torch.zeros(512, 4, 5)  # a size that is planned anew
    assert parameters(other.plan(image, target)) - parameters(engine.plan(image, target)) == moments


def test_of_a_named_optimizer_its_own_state_is_counted_until_it_is_there():
    model = torch.nn.Conv2d(1, 512, 16, stride=16)
    image, target = torch.zeros(1, 64, 64), torch.zeros(512, 4, 4)
    adam = torch.optim.Adam(model.parameters())
    engines = {
        name: gg.compile(model, torch.nn.functional.mse_loss, memory=4 * 2**30, device=FakeCpu(), optimizer=optimizer)
        for name, optimizer in (
            ("none", torch.optim.SGD(model.parameters(), lr=0.1)),
            ("one", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
            ("two", adam),
        )
    }
    none, one, two = (parameters(engine.plan(image, target)) for engine in engines.values())
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert one - none == held
    assert two - one == pytest.approx(held, abs=100)  # and how often it has stepped
    engines["two"].backward(image, target)
    adam.step()
    image, target = torch.zeros(1, 64, 80), torch.zeros(512, 4, 5)  # a size that is planned anew
    assert parameters(engines["two"].plan(image, target)) == parameters(engines["none"].plan(image, target))


def test_only_so_many_sizes_are_kept(monkeypatch):
    monkeypatch.setattr(planner, "_MOST_SIZES", 2)
    engine = gg.compile(torch.nn.Conv2d(1, 1, 3))
    first = engine.plan(torch.zeros(1, 10, 10))
    assert engine.plan(torch.zeros(1, 10, 10)) is first
    for width in (11, 12):
        engine.plan(torch.zeros(1, 10, width))
    assert engine.plan(torch.zeros(1, 10, 10)) is not first
    assert len(engine.state_dict()["choices"]) == 3


def test_a_plan_made_again_takes_as_long():
    """One tile is computed by both threads, the second time, too."""
    image = np.zeros((3, 400, 400), np.uint8)
    plans, state = [], None
    for _ in range(2):
        engine = gg.compile(gg.models.resolve("paper-unet"), bce, tile=(400, 400), device=FakeCpu(400 * MIB))
        if state is not None:
            engine.load_state_dict(state)
        with operator_threads(2):
            plans.append(engine.plan(image, image[:1]))
        state = engine.state_dict()
    assert [(plan.workers, plan.threads) for plan in plans] == [(1, 2), (1, 2)]
    assert plans[0].modelled_seconds == plans[1].modelled_seconds


@pytest.mark.parametrize("kept", [[10**6], [0], [4]], ids=["no such node", "an image", "another number of segments"])
def test_an_adopted_choice_of_another_model_is_not_used(job, kept):
    engine, plan, held, notices = job
    before = plan()
    state = engine.state_dict()
    for choice in state["choices"].values():
        choice["kept"] = [[node, "memory"] for node in kept]
    other = gg.compile(engine.model, engine.loss, memory=1000 * MIB, device=held)
    other.load_state_dict(state)
    image = np.zeros((3, 3000, 3000), np.uint8)
    assert other.plan(image, image[:1]).kept == before.kept
    assert not notices


def test_a_choice_is_for_the_sizes_of_all_images():
    class Both(torch.nn.Module):
        def forward(self, a, b):
            return a.mean() + b.mean()

    engine = gg.compile(Both(), tile=(8, 8))
    for size in (20, 30):
        engine.forward((torch.zeros(1, 16, 16), torch.zeros(1, size, size)))
    assert list(engine.state_dict()["choices"]) == ["forward 1x1x16x16 1x1x20x20", "forward 1x1x16x16 1x1x30x30"]


@pytest.mark.parametrize(
    ("dilation", "precision", "layout"), [(2, "bfloat16", "contiguous"), (2, None, "channels_last")]
)
def test_dilated_convolutions_in_bfloat16_run_contiguous(dilation, precision, layout):
    """Channels last, the gradient of this one is a segmentation fault in PyTorch 2.13."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 24, 1), torch.nn.Conv2d(24, 4, 3, padding=dilation, dilation=dilation)
    )
    engine = gg.compile(model, torch.nn.functional.mse_loss, precision=precision)
    image, target = torch.rand(3, 60, 50), torch.rand(4, 60, 50)
    assert engine.plan(image, target).memory_format == layout
    engine.backward(image, target)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("kernel", "side", "layout"), [(3, 8, "contiguous"), (3, 64, "channels_last"), (1, 8, "channels_last")]
)
def test_weights_larger_than_fields_are_not_turned(kernel, side, layout):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 1), torch.nn.Conv2d(64, 64, kernel, padding=kernel // 2))
    engine = gg.compile(torch.nn.Sequential(model, torch.nn.Conv2d(64, 1, 1)), bce, tile=(16, 16))
    engine.in_tiles = True
    plan = engine.plan(torch.rand(1, 3, side, side), torch.zeros(1, 1, side, side))
    assert plan.memory_format == layout


def prepared(engine, pair):
    """What was prepared, in order, and whether each of it came to its end."""
    heard: list[Preparing] = []
    engine.events.subscribe(lambda event: heard.append(event) if isinstance(event, Preparing) else None)
    try:
        engine.backward(*pair)
    finally:
        for each in {event.doing for event in heard}:
            assert sum(event.over for event in heard if event.doing == each) == 1
    return heard


def test_a_first_step_tells_what_it_is_prepared_by_and_the_second_has_nothing_to_tell():
    pair = np.zeros((3, 400, 400), np.uint8), np.zeros((1, 400, 400), np.uint8)
    engine = gg.compile(gg.models.resolve("paper-unet"), bce)
    heard = prepared(engine, pair)
    assert list(dict.fromkeys(event.doing for event in heard))[:2] == ["capture the model", "plan"]
    last = next(event for event in heard if event.doing == "plan" and event.over)
    assert last.tried
    assert last.best_seconds == pytest.approx(engine.plan(*pair).modelled_seconds)
    assert prepared(engine, pair) == []


def test_a_refused_plan_is_over_too():
    pair = np.zeros((3, 400, 400), np.uint8), np.zeros((1, 400, 400), np.uint8)
    with pytest.raises(BudgetError):
        prepared(gg.compile(gg.models.resolve("paper-unet"), bce, memory=1000), pair)


def test_a_plan_for_another_machine_is_by_its_rates_and_none_that_runs_here(job):
    engine, plan, _, _ = job
    pair = np.zeros((3, 3000, 3000), np.uint8), np.zeros((1, 3000, 3000), np.uint8)
    slow = Machine(threads=8, flops_per_second=1e9, shared_efficiency=0.0)
    there = engine.plan(*pair, machine=slow)
    assert (there.workers, there.timed_seconds) == (8, None)
    assert there.predicted_seconds > 1
    assert engine.problem(*pair, machine=slow).machine == slow
    assert plan().workers != 8
