"""Beyond the plain case: several images and targets, gradients of images, precision, seeds, hooks."""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.devices import device_for
from gigagrad.errors import ConfigError


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


@pytest.fixture
def image():
    torch.manual_seed(1)
    return torch.randn(2, 33, 41)


@pytest.fixture
def target():
    torch.manual_seed(2)
    return torch.rand(1, 33, 41)


def plain(model, image, target):
    """A copy of the model after one plain step."""
    model = copy.deepcopy(model)
    F.mse_loss(model(image[None]), target[None]).backward()
    return model


def gradients(model):
    return [p.grad for p in model.parameters()]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_an_image_that_requires_a_gradient_gets_one(net, image, target):
    net, image, target = net.double(), image.double(), target.double()
    expected = image.clone().requires_grad_()
    plain(net, expected, target)
    image.requires_grad_()
    engine = gg.compile(net, F.mse_loss, tile=(10, 12))
    engine.backward(image, target)
    torch.testing.assert_close(image.grad, expected.grad, rtol=1e-10, atol=1e-14)
    engine.backward(image, target)
    torch.testing.assert_close(image.grad, 2 * expected.grad, rtol=1e-10, atol=1e-14)


def test_the_gradient_of_an_image_reaches_through_whole_field_operators(net, image, target):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net.double()

        def forward(self, x):
            return self.inner(x.flip(2)) + x.flip(3).mean()

    image, target = image.double(), target.double()
    expected = image.clone().requires_grad_()
    F.mse_loss(copy.deepcopy(model := Turned())(expected[None]), target[None]).backward()
    gg.compile(model, F.mse_loss, tile=(10, 12)).backward(image.requires_grad_(), target)
    torch.testing.assert_close(image.grad, expected.grad, rtol=1e-10, atol=1e-14)


def test_several_images_are_several_arguments(image, target):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(3, 4, 5, stride=2, padding=2)
            self.norm, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 1, 1)

        def forward(self, a, b):
            b = F.interpolate(self.second(b), size=a.shape[-2:], mode="bilinear")
            return self.head(self.norm(torch.cat([self.first(a), b], 1)).relu())

    torch.manual_seed(3)
    model, other = Both().double(), torch.randn(3, 66, 82, dtype=torch.float64)
    image, target = image.double(), target.double()
    reference = copy.deepcopy(model)
    F.mse_loss(reference(image[None], other[None]), target[None]).backward()
    gg.compile(model, F.mse_loss, tile=(10, 12)).backward((image, other), target)
    assert_same(gradients(model), gradients(reference))


def test_several_targets_come_as_a_tuple(net, image, target):
    def loss(output, targets):
        mask, label = targets
        return F.mse_loss(output, mask) + (output.mean() - label.sum()) ** 2

    net, image, target = net.double(), image.double(), target.double()
    label = torch.tensor([0.25, 0.5], dtype=torch.float64)
    reference = copy.deepcopy(net)
    loss(reference(image[None]), (target[None], label)).backward()
    gg.compile(net, loss, tile=(10, 12)).backward(image, (target, label))
    assert_same(gradients(net), gradients(reference))


def test_a_model_may_return_several_values(net, image):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x):
            y = self.inner(x)
            return {"out": y, "coarse": (F.avg_pool2d(y, 3), y.mean())}

    model = Two().eval()
    with torch.no_grad():
        expected = model(image[None])
    found = gg.compile(model, tile=(10, 12)).forward(image)
    assert set(found) == {"out", "coarse"}
    torch.testing.assert_close(found["out"], expected["out"])
    torch.testing.assert_close(found["coarse"], expected["coarse"])


def test_a_model_may_nest_its_only_value(net, image):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x):
            return {"out": self.inner(x)}

    model = One().eval()
    with torch.no_grad():
        expected = model(image[None])["out"]
    torch.testing.assert_close(gg.compile(model, tile=(10, 12)).forward(image)["out"], expected)


def test_double_precision_on_request(net, image, target):
    expected = plain(net.double(), image.double(), target.double())
    net.float()
    value = gg.compile(net, F.mse_loss, precision="float64", tile=(10, 12)).backward(image, target)
    assert value.dtype == torch.float64
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_means_autocast(net, image, target, precision):
    reference = copy.deepcopy(net)
    with torch.autocast("cpu", dtype=getattr(torch, precision)):
        expected = F.mse_loss(reference(image[None]), target[None])
    expected.backward()
    engine = gg.compile(net, F.mse_loss, precision=precision, tile=(10, 12))
    value = engine.backward(image, target)
    assert value.item() == pytest.approx(expected.item(), rel=2e-2)
    scale = max(p.grad.norm().item() for p in reference.parameters())
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm().item() < 0.03 * scale


def test_an_unknown_precision_is_refused(net):
    with pytest.raises(ConfigError, match="bfloat16"):
        gg.compile(net, precision="int8")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 1, 3)
        self.pixels, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.2)

    def forward(self, x):
        x = self.pixels(self.norm(self.stem(x)).relu())
        depth = x.new_empty((1, 1, 1, 1)).bernoulli_(0.5)
        return self.head(self.channels(x) * depth + x)


def noisy_gradients(image, *, tile, threads=1, seed=7):
    torch.manual_seed(0)
    model = Noisy().double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = gg.compile(model, lambda o, t: (o**2).mean() + t.sum(), tile=tile, seed=seed)
        values = [engine.backward(image.double(), torch.zeros(1)).item() for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    return values, gradients(model)


@pytest.mark.parametrize("tile", [(5, 7), (16, 16), (64, 64)])
def test_any_tiling_sees_the_same_mask(image, tile):
    values, expected = noisy_gradients(image, tile=(9, 11))
    assert values[0] != values[1], "each run draws anew"
    others, found = noisy_gradients(image, tile=tile, threads=2)
    assert others == pytest.approx(values, rel=1e-12)
    assert_same(found, expected)


def test_another_seed_draws_another_mask(image):
    assert noisy_gradients(image, tile=(9, 11))[0] != noisy_gradients(image, tile=(9, 11), seed=8)[0]


def test_a_seed_leaves_the_generators_as_they_were(image, monkeypatch):
    """That of the CPU, and those of GPUs, which a run on the CPU does not touch at all."""
    touched: list[Any] = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, touched.append)
    engine = gg.compile(Noisy(), lambda o, t: (o**2).mean() + t.sum(), tile=(9, 11), seed=7)
    before = torch.get_rng_state()
    engine.backward(image, torch.zeros(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert not touched


def test_a_seed_on_a_gpu_is_that_gpus_for_the_run(monkeypatch):
    """Of two, the other one is left alone; stood in for by numbers."""
    states, chosen = {0: 10, 1: 11}, [0]

    @contextmanager
    def device(gpu):
        chosen.append(gpu.index)
        yield
        chosen.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: states[gpu.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: states.update({gpu.index: state}))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: states.update({chosen[-1]: seed}))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.update(dict.fromkeys(states, seed)))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.get_rng_state()
    with device_for("cuda:1").seeded(7):
        assert states == {0: 10, 1: 7}
    assert states == {0: 10, 1: 11}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
def test_a_seed_on_a_real_gpu_leaves_its_generator_as_it_was(image):
    before = torch.cuda.get_rng_state()
    engine = gg.compile(Noisy(), lambda o, t: (o**2).mean() + t.sum(), tile=(9, 11), seed=7, device="cuda")
    engine.backward(image, torch.zeros(1))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_without_a_seed_pytorchs_generator_decides(image):
    values = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = gg.compile(Noisy(), lambda o, t: (o**2).mean() + t.sum(), tile=(9, 11))
        values.append([engine.backward(image, torch.zeros(1)).item() for _ in range(2)])
    assert values[0] == values[1]
    assert values[0][0] != values[0][1]


def test_hooks_on_parameters_run(net, image, target):
    reference = plain(net, image, target)
    seen = []
    net[0].weight.register_hook(lambda gradient: 2 * gradient)
    net[3].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    gg.compile(net, F.mse_loss, tile=(10, 12)).backward(image, target)
    torch.testing.assert_close(net[0].weight.grad, 2 * reference[0].weight.grad, rtol=1e-4, atol=1e-6)
    assert len(seen) == 1


def test_state_dicts_load_back_into_the_plain_module(net, image, target):
    engine = gg.compile(net, F.mse_loss, tile=(10, 12))
    engine.backward(image, target)
    other = copy.deepcopy(net)
    other.load_state_dict(engine.model.state_dict())
    assert set(engine.model.state_dict()) == set(net.state_dict())
