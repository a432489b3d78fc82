"""What fits as it is: PyTorch runs the caller's model and loss on the whole image, bit for bit as without us."""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.devices.cpu import Cpu
from gigagrad.devices.heap import LargeBlocks
from gigagrad.errors import BudgetError
from gigagrad.events import Event, Notice, StepMeasured, TileDone
from gigagrad.execution.drawn import DrawnAsInTiles, NotAtOnce
from gigagrad.execution.whole import WholeRun, restoring
from gigagrad.graphs import InputSpec, capture
from gigagrad.plans import Problem
from gigagrad.plans.whole import whole_plan
from tests.devices.fake import FakeCpu


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def normed() -> nn.Sequential:
    return nn.Sequential(conv(2, 5), nn.BatchNorm2d(5), nn.ReLU(inplace=True), conv(5, 1))


def first(model: nn.Sequential) -> nn.Conv2d:
    layer = model[0]
    assert isinstance(layer, nn.Conv2d)
    return layer


class Counting(nn.Module):
    """Counts its calls, keeps what it computed and writes a buffer of its own."""

    largest: torch.Tensor

    def __init__(self):
        super().__init__()
        self.conv, self.calls = conv(2, 1), 0
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.kept = self.conv(x)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, self.kept.detach().abs().amax()))
        return self.kept


def pair(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 21, 34, dtype=dtype), torch.rand(1, 21, 34, dtype=dtype)


def steps_of(model, loss, image, target, **settings):
    """The engine's plan; asserts that two steps of it and of plain PyTorch are the same in every bit."""
    plain = copy.deepcopy(model)
    engine = gg.compile(model, loss, progress=False, **settings)
    for _ in range(2):
        value = engine.backward(image, target)
        expected = loss(plain(image[None]), target if target.ndim == 1 else target[None])
        expected.backward()
        assert torch.equal(value, expected.detach())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    return engine.plan(image, target)


@pytest.mark.parametrize("make", [normed, Counting, lambda: nn.Sequential(normed().requires_grad_(False), conv(1, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_plain_pytorchs(make, dtype):
    model = make().to(dtype)
    plan = steps_of(model, F.mse_loss, *pair(dtype))
    assert plan.whole == "forward and backward"
    assert (plan.segments, plan.passes, plan.kept, plan.tile_count) == ((), (), (), 1)
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert "the whole image at once" in str(plan)


def test_labels_and_loss_modules():
    model = nn.Sequential(conv(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert steps_of(model, nn.CrossEntropyLoss(label_smoothing=0.1), pair()[0], torch.tensor([2])).whole


def test_class_ids_as_masks_have_them():
    model, (image, _) = conv(2, 3), pair()
    mask = torch.randint(0, 3, (1, 21, 34), dtype=torch.uint8)
    value = gg.compile(model, F.cross_entropy).backward(image, mask)
    assert torch.equal(value, F.cross_entropy(model(image[None]), mask.long()).detach())


def test_state_that_forward_leaves_is_the_models_own():
    model, (image, target) = Counting(), pair()
    engine = gg.compile(model, F.mse_loss)
    for _ in range(3):
        engine.backward(image, target)
    assert model.calls == 3
    assert torch.equal(model.kept, model.conv(image[None]))


class Growing(nn.Module):
    """Has one more layer from its third call on."""

    def __init__(self):
        super().__init__()
        self.conv, self.later, self.calls = conv(2, 1), conv(1, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x) if self.calls < 3 else self.later(self.conv(x))


@pytest.mark.parametrize("with_hook", [False, True])
def test_layers_that_a_later_call_adds_get_gradients(with_hook):
    model, (image, target) = Growing(), pair()
    if with_hook:  # autograd then returns gradients, and does not fill `.grad`
        model.conv.weight.register_post_accumulate_grad_hook(lambda weight: None)
    plain, engine = copy.deepcopy(model), gg.compile(model, F.mse_loss, progress=False)
    for _ in range(4):
        engine.backward(image, target)
        F.mse_loss(plain(image[None]), target[None]).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(*(torch.zeros(0) if each.grad is None else each.grad for each in (mine, theirs)))


def test_images_and_labels_get_gradients():
    model, (image, target) = conv(2, 1), pair()
    image.requires_grad_()
    target.requires_grad_()
    gg.compile(model, F.mse_loss).backward(image, target)
    found = image.grad.clone(), target.grad.clone()
    image.grad = target.grad = None
    F.mse_loss(model(image[None]), target[None]).backward()
    assert torch.equal(found[0], image.grad)
    assert torch.equal(found[1], target.grad)


def test_hooks_run_once():
    model, (image, target) = normed(), pair()
    seen = list[str]()

    def twice(gradient):
        seen.append("hook")
        return gradient * 2

    first(model).weight.register_hook(twice)
    first(model).weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    plain = copy.deepcopy(model)
    first(plain).weight.register_hook(lambda gradient: gradient * 2)
    gg.compile(model, F.mse_loss).backward(image, target)
    F.mse_loss(plain(image[None]), target[None]).backward()
    assert seen == ["hook", "accumulated"]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


class Dropping(nn.Module):
    """Drops values, channels, whole residuals and values of a pooled vector; draws by `other`, too, where it is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = conv(2, 6), nn.Linear(6, 3), None

    def forward(self, x):
        y = self.body(x)
        y = y + F.dropout(2 * y, 0.3, self.training, inplace=True)
        y = y + F.dropout(y, 0.4, self.training)
        y = y + F.dropout2d(y, 0.5, self.training)
        if self.training:
            y = y + y * y.new_empty(1, 1, 1, 1).bernoulli_(0.8).div_(0.8)
            y = y * torch.rand(y.shape[0], 1, 1, 1, dtype=y.dtype, device=y.device).add_(0.8).floor_()
        if self.other is not None:
            y = y * self.other(y)
        return self.head(F.dropout(y.mean((2, 3)), 0.2, self.training))


def steps_by(model, *, in_tiles=False, count=3):
    """The plan, losses and gradients of some steps."""
    engine = gg.compile(model, F.cross_entropy, seed=7, progress=False)
    engine.in_tiles = in_tiles
    told = []
    engine.events.subscribe(lambda event: told.append(str(event)) if isinstance(event, Notice) else None)
    image, target, found = pair()[0], torch.tensor([2]), []
    whole = engine.plan(image, target).whole
    for _ in range(count):
        model.zero_grad()
        found.append(engine.backward(image, target))
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return whole, found, told


def test_random_numbers_are_those_of_every_plan():
    whole, found, _ = steps_by(Dropping())
    tiled, expected, _ = steps_by(Dropping(), in_tiles=True)
    assert whole
    assert not tiled
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=1e-6)
    assert not torch.equal(found[0], found[len(found) // 3]), "every step draws anew"
    assert gg.compile(Dropping().eval(), F.cross_entropy, seed=7).plan(pair()[0], torch.tensor([2])).whole


@pytest.mark.parametrize("other", [lambda y: torch.empty_like(y).exponential_(), lambda y: F.rrelu(y, training=True)])
def test_what_tiles_alone_can_draw_is_computed_in_tiles(other):
    model = Dropping()
    model.other = other
    assert not steps_by(model, count=1)[0]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_draws_in_compiled_code_is_computed_in_tiles():
    model = Dropping()
    model.head = cast("nn.Linear", torch.compile(model.head))
    engine = gg.compile(model, F.cross_entropy, seed=7)
    assert engine.plan(pair()[0], torch.tensor([2])).whole is None


def test_calls_that_are_not_those_of_the_plan_make_tiles(monkeypatch):
    monkeypatch.setattr(DrawnAsInTiles, "finish", _missed)
    whole, found, told = steps_by(Dropping(), count=2)
    assert whole
    assert ["draws random numbers otherwise" in text for text in told] == [True]
    for one, two in zip(found, steps_by(Dropping(), in_tiles=True, count=2)[1], strict=True):
        assert torch.equal(one, two)


def _missed(self):
    raise NotAtOnce("the model draws random numbers otherwise")


def test_bfloat16_is_autocasts():
    model, (image, target) = normed(), pair()
    plain = copy.deepcopy(model)
    engine = gg.compile(model, lambda o, t: F.mse_loss(o.float(), t), precision="bfloat16")
    value = engine.backward(image, target)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.mse_loss(plain(image[None]).float(), target[None])
    assert engine.plan(image, target).whole
    assert torch.equal(value, expected.detach())


def test_values_without_a_loss():
    class Two(nn.Module):
        def forward(self, x):
            return {"mean": x.mean((2, 3)), "largest": (x.amax((2, 3)),)}

    image, _ = pair()
    found = gg.compile(Two()).forward(image)
    assert torch.equal(found["mean"], image[None].mean((2, 3)))
    assert torch.equal(found["largest"][0], image[None].amax((2, 3)))


def test_what_does_not_fit_is_computed_in_tiles():
    model = nn.Sequential(conv(2, 32), nn.ReLU(), conv(32, 32), nn.ReLU(), conv(32, 1))
    image, target = torch.rand(2, 512, 512), torch.rand(1, 512, 512)
    roomy = gg.compile(model, F.mse_loss, device=FakeCpu()).plan(image, target)
    most = sum(amount.size_bytes for amount in roomy.fixed if "activations" in amount.name)
    room = roomy.predicted_peak_bytes - most // 2 - most // 4
    tight = gg.compile(model, F.mse_loss, memory=room, device=FakeCpu())
    assert roomy.whole
    assert tight.plan(image, target).whole is None
    with pytest.raises(BudgetError):
        gg.compile(model, F.mse_loss, memory="100 MiB").plan(image, target)


def test_a_copy_of_an_engine_repeats_the_choice():
    model, (image, target) = normed(), pair()
    first = gg.compile(model, F.mse_loss)
    first.backward(image, target)
    assert copy.copy(first).plan(image, target).whole
    tiled = gg.compile(model, F.mse_loss)
    tiled.in_tiles = True
    assert tiled.plan(image, target).whole is None


def test_an_error_leaves_gradients_alone():
    model, (image, target) = normed(), pair()
    gg.compile(model, F.mse_loss).backward(image, target)
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fails = [False]

    def fail(gradient):
        if fails[0]:
            raise RuntimeError("no gradient today")

    first(model).weight.register_hook(fail)
    engine = gg.compile(model, F.mse_loss)
    fails[0] = True
    with pytest.raises(RuntimeError, match="no gradient today"):
        engine.backward(image, target)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("filled", [False, True])
def test_an_error_behind_the_last_gradient_leaves_gradients_alone(filled):
    """A listener that raises, or Ctrl-C: the step did not end."""
    model, (image, target) = normed(), pair()
    engine = gg.compile(model, F.mse_loss)
    if filled:
        engine.backward(image, target)
    before = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]

    def stop(event):
        if isinstance(event, StepMeasured):
            raise KeyboardInterrupt

    engine.events.subscribe(stop)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(image, target)
    after = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_hooks_are_called_once_each(in_tiles, filled):
    model, (image, target) = normed(), pair()
    image.requires_grad_()
    engine = gg.compile(model, F.mse_loss)
    engine.in_tiles = in_tiles
    if filled:
        engine.backward(image, target)
    called = []
    image.register_hook(lambda gradient: called.append("image"))
    first(model).weight.register_hook(lambda gradient: called.append("weight"))
    first(model).weight.register_post_accumulate_grad_hook(lambda weight: called.append("filled"))
    engine.backward(image, target)
    assert sorted(called) == ["filled", "image", "weight"]


def test_what_takes_more_than_predicted_is_computed_in_tiles(monkeypatch):
    """As where a GPU's kernels need more workspace."""
    monkeypatch.setattr(Cpu, "is_host", False)
    model, (image, target) = normed().double(), pair(torch.float64)
    plain, heard = copy.deepcopy(model), list[Event]()
    expected = F.mse_loss(plain(image[None]), target[None])
    expected.backward()
    compute = WholeRun._compute

    def short(run):
        compute(run)
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    monkeypatch.setattr(WholeRun, "_compute", short)
    engine = gg.compile(model, F.mse_loss)
    engine.events.subscribe(heard.append)
    torch.testing.assert_close(engine.backward(image, target), expected.detach(), rtol=1e-12, atol=0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-12, atol=0)
    assert engine.in_tiles
    assert ["more memory than was predicted" in event.text for event in heard if isinstance(event, Notice)] == [True]


WRITTEN = [
    torch.tensor([float("nan"), -0.0, float("inf"), 1.5]),
    torch.arange(6.0).reshape(2, 3).T,
    torch.zeros(0, 3),
    nn.Parameter(torch.tensor(2.5)),
    torch.tensor(2**53 + 1),
    torch.tensor([True, False]),
    torch.zeros(0, dtype=torch.bool),
    torch.tensor([1 - 2j]).conj(),
    torch.tensor([255, 0], dtype=torch.uint8),
]


@pytest.mark.parametrize("written", [WRITTEN, *([one] for one in WRITTEN), []])
def test_what_was_written_is_as_before(written):
    tensors = [one.detach().clone().requires_grad_(one.requires_grad) for one in written]
    expected = [one.detach().resolve_conj().contiguous().numpy().tobytes() for one in tensors]
    restore = restoring(tensors)
    with torch.no_grad():
        for one in tensors:
            one.fill_(1)
    restore()
    assert [one.detach().resolve_conj().contiguous().numpy().tobytes() for one in tensors] == expected
    assert [one.requires_grad for one in tensors] == [one.requires_grad for one in written]


def last_channels(pixels):
    return pixels[None].to(memory_format=torch.channels_last)


def pixels_of(image):
    pixels = image.view(Box.whole(image.height, image.width))
    return (torch.from_numpy(pixels.copy()) if isinstance(pixels, np.ndarray) else pixels.clone())[None]


@pytest.mark.parametrize(
    "make", [torch.clone, last_channels, torch.Tensor.numpy, lambda t: t.numpy()[:, ::-1], gg.open_image]
)
def test_a_device_of_its_own_gets_an_image_of_its_own(make, monkeypatch):
    """Made in one copy, of the caller's own memory."""
    monkeypatch.setattr(Cpu, "is_host", False)
    model, (pixels, target), given, reads = normed(), pair(), list[torch.Tensor](), list[object]()
    model.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    image = make(pixels)
    opened = gg.open_image(image[0] if make is last_channels else image)
    monkeypatch.setattr(type(opened), "_read_inside", lambda *box: reads.append(box))
    seen = pixels_of(opened)
    plain = copy.deepcopy(model)
    engine = gg.compile(model, F.mse_loss)
    assert engine.plan(image, target).whole
    given.clear()
    value = engine.backward(image, target)
    assert torch.equal(given[0], seen)
    given[0].zero_()
    assert torch.equal(pixels_of(opened), seen)
    assert not reads
    torch.testing.assert_close(value, F.mse_loss(plain(seen), target[None]).detach())


def test_a_step_inside_inference_mode_still_learns():
    model, (image, target) = normed(), pair()
    with torch.inference_mode():
        gg.compile(model, F.mse_loss).backward(image, target)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_listeners_hear_of_one_tile():
    heard = list[Event]()
    engine = gg.compile(normed(), F.mse_loss)
    engine.events.subscribe(heard.append)
    engine.backward(*pair())
    assert [event for event in heard if isinstance(event, TileDone)] == [TileDone("whole image", 1, 1, 0.0)]
    assert not [event for event in heard if isinstance(event, Notice)]


def test_what_a_step_freed_serves_the_next_where_there_is_room(no_other_runs):
    engine, image, target = gg.compile(normed(), F.mse_loss), torch.rand(1, 2, 64, 64), torch.rand(1, 1, 64, 64)
    plan = engine.plan(image, target)
    (step,) = plan.steps
    assert step.keeps
    engine.backward(image, target)
    assert LargeBlocks.are_kept()
    tiled = gg.compile(normed(), F.mse_loss, tile=(32, 32))
    tiled.plan(image, target)
    assert not LargeBlocks.are_kept()
    tiled.backward(image, target)
    assert LargeBlocks.are_kept()
    tiled.forward(image)
    assert not LargeBlocks.are_kept()


def test_nothing_is_kept_behind_a_step_in_tiles_that_fails(no_other_runs):
    image, target = torch.rand(1, 2, 64, 64), torch.rand(1, 1, 64, 64)
    tiled = gg.compile(normed(), F.mse_loss, tile=(32, 32))

    def fail(event: Event) -> None:
        if isinstance(event, TileDone):
            raise ValueError("no")

    tiled.events.subscribe(fail)
    with pytest.raises(ValueError, match="no"):
        tiled.backward(image, target)
    assert not LargeBlocks.are_kept()


def test_nothing_is_kept_where_a_budget_has_no_room_beside_it():
    image, target = (InputSpec((1, n, 64, 64), torch.float32, field=True) for n in (2, 1))
    graph = capture(normed(), F.mse_loss, image, target)
    problem = Problem(graph=graph, backward=True, whole=graph.whole[True], device="cpu")
    least = whole_plan(problem, "contiguous").predicted_peak_bytes
    for beside, keeps in ((0, False), (graph.whole[True].peak_bytes, True)):
        (step,) = whole_plan(dataclasses.replace(problem, budget_bytes=least + beside), "contiguous").steps
        assert step.keeps is keeps
