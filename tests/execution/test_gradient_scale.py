"""Gradients in float16: what its range alone would lose, or make infinite."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.events import Notice
from gigagrad.execution import gradient_scale
from gigagrad.execution.gradient_scale import CotangentOverflow, GradientScale
from gigagrad.graphs import InputSpec, capture

SIDE = 1024  # 2^20 pixels: the cotangent of one in a mean is below the normal numbers of float16


def local():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


def normed():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1),
    )  # fmt: skip


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


def binned():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(36, 3))


class Turned(nn.Module):
    """With an operator that has no tile rule."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.Conv2d(6, 1, 1)

    def forward(self, x):
        return F.interpolate(self.last(torch.rot90(self.first(x), 2, (2, 3))), scale_factor=4)


def mean(output, target):
    return F.binary_cross_entropy_with_logits(output, target)


def total(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum")


def dice(output, target):
    p = output.float().sigmoid()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def class_loss(output, target):
    return F.cross_entropy(output, target)


def in_half(output, target):
    return (output * target.half()).mean()


CASES = {
    "a mean": (local, mean),
    "a sum, which overflows": (local, total),
    "norms": (normed, mean),
    "dice": (normed, dice),
    "a pooled vector": (pooled, class_loss),
    "bins": (binned, class_loss),
    "whole fields": (Turned, mean),
    "a loss in float16": (local, in_half),
}


def gradients(make, loss, precision, side=SIDE, **settings):
    torch.manual_seed(3)
    net, image = make(), torch.rand(3, side, side, requires_grad=True)
    target = torch.tensor([1]) if loss is class_loss else (torch.rand(1, side, side) > 0.4).float()
    engine = gg.compile(net, loss, precision=precision, tile=(256, 512), **settings)
    heard: list[Any] = []
    engine.events.subscribe(heard.append)
    value = engine.backward(image, target)
    notices = [event.text for event in heard if isinstance(event, Notice)]
    return value, [*(p.grad for p in net.parameters()), image.grad], notices, engine


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_what_float16_arithmetic_gives(name):
    value, found, notices, _ = gradients(*CASES[name], "float16")
    expected_value, expected, _, _ = gradients(*CASES[name], "float32")
    assert value.item() == pytest.approx(expected_value.item(), rel=2e-2)
    assert not notices
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() <= 0.1 * exact.norm()  # without a scale of their own: 1 to infinity


def test_an_overflow_begins_the_step_anew_and_is_remembered(monkeypatch):
    monkeypatch.setattr(gradient_scale, "_LARGEST", 2.0**14)
    monkeypatch.setattr(gradient_scale, "_LARGEST_SUM", 2.0**40)
    value, found, notices, engine = gradients(local, mean, "float16", side=128)
    monkeypatch.undo()
    _, expected, _, _ = gradients(local, mean, "float16", side=128)
    assert notices == ["a gradient left the range of float16; the step begins anew, with smaller cotangents inside"]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
    for p in engine.model.parameters():
        p.grad = None
    monkeypatch.setattr(gradient_scale, "_LARGEST", 2.0**14)
    monkeypatch.setattr(gradient_scale, "_LARGEST_SUM", 2.0**40)
    torch.manual_seed(3)
    local()
    image = torch.rand(3, 128, 128, requires_grad=True)
    assert engine.backward(image, (torch.rand(1, 128, 128) > 0.4).float()) == value
    assert len(notices) == 1


def step(engine, image):
    """The bits of the gradients of one step, which moves the weights by them."""
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    engine.backward(image, torch.ones(1, *image.shape[1:]))
    optimizer.step()
    return [p.grad.clone() for p in engine.model.parameters()]


def same_bits(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def bright_and_dim(side=256):
    """Of two images, the first of which makes gradients of `local` overflow."""
    torch.manual_seed(0)
    image = torch.rand(3, side, side)
    return 255 * image, image


def test_a_run_that_goes_on_from_a_checkpoint_has_the_unit_of_one_that_was_never_stopped():
    torch.manual_seed(3)
    undisturbed, (bright, dim) = gg.compile(local(), mean, precision="float16", tile=(256, 256)), bright_and_dim()
    step(undisturbed, bright)
    state = undisturbed.state_dict()
    earlier = {name: value for name, value in state.items() if name != "overflows"}  # of a version without it
    stopped, as_earlier = (gg.compile(copy.deepcopy(undisturbed.model), mean, precision="float16") for _ in range(2))
    stopped.load_state_dict(state)
    as_earlier.load_state_dict(earlier)
    assert (undisturbed.overflows, stopped.overflows, as_earlier.overflows) == (1, 1, 0)
    expected = step(undisturbed, dim)
    assert same_bits(step(stopped, dim), expected)
    assert not same_bits(step(as_earlier, dim), expected)  # the scale shows in the bits


def test_a_step_that_begins_anew_draws_what_it_drew():
    torch.manual_seed(3)
    net, (bright, _) = nn.Sequential(nn.Dropout2d(), nn.Dropout(), *local()).train(), bright_and_dim()
    found = []
    for overflows in (0, 1):
        engine = gg.compile(copy.deepcopy(net), mean, precision="float16", tile=(256, 256))
        engine.overflows = overflows
        torch.manual_seed(5)
        found.append([*step(engine, bright), torch.rand(())])
        assert engine.overflows == 1
    assert same_bits(*found)


def test_a_gradient_that_is_infinite_anyway_is_delivered():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1, bias=False)

        def forward(self, x):
            return self.conv(x).sqrt()

    net = Root()
    gg.compile(net, lambda output, target: output.mean(), precision="float16", tile=(8, 8)).backward(
        torch.zeros(1, 16, 16), torch.zeros(1, 16, 16)
    )
    assert not net.conv.weight.grad.isfinite().any()


def scale_for(precision, overflows=0):
    given = torch.float64 if precision == torch.float64 else torch.float32
    image, target = (InputSpec((1, n, 16, 16), given, field=True) for n in (3, 1))
    return GradientScale(capture(local(), mean, image, target, precision), overflows)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_elsewhere_not_one_bit_changes(precision):
    scale = scale_for(precision)
    cotangents = [torch.tensor([1e-30])]
    scale.settle(cotangents, pixels=2**30)
    assert scale.within(cotangents) == scale.times == 1
    scale.check([torch.tensor([torch.inf])])
    assert scale.out_of(cotangents[0]) is cotangents[0]


def test_the_unit_is_a_power_of_two_and_settled_once():
    scale = scale_for(torch.float16)
    scale.settle([torch.zeros(3), torch.tensor([torch.nan, torch.inf])])
    assert scale.times == 1
    scale.settle([torch.tensor([3e-9, -1e-9])], pixels=2**20)
    assert scale.times == 2.0 ** int(torch.tensor(2.0**-6 / 3e-9).log2())
    scale.settle([torch.tensor([1.0])])
    assert scale.times > 1
    with pytest.raises(CotangentOverflow):
        scale.check([torch.ones(3), torch.tensor([torch.nan])])
    scale_for(torch.float16, gradient_scale.MOST_OVERFLOWS).check([torch.tensor([torch.nan])])


def test_what_it_says_about_plain_autograd():
    """The zeros that a mean's gradients are there, and that ours are not."""
    net = local()
    reference = copy.deepcopy(net)
    image, target = torch.rand(3, 64, 64), torch.full((1, 64, 64), 0.5)
    weak = lambda output, target: 2.0**-30 * F.mse_loss(output.float(), target)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.float16):
        weak(reference(image[None]), target[None]).backward()
    gg.compile(net, weak, precision="float16", tile=(32, 32)).backward(image, target)
    assert all(not p.grad.any() for p in reference.parameters())
    assert all(p.grad.any() for p in net.parameters())
