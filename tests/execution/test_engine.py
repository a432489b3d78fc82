"""What `compile` promises: exactness, what `.grad` means, what is noticed, what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import (
    BudgetError,
    CaptureError,
    ConfigError,
    ImageError,
    ModelError,
    TargetError,
    UnsupportedOperatorError,
)
from gigagrad.events import StepMeasured, TileDone
from gigagrad.images import Image, open_image

TILE = (5, 8)


@pytest.fixture
def engine(net, bce):
    return gg.compile(net, bce, tile=TILE)


# Loss and gradients


def test_loss_and_gradients_are_exact(engine, net, bce, pair, whole, assert_exact):
    value, expected = whole(net, bce, pair.image, pair.target[None])
    result = engine.backward(pair.image, pair.target)
    assert result.shape == ()
    assert not result.requires_grad
    torch.testing.assert_close(result, value, rtol=1e-12, atol=0)
    assert_exact(net, expected)


def test_gradients_are_added_to_those_there(engine, net, bce, pair, whole, assert_exact):
    _, expected = whole(net, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    kept = {name: p.grad for name, p in net.named_parameters()}
    engine.backward(pair.image, pair.target)
    assert_exact(net, {name: 2 * g for name, g in expected.items()})
    assert all(p.grad is kept[name] for name, p in net.named_parameters())


def test_the_same_plan_twice_gives_the_same_bits(engine, net, pair):
    def step():
        net.zero_grad()
        value = engine.backward(pair.image, pair.target)
        return [value, *(p.grad.clone() for p in net.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))
    other = gg.compile(net, engine.loss, tile=TILE)
    first = step()
    net.zero_grad()
    assert torch.equal(other.backward(pair.image, pair.target), first[0])
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), first[1:], strict=True))


@pytest.mark.parametrize("tile", [(1, 1), (2, 31), (23, 3), (7, 7), (23, 31), (100, 100), None])
@pytest.mark.parametrize("which", ["net", "gate"])
def test_every_tile_shape_agrees(request, which, tile, bce, pair, whole, assert_exact):
    model = request.getfixturevalue(which)
    value, expected = whole(model, bce, pair.image, pair.target[None])
    result = gg.compile(model, bce, tile=tile).backward(pair.image, pair.target)
    torch.testing.assert_close(result, value, rtol=1e-12, atol=0)
    assert_exact(model, expected)


def test_frozen_parameters_get_no_gradient(net, bce, pair, whole, assert_exact):
    net.inner.requires_grad_(False)
    _, expected = whole(net, bce, pair.image, pair.target[None])
    gg.compile(net, bce, tile=TILE).backward(pair.image, pair.target)
    assert "inner.weight" not in expected
    assert_exact(net, expected)


def test_a_frozen_network_has_a_loss_and_no_gradients(net, bce, pair):
    net.requires_grad_(False)
    value = gg.compile(net, bce, tile=TILE).backward(pair.image, pair.target)
    assert value.item() == pytest.approx(bce(net(pair.image[None]), pair.target[None]).item(), rel=1e-12)
    assert all(p.grad is None for p in net.parameters())


def test_parameters_nothing_depends_on_get_no_gradient(net, bce, pair):
    net.unused = nn.Linear(3, 3)
    net.stopped = nn.Parameter(torch.ones((), dtype=torch.float64))

    class Composite(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) * self.net.stopped.detach()

    gg.compile(Composite(), bce, tile=TILE).backward(pair.image, pair.target)
    assert net.unused.weight.grad is None
    assert net.stopped.grad is None
    assert net.inner.weight.grad is not None


def test_tied_weights_gather_both_gradients(bce, pair, whole, assert_exact):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
    ).double()
    model[2].weight = model[0].weight
    _, expected = whole(model, bce, pair.image, pair.target[None])
    gg.compile(model, bce, tile=TILE).backward(pair.image, pair.target)
    assert_exact(model, expected)


def test_modules_in_the_loss_have_buffers_and_parameters(net, pair):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([2.0], dtype=torch.float64))
            self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, o, t):
            return F.binary_cross_entropy_with_logits(o / self.temperature, t, pos_weight=self.weight)

    loss = Loss()
    expected = torch.autograd.grad(loss(net(pair.image[None]), pair.target[None]), loss.temperature)[0]
    engine = gg.compile(net, loss, tile=TILE)
    engine.backward(pair.image, pair.target)
    torch.testing.assert_close(loss.temperature.grad, expected, rtol=1e-11, atol=1e-13)
    loss.weight.fill_(5)
    value = engine.forward(pair.image, pair.target)
    assert value.item() == pytest.approx(loss(net(pair.image[None]), pair.target[None]).item(), rel=1e-12)


def test_closures_over_tensors_are_read_as_they_are(net, pair):
    factor = torch.tensor(2.0, dtype=torch.float64)
    engine = gg.compile(net, lambda o, t: factor * F.mse_loss(o, t), tile=TILE)
    first = engine.forward(pair.image, pair.target).item()
    factor.fill_(6)
    assert engine.forward(pair.image, pair.target).item() == pytest.approx(3 * first, rel=1e-12)


# Images and targets


def test_images_of_every_kind_give_the_same(engine, pair):
    zarr = pytest.importorskip("zarr")
    image, target = pair.image, pair.target
    expected = engine.forward(image, target)
    forms = [
        (image.numpy(), target.numpy()),
        (image[None], target[None]),
        (image, target[0]),
        (image.numpy()[:, ::-1][:, ::-1], target[0].numpy()),
        (open_image(image), open_image(target.numpy())),
        (zarr.array(image.numpy()), zarr.array(target.numpy())),
    ]
    for form in forms:
        assert torch.equal(engine.forward(*form), expected)


def test_an_open_image_is_left_open_and_a_path_is_closed(net, bce, jpeg_slide):
    class Grey(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3)

        def forward(self, x):
            return self.conv(x / 255)

    engine = gg.compile(Grey(), lambda o, t: o.mean() * t.mean(), tile=(200, 300))
    with open_image(jpeg_slide) as image:
        first = engine.backward(image, 1.0)
        image.read(Box(0, 0, 1, 1))
        assert engine.backward(str(jpeg_slide), 1.0).item() == first.item()
        image.read(Box(0, 0, 1, 1))


@pytest.mark.parametrize("target", [torch.tensor([2]), 2, np.array([2])], ids=["tensor", "number", "array"])
def test_labels(target, pair):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    expected = F.cross_entropy(model(pair.image[None]), torch.tensor([2]))
    value = gg.compile(model, F.cross_entropy, tile=(3, 4)).backward(pair.image, target)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_two_dimensional_target_is_a_mask_or_a_label(net, pair):
    mask = (pair.target[0] > 0.5).to(torch.uint8)
    dense = gg.compile(net, lambda o, t: F.mse_loss(o, t.to(o.dtype)), tile=TILE)
    expected = F.mse_loss(net(pair.image[None]), mask[None, None].double())
    assert dense.forward(pair.image, mask).item() == pytest.approx(expected.item(), rel=1e-12)
    soft = torch.rand(1, 1, dtype=torch.float64)
    pooled = gg.compile(net, lambda o, t: F.mse_loss(o.mean((2, 3)), t), tile=TILE)
    expected = F.mse_loss(net(pair.image[None]).mean((2, 3)), soft)
    assert pooled.forward(pair.image, soft).item() == pytest.approx(expected.item(), rel=1e-12)


def test_uint8_images_reach_the_model_as_bytes(pair):
    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3, padding=1).double()

        def forward(self, x):
            assert x.dtype == torch.uint8
            return self.conv(x.double() / 255)

    image = torch.randint(0, 256, (3, 20, 17), dtype=torch.uint8)
    engine = gg.compile(Bytes(), lambda o, t: F.mse_loss(o, t.double()), tile=(6, 6))
    mask = torch.randint(0, 2, (1, 20, 17), dtype=torch.uint8)
    expected = F.mse_loss(engine.model(image[None]), mask[None].double()).item()
    assert engine.backward(image, mask).item() == pytest.approx(expected, rel=1e-12)


class Faulty(Image):
    """Zeros, until a box beyond a row is asked for."""

    def __init__(self, last_row: int) -> None:
        super().__init__(shape=(2, 23, 31), dtype=np.dtype(np.float64), name="faulty")
        self._last_row = last_row

    def _read_inside(self, box):
        if box.y1 > self._last_row:
            raise ImageError("faulty: tile 7 is corrupt")
        return np.zeros((2, *box.shape))


def test_an_error_in_the_middle_leaves_gradients_alone(engine, net, pair):
    engine.backward(pair.image, pair.target)
    before = copy.deepcopy({name: p.grad for name, p in net.named_parameters()})
    seen = []
    engine.events.subscribe(seen.append)
    with pytest.raises(ImageError, match="tile 7 is corrupt"):
        engine.backward(Faulty(20), pair.target)
    assert any(isinstance(event, TileDone) for event in seen), "the error must come in the middle"
    assert not any(isinstance(event, StepMeasured) for event in seen)
    assert all(torch.equal(p.grad, before[name]) for name, p in net.named_parameters())
    first = {name: g.clone() for name, g in before.items()}
    engine.backward(pair.image, pair.target)
    assert all(torch.equal(p.grad, 2 * first[name]) for name, p in net.named_parameters())


# Prediction


def test_forward_without_a_loss_is_the_models_output(net, gate, pair):
    for model in (net, gate):
        with torch.no_grad():
            expected = model(pair.image[None])
        torch.testing.assert_close(gg.compile(model, tile=TILE).forward(pair.image), expected, rtol=1e-12, atol=1e-13)


def test_a_pooled_output_is_a_small_tensor(pair):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    engine = gg.compile(model, tile=(4, 4))
    torch.testing.assert_close(engine.forward(pair.image), model(pair.image[None]).detach(), rtol=1e-12, atol=1e-13)
    with pytest.raises(ConfigError, match="output is an image"):
        engine.forward(pair.image, out="never.tif")
    with pytest.raises(ConfigError, match="output is an image"):
        next(engine.stream(pair.image))


@pytest.mark.parametrize("scale", [1, 2])
def test_the_stream_covers_the_output_in_rows(net, pair, scale):
    model = nn.Sequential(net, nn.Upsample(scale_factor=scale)).double()
    with torch.no_grad():
        expected = model(pair.image[None])
    pieces = list(gg.compile(model, tile=TILE).stream(pair.image))
    boxes = [box for box, _ in pieces]
    assert boxes == sorted(boxes)
    assert len({(box.y0, box.height) for box in boxes}) == len({box.y0 for box in boxes})
    covered = torch.zeros(expected.shape[-2:])
    for box, crop in pieces:
        assert crop.shape == (1, 1, *box.shape)
        covered[box.y0 : box.y1, box.x0 : box.x1] += 1
        torch.testing.assert_close(crop, expected[..., box.y0 : box.y1, box.x0 : box.x1], rtol=1e-12, atol=1e-13)
    assert (covered == 1).all()


def test_a_stream_may_be_left_early(net, pair):
    engine = gg.compile(net, tile=TILE)
    stream = engine.stream(pair.image)
    next(stream)
    stream.close()
    assert engine.last_run is None
    engine.forward(pair.image)
    assert engine.last_run is not None


def test_a_prediction_is_written_as_a_file(net, pair, tmp_path):
    path = tmp_path / "prediction.tif"
    assert gg.compile(net, tile=TILE).forward(pair.image, out=path) == path
    with torch.no_grad():
        expected = net(pair.image[None])[0].float().numpy()
    with open_image(path) as written:
        assert written.shape == (1, 23, 31)
        assert written.dtype == np.float32
        np.testing.assert_allclose(written.read(Box.whole(23, 31)), expected, rtol=1e-6, atol=1e-6)


def test_an_error_while_writing_leaves_no_file(net, tmp_path):
    with pytest.raises(ImageError, match="corrupt"):
        gg.compile(net, tile=TILE).forward(Faulty(10), out=tmp_path / "prediction.tif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "move", [lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, 0]], ids=["channels last", "no channels"]
)
def test_an_output_of_another_layout_is_refused(net, pair, move, tmp_path):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return move(self.net(x))

    engine = gg.compile(Moved(), tile=TILE)
    for call in (
        engine.forward,
        lambda image: next(engine.stream(image)),
        lambda image: engine.forward(image, out=tmp_path / "x.tif"),
    ):
        with pytest.raises(ModelError, match=r"\(N, C, H, W\)"):
            call(pair.image)


# What is noticed


def test_new_values_are_simply_used(engine, net, bce, pair, whole, assert_exact):
    engine.backward(pair.image, pair.target)
    for p in net.parameters():
        p.data.mul_(0.5)
    net.zero_grad()
    _, expected = whole(net, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    assert_exact(net, expected)
    assert len(engine._planner._kept) == 1


def test_a_changed_requires_grad_is_noticed(engine, net, pair):
    engine.backward(pair.image, pair.target)
    net.zero_grad()
    net.down.requires_grad_(False)
    engine.backward(pair.image, pair.target)
    assert net.down.weight.grad is None
    assert net.up.weight.grad is not None


def test_a_changed_mode_is_noticed(pair, bce):
    model = nn.Sequential(nn.Conv2d(2, 1, 1), nn.BatchNorm2d(1)).double().eval()
    engine = gg.compile(model, bce, tile=TILE)
    engine.backward(pair.image, pair.target)
    model.train()
    with pytest.raises(UnsupportedOperatorError, match=r"model\.eval\(\)"):
        engine.backward(pair.image, pair.target)
    model.eval()
    engine.backward(pair.image, pair.target)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.inner, "padding", (0, 0)) or setattr(net, "head", nn.Conv2d(3, 1, 3, padding=1)),
        lambda net: setattr(net, "head", nn.Conv2d(3, 1, 3, padding=1)),
        lambda net: setattr(net, "head", nn.Sequential(nn.Conv2d(3, 1, 1), nn.Tanh())),
        lambda net: setattr(net.down, "dilation", (2, 2)) or setattr(net.down, "padding", (4, 4)),
    ],
    ids=["padding", "another layer", "one more layer", "dilation"],
)
def test_a_changed_structure_is_noticed(engine, net, pair, change, whole, assert_exact):
    def loss(o, t):
        return F.mse_loss(o, t[..., : o.shape[-2], : o.shape[-1]])

    engine = gg.compile(net, loss, tile=TILE)
    engine.forward(pair.image, pair.target)
    engine.backward(pair.image, pair.target)
    change(net)
    net.double().zero_grad()
    value, expected = whole(net, loss, pair.image, pair.target[None])
    torch.testing.assert_close(engine.backward(pair.image, pair.target), value, rtol=1e-12, atol=0)
    assert_exact(net, expected)


def test_a_plain_setting_of_a_module_is_noticed(net, pair):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.factor = 1.0

        def forward(self, x):
            return self.net(x) * self.factor

    model = Scaled()
    engine = gg.compile(model, lambda o, t: o.mean() + 0 * t.mean(), tile=TILE)
    first = engine.forward(pair.image, pair.target).item()
    model.factor = 3.0
    assert engine.forward(pair.image, pair.target).item() == pytest.approx(3 * first, rel=1e-12)


def test_untied_weights_are_noticed(bce, pair, whole, assert_exact):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 1)).double()
    model[1].weight = model[0].weight
    engine = gg.compile(model, bce, tile=TILE)
    engine.backward(pair.image, pair.target)
    model.zero_grad()
    model[1].weight = nn.Parameter(model[0].weight.detach() * 2)
    _, expected = whole(model, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    assert_exact(model, expected)


def test_a_changed_model_is_planned_anew(net, bce, pair):
    """Freezing all but the head makes a backward lean; its tiles must not bind the model that is trained whole."""
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    engine = gg.compile(net, bce)
    lean = engine.plan(pair.image, pair.target)
    net.requires_grad_(True)
    full = engine.plan(pair.image, pair.target)
    assert full.stages[0].tile_peak_bytes > lean.stages[0].tile_peak_bytes
    assert engine.plan(pair.image, pair.target) is full


def test_several_sizes_live_side_by_side(engine, net, bce, whole, assert_exact):
    torch.manual_seed(3)
    pairs = [(torch.rand(2, h, w).double(), torch.rand(1, h, w).double()) for h, w in ((23, 31), (17, 12), (40, 9))]
    for image, target in [*pairs, *pairs]:
        net.zero_grad()
        _, expected = whole(net, bce, image, target[None])
        engine.backward(image, target)
        assert_exact(net, expected)
    assert len(engine._planner._kept) == 3


# Plans, budgets, state


def test_a_plan_is_of_this_size_and_runs_nothing(engine, net, pair):
    plan = engine.plan(pair.image, pair.target)
    assert plan.image_shape == (1, 2, 23, 31)
    assert plan.tile == TILE
    assert all(p.grad is None for p in net.parameters())
    assert engine.plan(pair.image, pair.target) is plan
    assert engine.last_run is None


def test_a_budget_too_small_is_refused_before_anything_runs(net, bce):
    """The smallest budget it names works."""
    image, target = torch.rand(2, 300, 400).double(), torch.rand(1, 300, 400).double()
    with pytest.raises(BudgetError) as caught:
        gg.compile(net, bce, memory="64 MiB").backward(image, target)
    error = caught.value
    assert error.budget_bytes == 64 * 2**20
    assert error.budget_bytes < error.needed_bytes <= error.smallest_bytes
    assert all(p.grad is None for p in net.parameters())
    # Some room, because the tests around this one make the process grow.
    plan = gg.compile(net, bce, memory=error.smallest_bytes + 2**26).plan(image, target)
    assert plan.budget_bytes == error.smallest_bytes + 2**26


def test_state_repeats_the_same_plan(net, bce, pair):
    first = gg.compile(net, bce, tile=(6, 9))
    first.backward(pair.image, pair.target)
    state = first.state_dict()
    second = gg.compile(net, bce)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.plan(pair.image, pair.target).tile == (6, 9)
    assert second.state_dict() == state


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"memory": "lots"}, "cannot read 'lots'"),
        ({"memory": 0}, "positive"),
        ({"memory": 2.5}, "whole number of bytes"),
        ({"tile": (0, 4)}, "tile must be"),
        ({"tile": (4,)}, "tile must be"),
        ({"device": "tpu9000"}, "unknown device"),
        ({"device": "meta"}, "not supported"),
        ({"loss": 3}, "loss must be a callable"),
    ],
)
def test_arguments_that_cannot_be_used(net, arguments, text):
    with pytest.raises(ConfigError, match=text):
        gg.compile(net, **arguments)


def test_the_model_must_be_a_module():
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, got function"):
        gg.compile(lambda x: x)


def test_calls_that_make_no_sense(engine, net, pair):
    with pytest.raises(TargetError, match="needs a target"):
        engine.backward(pair.image, None)
    with pytest.raises(ConfigError, match="no loss"):
        gg.compile(net).backward(pair.image, pair.target)
    with pytest.raises(ConfigError, match="without a loss"):
        engine.forward(pair.image, pair.target, out="never.tif")
    with pytest.raises(ConfigError, match="without a loss"):
        next(engine.stream(pair.image))
    with pytest.raises(ImageError, match="does not exist"):
        engine.backward("missing.svs", pair.target)
    with pytest.raises(ImageError, match="batch axis"):
        engine.backward(torch.rand(2, 2, 9, 9), pair.target)
    with pytest.raises(CaptureError):
        engine.backward(torch.rand(5, 23, 31).double(), pair.target)


def test_grad_modes_around_a_call_change_nothing(engine, net, bce, pair, whole, assert_exact):
    _, expected = whole(net, bce, pair.image, pair.target[None])
    with torch.no_grad():
        engine.backward(pair.image, pair.target)
    assert_exact(net, expected)
    with torch.inference_mode():
        gg.compile(net, tile=TILE).forward(pair.image)


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["net", "gate"])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_gpu_gives_the_same(request, which, home, bce, pair, whole):
    model = request.getfixturevalue(which)
    value, expected = whole(model, bce, pair.image, pair.target[None])
    model.to(home)
    result = gg.compile(model, bce, tile=TILE, device="cuda").backward(pair.image, pair.target)
    assert result.item() == pytest.approx(value.item(), rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad.device.type == home
        torch.testing.assert_close(p.grad.cpu(), expected[name], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        predicted = model(pair.image[None].to(home)).cpu()
    output = gg.compile(model, tile=TILE, device="cuda").forward(pair.image)
    torch.testing.assert_close(output.cpu(), predicted, rtol=1e-11, atol=1e-12)
