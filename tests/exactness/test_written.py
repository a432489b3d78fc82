"""In-place writes that autograd does not see, modules used twice, and code that asks how it is run: as in PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gigagrad as gg
from gigagrad.errors import CaptureError
from tests.exactness import written

CASES = 24


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Model(nn.Module):
    """Two convolutions with a function of the module and the first one's output between."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], middle: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.adapter = conv(2, 3), conv(3, 1), conv(2, 3)
        self.middle = nn.Identity() if middle is None else middle
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        made = self.between(self, self.a(x))
        del self.x
        return self.b(made)


def difference(model: nn.Module, loss: Callable[..., Any] = F.mse_loss, steps: int = 1) -> float:
    """The largest difference of loss, gradients, parameters, buffers and `requires_grad` from plain PyTorch."""
    generator = torch.Generator().manual_seed(1)
    x, t = (torch.rand(c, 22, 26, generator=generator).double() for c in (2, 1))
    model = model.double()
    plain = copy.deepcopy(model)
    engine = gg.compile(model, loss, tile=(9, 11), progress=False)
    worst = 0.0
    for _ in range(steps):
        value, expected = engine.backward(x, t), loss(plain(x[None]), t[None])
        expected.backward()
        worst = max(worst, float((value - expected.detach()).abs()))
        for mine, theirs in zip(
            [*model.parameters(), *model.buffers()], [*plain.parameters(), *plain.buffers()], strict=True
        ):
            assert mine.requires_grad == theirs.requires_grad
            worst = max(worst, float((mine.detach() - theirs.detach()).abs().max()))
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in (mine, theirs)]
            worst = max(worst, float((gradients[0] - gradients[1]).abs().max()))
    return worst


@pytest.mark.parametrize("number", range(CASES))
def test_random_writes(number):
    model = written.draw(number).double()
    plain = copy.deepcopy(model)
    try:
        F.mse_loss(plain(torch.rand(1, 2, 22, 26).double()), torch.rand(1, 1, 22, 26).double()).backward()
    except RuntimeError:
        pytest.skip("PyTorch itself refuses it")
    try:
        assert difference(model) < 1e-9, model.text
    except CaptureError as error:  # where views exist of what is detached in place
        if f"is detached in place at {Path(written.__file__)}:" not in str(error):
            raise


def frozen(model, y):
    with torch.no_grad():
        features = F.relu(model.a(model.x))
    features += model.adapter(model.x)
    return features


def filled(model, y):
    with torch.no_grad():
        made = torch.zeros_like(y)
        made[:, 1:] = y[:, 1:]
    return made + y


def round_data(model, y):
    y.data = y.data.round()
    return y


def constrained(model, y):
    model.a.weight.data = torch.renorm(model.a.weight.data, 2, 0, 0.3)
    return model.a(model.x)


def put_back(model, y):
    held = model.a.weight.data
    model.a.weight.data = (held * 4).round() / 4
    made = model.a(model.x)
    model.a.weight.data = held
    return made


def inference(model, y):
    with torch.inference_mode():
        scale = y.std()
    return y * scale.clone()


def apart(model, y):
    features = model.a(model.x).detach()
    features += model.adapter(model.x)
    return features + features[:, :1]


def frozen_for_a_while(model, y):
    for parameter in model.adapter.parameters():
        parameter.requires_grad_(False)
    y = y + model.adapter(model.x)
    for parameter in model.adapter.parameters():
        parameter.requires_grad_(True)
    return y + model.adapter(model.x * 2)


def freezes(model, y):
    model.adapter.requires_grad_(False)
    return y + model.adapter(model.x)


def complex_phase(model, y):
    spectrum = torch.fft.rfft2(y)
    with torch.no_grad():
        phase = spectrum / (spectrum.abs() + 1e-6)
    return torch.fft.irfft2(spectrum.abs().log1p() * phase, s=y.shape[-2:])


def norm_without_gradients(model, y):
    with torch.no_grad():
        made = model.middle(y)
    return made * y


def asks(model, y):
    plain = not torch.compiler.is_compiling() and type(y) is torch.Tensor and type(model.a.weight) is nn.Parameter
    return y * (1.0 if plain and isinstance(type(y), type) else 3.0)


BETWEEN = (
    *(frozen, filled, round_data, constrained, put_back, inference, apart, frozen_for_a_while, freezes, complex_phase),
    *(norm_without_gradients, asks),
)


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_named_writes(between):
    assert difference(Model(between, nn.BatchNorm2d(3)), steps=2) < 1e-9


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Doubled])
def test_one_norm_in_two_places_is_that_norm_in_both(kind, momentum):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = kind(3, momentum=momentum)
            self.layers = nn.ModuleList([conv(2, 3), norm, conv(3, 3), norm, conv(3, 1)])

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if isinstance(layer, nn.BatchNorm2d):
                    x = x.relu()
                if layer is self.layers[1] and index == 3 and id(layer) == id(self.layers[3]) and type(layer) is kind:
                    x = x * 2
            return x

    assert difference(Twice(), steps=2) < 1e-9


@pytest.mark.parametrize("reentrant", [False, True])
def test_norms_in_checkpoints_count_their_batches_twice_as_in_pytorch(reentrant):
    def between(model: Model, y: Tensor) -> Tensor:
        return checkpoint(lambda z: model.middle(z).relu(), y, use_reentrant=reentrant)

    assert difference(Model(between, nn.BatchNorm2d(3)), steps=2) < 1e-9


def test_a_checkpoint_that_has_no_gradients_in_pytorch_has_none():
    def between(model: Model, y: Tensor) -> Tensor:
        return y + checkpoint(model.adapter, model.x, use_reentrant=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that gradients will be None
        assert difference(Model(between)) < 1e-9


def asks_for_a_gradient(model, y):
    model.adapter.weight.requires_grad_(True)
    return y


def own_gradient(model, y):
    (gradient,) = torch.autograd.grad(y.sum(), model.a.weight, retain_graph=True)
    return y * gradient.norm()


def other_shape(model, y):
    y.data = y.data[:, :, :4]
    return y


def written_after_exchange(model, y):
    new = y.detach() * 2
    y.data = new
    new.mul_(2)
    return y


def both_written(model, y):
    z = y.detach()
    z += model.adapter(model.x)
    y.mul_(2)
    return y + z


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (asks_for_a_gradient, "requires_grad_"),
        (own_gradient, "torch.autograd.grad"),
        (other_shape, "another shape"),
        (written_after_exchange, "clone"),
        (both_written, "clone"),
    ],
)
def test_what_cannot_be_followed_names_its_line(between, says):
    model = Model(between)
    model.adapter.weight.requires_grad_(False)
    with pytest.raises(CaptureError, match=says) as caught:
        difference(model)
    assert f"{__file__}:" in str(caught.value)
