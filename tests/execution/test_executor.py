"""Tiles side by side: order, errors, thread settings, and the engine's results with several workers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad.devices import Machine
from gigagrad.devices.cpu import HeapGuard
from gigagrad.events import Notice
from gigagrad.execution.buffers import Buffers
from gigagrad.execution.executor import Executor
from gigagrad.execution.tile_program import TileInputs, TileProgram
from gigagrad.plans.problem import Reading
from gigagrad.threads import operator_threads


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a slow processor, which computes tiles side by side, however small they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    slow: dict[str, Any] = {"shared_efficiency": 0.0, "seconds_per_operator": 0.0, "flops_per_second": 1e6}
    monkeypatch.setattr(Machine, "detect", lambda threads, *_: Machine(threads=threads, **slow))
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items() -> None:
    gate = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            gate.wait()  # the first is the last to finish
        if item == 2:
            gate.set()
        return item * item

    with closing(Executor(3, 1)) as pool:
        assert list(pool.in_order(range(9), work)) == [i * i for i in range(9)]


def test_each_worker_has_one_thread_and_the_callers_setting_stays(two_threads: None) -> None:
    with closing(Executor(2, 1)) as pool:
        for _ in range(2):  # one sweep after the other
            assert set(pool.in_order(range(8), lambda _: torch.get_num_threads())) == {1}
            assert torch.get_num_threads() == 2
            for count in (1, 2):
                assert list(Executor(1, count).in_order(range(2), lambda _: torch.get_num_threads())) == [count] * 2
    assert torch.get_num_threads() == 2


class Crowd:
    """How many are at work at a time."""

    def __init__(self) -> None:
        self._now = self._most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self._most = max(self._most, self._now)
        time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._now -= 1

    def most(self) -> int:
        """At a time, since this was asked last."""
        with self._lock:
            most, self._most = self._most, self._now
            return most


def test_fewer_are_at_work_while_one_is_held() -> None:
    crowd = Crowd()

    def work(item: int) -> int:
        with crowd:
            return item

    with closing(Executor(3, 1)) as pool:
        for item in pool.in_order(range(30), work):
            if item in (5, 15):
                pool.hold_one()
                crowd.most()
        assert pool.at_a_time == crowd.most() == 1
        pool.let_go()
        together = threading.Barrier(3)  # that no fewer than three can pass
        assert len(list(pool.in_order(range(3), lambda _: together.wait(60)))) == 3


def test_where_memory_is_short_tiles_go_one_at_a_time_and_give_the_same_bits(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 1, 3))
    image, target = torch.rand(1, 90, 90), torch.rand(1, 86, 86)
    told: list[str] = []
    asked: list[int] = []
    found = []
    choices: dict[str, Any] = {"choices": {}}
    for short in (False, True):
        engine = gg.compile(model, F.binary_cross_entropy_with_logits, tile=(20, 20), memory="64 GiB")
        engine.load_state_dict(choices)  # which memory layout is faster may change from trial to trial
        engine.events.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
        for _ in range(2):
            asked.clear()
            monkeypatch.setattr(HeapGuard, "is_short", lambda *given, short=short: asked.append(given[2]) or short)  # type: ignore[func-returns-value]
            model.zero_grad()
            engine.backward(image, target)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert engine.plan(image, target).workers == 2
        passes = len(engine.plan(image, target).passes)
        # Asked after every tile; once it was short, not again before the next pass, where all may work again.
        assert len(asked) == (passes if short else engine.plan(image, target).tile_count)
        assert set(asked) == {2}
        choices = engine.state_dict()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert len(told) == 1
    assert "fewer tiles" in told[0]


def test_an_error_in_a_worker_reaches_the_caller_and_ends_the_work(two_threads: None) -> None:
    started = []

    def work(item: int) -> int:
        started.append(item)
        if item == 1:
            raise ValueError("tile 1")
        return item

    with closing(Executor(2, 1)) as pool:
        with pytest.raises(ValueError, match="tile 1"):
            list(pool.in_order(range(1000), work))
        assert len(started) < 10
        ended = len(started)
        assert list(pool.in_order([5], work)) == [5]  # nobody is still busy, and the pool serves the next sweep
        assert len(started) == ended + 1
    assert torch.get_num_threads() == 2


def test_workers_give_the_exact_gradient_and_the_same_bits_every_time(two_threads: None) -> None:
    torch.manual_seed(0)
    model = gg.models.PaperUNet().double()
    image = torch.randn(1, 401, 523, dtype=torch.float64)
    target = torch.rand(1, 401, 523, dtype=torch.float64)
    whole = F.binary_cross_entropy_with_logits(model(image[None]), target[None])
    whole.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    engine = gg.compile(model, F.binary_cross_entropy_with_logits, tile=(20, 20))
    assert engine.plan(image, target).workers == 2
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = engine.backward(image, target)
        found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert abs(loss.item() - whole.item()) <= 1e-13 * whole.item()
    for gradient, reference in zip(found[0][1:], expected, strict=True):
        assert (gradient - reference).norm() <= 1e-11 * reference.norm()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_two_tiles_share_a_tensor_that_wants_a_gradient(
    two_threads: None, gate: torch.nn.Module, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read one can wait for each other for ever: seen in PyTorch 2.13, once in some thousand tiles."""
    wanting: list[torch.Tensor] = []
    alone = TileProgram.activations

    def recorded(self: TileProgram, *args: Any, **options: Any) -> Any:
        found = alone(self, *args, **options)
        wanting.extend([*found.crops.values(), *found.stored.values(), *found.globals.values()])
        return found

    monkeypatch.setattr(TileProgram, "activations", recorded)
    engine = gg.compile(gate, F.binary_cross_entropy_with_logits, tile=(8, 8))
    assert engine.plan(pair.image, pair.target).workers == 2
    engine.backward(pair.image, pair.target)
    assert len(wanting) > 2 * len(list(gate.parameters())), "several tiles' weights"
    assert len({id(tensor) for tensor in wanting}) == len(wanting)


def test_a_stream_with_workers_is_in_order(two_threads: None) -> None:
    model = torch.nn.Conv2d(1, 1, 3, padding=1)
    image = torch.rand(1, 50, 70)
    found = [(box, torch.get_num_threads()) for box, _ in gg.compile(model, tile=(16, 16)).stream(image)]
    boxes = [box for box, _ in found]
    assert boxes == sorted(boxes)
    assert {threads for _, threads in found} == {2}  # between the tiles it is the caller's turn
    with torch.no_grad():
        torch.testing.assert_close(gg.compile(model, tile=(16, 16)).forward(image), model(image[None]))


def test_a_stream_that_is_garbage_leaves_the_callers_setting(two_threads: None) -> None:
    """Its inner generators may be closed before the outer ones, and by any thread."""
    stream = gg.compile(torch.nn.Conv2d(1, 1, 3, padding=1), tile=(16, 16)).stream(torch.rand(1, 50, 70))
    next(stream)
    assert any(thread.name.startswith("gigagrad-tile") for thread in threading.enumerate())
    held: list[Any] = [stream]
    held.append(held)
    del stream, held
    gc.collect()
    assert torch.get_num_threads() == 2
    found: list[Any] = []

    def elsewhere() -> None:
        with operator_threads(1):
            inside.close()  # type: ignore[attr-defined]
            found.append(torch.get_num_threads())

    inside = Executor(2, 1).in_order([0, 1], lambda item: item)
    next(inside)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [1]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_crops_are_alive_than_planned(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, workers: int, readers: int
) -> None:
    """Those at work, one for each reader and one that waits, and with several workers one in the queue
    (`plans/estimate.py`).
    """
    torch.set_num_threads(workers)
    monkeypatch.setattr(Reading, "readers", lambda *_: readers)
    alive, most, read = 0, 0, Buffers.inputs

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(*args: Any, **options: Any) -> TileInputs:
        nonlocal alive, most
        inputs = read(*args, **options)
        for crop in inputs.crops.values():
            alive += 1
            weakref.finalize(crop, gone)
        most = max(most, alive)
        time.sleep(0.002)
        return inputs

    monkeypatch.setattr(Buffers, "inputs", counted)
    model = torch.nn.Conv2d(1, 2, 3, padding=1)
    engine = gg.compile(model, lambda o, t: (o - t).square().mean(), tile=(16, 16))
    image, target = torch.rand(1, 200, 160), torch.rand(2, 200, 160)
    plan = engine.plan(image, target)
    assert (plan.workers, plan.readers) == (workers, readers)
    engine.backward(image, target)
    per_tile = 2  # the image's and the target's
    assert per_tile < most <= per_tile * (workers + readers + 1 + (workers > 1))
