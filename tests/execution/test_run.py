"""The order of a run: passes, events, measurements."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.allowances import HEAP_TOP_BYTES
from gigagrad.boxes import Box
from gigagrad.devices import MemoryGuard, device_for, heap
from gigagrad.devices.cpu import Cpu, HeapGuard
from gigagrad.events import Preparing, StepMeasured, TileBegun, TileDone
from gigagrad.execution import probes, scalars
from gigagrad.execution.buffers import Buffers
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.probes import Progress
from gigagrad.execution.run import Run
from gigagrad.execution.scalars import ScalarGraph
from gigagrad.graphs import InputSpec, capture
from gigagrad.stores import HostStore


def events_of(engine):
    seen: list[Any] = []
    engine.events.subscribe(lambda event: None if isinstance(event, Preparing | TileBegun) else seen.append(event))
    return seen


def test_one_pass_reports_every_tile_and_then_the_step(net, bce, pair):
    engine = gg.compile(net, bce, tile=(10, 10))
    seen = events_of(engine)
    engine.backward(pair.image, pair.target)
    tiles, measured = seen[:-1], seen[-1]
    assert [(tile.phase, tile.done, tile.total) for tile in tiles] == [("backward", done, 12) for done in range(1, 13)]
    assert tiles[0].seconds_left > 0
    assert tiles[-1].seconds_left == pytest.approx(0, abs=1e-9)
    assert isinstance(measured, StepMeasured)
    assert measured is engine.last_run
    assert (measured.phase, measured.pixels, measured.budget_bytes) == ("backward", 23 * 31, 0)
    assert measured.peak_bytes > 0
    assert measured.predicted_peak_bytes >= engine.plan(pair.image, pair.target).predicted_peak_bytes


def test_two_segments_run_forward_and_then_backward_in_reverse(gate, bce, pair):
    engine = gg.compile(gate, bce, tile=(12, 31))
    seen = events_of(engine)
    engine.backward(pair.image, pair.target)
    assert [event.phase for event in seen[:-1]] == ["forward"] * 2 + ["backward"] * 4
    assert [event.done for event in seen[:-1]] == list(range(1, 7))
    assert {event.total for event in seen[:-1]} == {6}


def test_what_is_left_is_foretold_by_what_the_passes_took_before(gate, bce, pair, monkeypatch):
    engine = gg.compile(gate, bce, tile=(12, 31))
    plan = engine.plan(pair.image, pair.target)
    counts = [plan.segments[p.segment].tile_count for p in plan.passes]
    clock = [0.0]
    monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    tell = Progress.tile_done

    def tick(self, phase):  # tiles of later passes take longer
        clock[0] += 1.0 if phase == "forward" else 5.0
        tell(self, phase)

    monkeypatch.setattr(Progress, "tile_done", tick)
    engine.backward(pair.image, pair.target)
    seen = events_of(engine)
    engine.backward(pair.image, pair.target)
    seconds = [1.0 if p.phase == "forward" else 5.0 for p in plan.passes for _ in range(counts[p.segment])]
    left = [sum(seconds[done:]) for done in range(1, len(seconds) + 1)]
    assert [event.seconds_left for event in seen[:-1]] == pytest.approx(left)


def test_a_forward_with_loss_and_a_stream_report_forward_tiles(net, bce, pair):
    engine = gg.compile(net, bce, tile=(12, 31))
    seen = events_of(engine)
    engine.forward(pair.image, pair.target)
    assert [(tile.phase, tile.done, tile.total) for tile in seen[:-1]] == [("forward", 1, 2), ("forward", 2, 2)]
    predictor = gg.compile(net, tile=(12, 31))
    streamed = events_of(predictor)
    predictor.forward(pair.image)
    assert [(tile.done, tile.total) for tile in streamed[:-1]] == [(1, 2), (2, 2)]
    assert streamed[-1].phase == "forward"


def dice(o, t):
    p = o.sigmoid()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


class LearnedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, o, t):
        return F.mse_loss(o, t) * torch.exp(-self.weight) + self.weight


LOSSES = {
    "affine": lambda o, t: 3 * F.mse_loss(o, t) - o.sum() / 9,
    "scaled": lambda o, t: torch.log(1 + F.mse_loss(o, t)),
    "after forward": dice,
    "sum of kinds": lambda o, t: F.binary_cross_entropy_with_logits(o, t) + dice(o, t),
    "times a detached sum": lambda o, t: dice(o, t) * o.square().mean().detach(),
    "learned": LearnedWeight(),
    "over a count": lambda o, t: (o * (t > 0.5)).sum() / (t > 0.5).sum(),
    "no image": lambda o, t: t.mean() + 0 * o.sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("which", ["net", "gate"])
def test_every_rule_for_cotangents_is_exact(request, which, loss, pair, whole, assert_exact):
    model, function = request.getfixturevalue(which), LOSSES[loss]
    value, expected = whole(model, function, pair.image, pair.target[None])
    result = gg.compile(model, function, tile=(9, 11)).backward(pair.image, pair.target)  # type: ignore[arg-type]
    torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-14)
    assert_exact(model, expected)


def test_parameters_reached_both_by_tiles_and_by_globals(pair, whole, assert_exact):
    """A weight used in the convolution and, squared, in the loss's arithmetic."""

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 1, 3, padding=1)

        def forward(self, x):
            return self.conv(x) * self.conv.weight.square().sum() + self.conv.bias.exp()[:, None, None]

    torch.manual_seed(0)
    model = Penalised().double()
    loss = F.mse_loss
    _, expected = whole(model, loss, pair.image, pair.target[None])
    gg.compile(model, loss, tile=(4, 31)).backward(pair.image, pair.target)
    assert_exact(model, expected)


def test_three_segments_deep(pair, whole, assert_exact):
    """Normalisation twice over: every segment's reductions depend on those of the segment before."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

        def forward(self, x):
            for layer in (self.a, self.b):
                x = layer(x)
                x = x - x.mean((2, 3), keepdim=True)
                x = x / (x.square().mean((2, 3), keepdim=True) + 1e-3).sqrt()
            return x

    torch.manual_seed(0)
    model = Twice().double()
    _, expected = whole(model, F.mse_loss, pair.image, pair.target[None])
    engine = gg.compile(model, F.mse_loss, tile=(7, 12))
    engine.backward(pair.image, pair.target)
    assert len(engine.plan(pair.image, pair.target).segments) == 5
    for name, parameter in model.named_parameters():
        if "bias" not in name:  # a bias that normalisation removes has a gradient of rounding errors only
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_float32_sums_do_not_drift(bce):
    """Partial sums are float32, their totals float64: a thousand tiles agree with double precision."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 3, padding=1)
    image, target = torch.rand(1, 320, 320), torch.rand(1, 320, 320)
    value = gg.compile(model, bce, tile=(10, 10)).backward(image, target)
    exact = bce(model.double()(image[None].double()), target[None].double())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=2e-7)


def test_cotangents_of_weights_in_fewer_bits_do_not_wait_for_the_end(monkeypatch):
    """They arrive at the cast of a weight, not at the weight; in float64 they take four times its bytes."""
    waiting, compute = [], Run._compute

    def counted(self, *given):
        compute(self, *given)
        waiting.append(max((value.numel() for value in self._scalars._pending.values()), default=0))

    monkeypatch.setattr(Run, "_compute", counted)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for i in (2, 8) for layer in (nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8))))
    image = torch.rand(2, 60, 70)
    engine = gg.compile(model, lambda o, t: (o - t).square().mean(), precision="bfloat16", tile=(20, 30))
    engine.backward(image, torch.rand(8, 60, 70))
    assert len(waiting) > 3
    assert max(waiting) == 16  # a norm's means and scales, which wait for its sums; a convolution's weight has 576
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_gradients_of_what_whole_field_operators_read_come_all_at_once():
    """Not those of the convolution before them, which come tile by tile, nor what has come already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 5, 4), nn.Flatten(), nn.Linear(6 * 15 * 15, 8), nn.Linear(8, 1))
    image, target = InputSpec((1, 1, 64, 64), torch.float32, field=True), InputSpec((1, 1), torch.float32, field=False)
    graph = capture(model, F.mse_loss, image, target, torch.bfloat16)
    scalars = ScalarGraph(graph, set(), device_for("cpu"), backward=True)
    assert scalars.coming_bytes == 4 * sum(p.numel() for layer in model[2:] for p in layer.parameters())  # type: ignore[attr-defined]
    for node in graph.nodes:
        if node.op == "parameter":
            scalars.gradients[node.id] = torch.zeros(node.shape)
    assert scalars.coming_bytes == 0


@pytest.mark.usefixtures("no_other_runs")
def test_tiles_of_large_blocks_take_them_from_the_heap_and_look_before_each(monkeypatch):
    """384 x 384 px in 16 channels are 9 MiB, 288 x 288 px are 5."""
    mapped, kept, looks, told = [], [], [], []

    def set_options(options):
        if heap._M_MMAP_MAX in options:
            mapped.append(options[heap._M_MMAP_MAX])
            kept.append(options[heap._M_TRIM_THRESHOLD])

    monkeypatch.setattr(heap, "_set_options", set_options)
    monkeypatch.setattr(HeapGuard, "reserve", lambda self, nbytes, for_tile=False: looks.extend([nbytes] * for_tile))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 1, 1))
    for side in (288, 384):
        image = torch.rand(1, 400, 400)
        engine = gg.compile(model, F.binary_cross_entropy_with_logits, tile=(side, side))
        is_large = side == 384
        if is_large:
            engine.events.subscribe(lambda event: told.append(mapped[-1]) if isinstance(event, TileDone) else None)
        mapped.clear()
        looks.clear()
        engine.backward(image, image)
        assert (0 in mapped) == is_large
        assert looks
    assert set(told) == {0}  # in every tile; and when the run was over:
    assert (mapped[-1], kept[-1]) == (heap._MOST_MAPPED, heap._NEVER)
    heap.LargeBlocks.let_go()  # what the next step would have found
    assert (mapped[-1], kept[-1]) == (heap._MOST_MAPPED, HEAP_TOP_BYTES)


def test_memory_is_given_back_for_what_each_pass_will_take():
    """Its tiles, large blocks beside them, and the sums of its gradients, which are new."""
    told, done_by = [], set()

    class Recorder(MemoryGuard):
        def begin_pass(self, tile_bytes, beside_bytes, largest_bytes):  # type: ignore[override]
            told.append([(tile_bytes, beside_bytes, largest_bytes)])

        def reserve(self, nbytes, *, for_tile=False):
            told[-1].extend([] if for_tile else [nbytes])

        def tile_done(self):
            done_by.add(threading.current_thread().name)

    class Recorded(Cpu):
        def memory_guard(self, peak_bytes, budget_bytes):
            told.clear()
            return Recorder()

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 512, 1), torch.nn.Conv2d(512, 512, 3), torch.nn.BatchNorm2d(512))
    device = Recorded("cpu")
    engine = gg.compile(model, lambda output, target: (output * target).mean(), tile=(8, 8), device=device)
    pair = torch.rand(1, 18, 18), torch.rand(1, 16, 16)
    plan = engine.plan(*pair)
    engine.backward(*pair)
    assert max(segment.beside_bytes for segment in plan.segments) >= 512 * 512 * 9 * 4
    segments = [plan.segments[step.segment] for step in plan.passes]
    assert [tiles[:2] for tiles, *_ in told] == [(plan.workers * s.tile_peak_bytes, s.beside_bytes) for s in segments]
    assert {tiles[2] for tiles, *_ in told} == {4 * 512 * 512 * 9, 4 * 512 * 8 * 8}  # weights count as blocks, too
    weights = 8 * (512 * 512 * 9 + 512 + 512 + 512)
    backward = [room for (_, room, *_), step in zip(told, plan.passes, strict=True) if step.phase == "backward"]
    assert backward[-1] >= weights  # type: ignore[operator]
    assert len(told[-1]) > 2  # and again before what is on the tape is pulled back
    assert all(name.startswith("gigagrad-tile") for name in done_by) == (plan.workers > 1)  # not when it is its turn


def test_the_prediction_that_is_reported_is_the_plans_whatever_the_process_held_before(net, bce, pair):
    """An earlier peak beside it, so that a miss shows."""
    taken = torch.ones(2**27)  # 512 MiB, before
    del taken
    engine = gg.compile(net, bce, tile=(10, 10))
    engine.backward(pair.image, pair.target)
    assert engine.last_run.predicted_peak_bytes == engine.plan(pair.image, pair.target).predicted_peak_bytes
    assert engine.last_run.earlier_peak_bytes >= 2**29
    assert engine.last_run.peak_bytes >= engine.last_run.earlier_peak_bytes


def test_who_computes_a_tile_writes_what_it_keeps(monkeypatch):
    """Beside whoever puts sums in order; and all of it is there when the pass is over."""
    written, write = set(), HostStore.write

    def recorded(self, box, crop):
        written.add(threading.current_thread().name)
        write(self, box, crop)

    monkeypatch.setattr(HostStore, "write", recorded)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    engine = gg.compile(model, F.mse_loss, tile=(16, 16))
    image, target = torch.rand(1, 100, 70), torch.rand(1, 100, 70)
    plan = engine.plan(image, target)
    assert plan.kept
    loss = float(engine.backward(image, target))
    assert plan.workers == 1 or all(name.startswith("gigagrad-tile") for name in written)
    assert written
    assert loss == pytest.approx(F.mse_loss(model(image[None])[0], target).item(), rel=1e-5)


def noted(function, calls):
    """The function, which notes that it was called."""

    def called(*given, **more):
        calls.append(function)
        return function(*given, **more)

    return called


def test_later_steps_bind_nothing_anew(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3))
    image, target = torch.rand(1, 3, 20, 20), torch.rand(1, 1, 16, 16)
    engine = gg.compile(model, F.mse_loss)
    engine.in_tiles = True
    engine.backward(image, target)
    bound: list[Any] = []
    for where, name in ((Prepared, "_bind"), (scalars, "levels"), (scalars, "plain"), (Buffers, "_find_windows")):
        made = getattr(where, name)
        monkeypatch.setattr(where, name, noted(made, bound))
    engine.backward(image, target)
    assert not bound
    assert len(engine.plan(image, target).passes) == 3
    engine.backward(image[..., :18, :18], target[..., :14, :14])
    assert {made.__name__ for made in bound} == {"_bind", "levels", "plain", "_find_windows"}


def test_running_statistics_are_computed_without_autograd(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    recorded: dict[str, set[bool]] = {}
    evaluated = scalars.evaluated

    def seen(graph, node_id, values, device):
        found = evaluated(graph, node_id, values, device)
        recorded.setdefault(graph[node_id].op, set()).add(found.requires_grad)
        return found

    monkeypatch.setattr(scalars, "evaluated", seen)
    engine = gg.compile(model, F.mse_loss)
    engine.in_tiles = True
    engine.backward(torch.rand(1, 3, 12, 12), torch.rand(1, 4, 10, 10))
    assert recorded["gigagrad.running_mean"] == recorded["gigagrad.running_variance"] == {False}
    assert recorded["gigagrad.mean_and_scale"] == {True}


class PartlyInFull(nn.Module):
    """Computes its last layer without autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, image):
        found = self.first(image)
        with torch.autocast("cpu", enabled=False):
            return self.last(torch.relu(found.float()))


def test_the_caller_s_autocast_ends_where_the_model_ends_it():
    """Tiles ran under the caller's once more, so that all of the model was cast."""
    torch.manual_seed(0)
    net, image = PartlyInFull(), torch.rand(3, 24, 24)
    engine = gg.compile(net, tile=(10, 10))
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(image[None]).detach()
        found = engine.forward(image)
        for _ in engine.stream(image):
            assert torch.is_autocast_enabled("cpu"), "what is done with a piece is the caller's"
        with engine.at(image) as predicted:
            read = torch.from_numpy(predicted.read(Box.whole(24, 24)))
        loss = gg.compile(net, lambda output, target: output.mean(), tile=(10, 10)).backward(image, torch.zeros(1))
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(read, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, expected.mean(), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(expected.mean(), net(image[None]).mean(), rtol=1e-6, atol=1e-7)
