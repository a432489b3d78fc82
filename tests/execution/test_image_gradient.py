"""The gradient of a number for the pixels of an image: exact, in strips, and planned with what is held of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import BudgetError, CaptureError, ConfigError, ModelError
from gigagrad.execution.sinks import OutputField, Pieces, Sink
from gigagrad.plans import estimate, make_plan
from gigagrad.plans.plan import amount_of
from tests.devices.fake import FakeCpu
from tests.execution.conftest import Gate, Net


class Upturned(nn.Module):
    """Reads the image from below, and its own output once more as a whole field."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flip(2)) + self.inner(x).flip(3)


class Whole(nn.Module):
    """The image itself goes into an operator without a tile rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).abs()[:, :1]


class Bytes(nn.Module):
    """`front` stands for what makes floats of a slide."""

    def __init__(self, front: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.front, self.conv, self.head = front, nn.Conv2d(3, 4, 5, stride=2).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(self.front(x))).mean((2, 3)))


class Rows(Sink):
    """The strips, and the whole."""

    kind = "rows"

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        return 0

    def take(self, pieces: Pieces, field: OutputField) -> tuple[list[Box], Tensor]:
        boxes, crops = zip(*((box, crop.clone()) for box, crop in pieces), strict=True)
        return list(boxes), torch.cat(crops, -2)


def total(output: Tensor, weight: Tensor) -> Tensor:
    return (output * weight).sum()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def by_autograd(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], image: Tensor, target: Tensor) -> Tensor:
    image = image.clone().requires_grad_()
    loss(copy.deepcopy(model)(image[None]), target).backward()
    assert image.grad is not None
    return image.grad


@pytest.mark.parametrize(
    ("make", "tile", "wide"),
    [
        (Net, (5, 8), False),
        (Net, (1, 40), True),  # along the columns, were it not handed over
        (Gate, (5, 8), True),  # two segments read the image
        (Gate, (40, 3), False),
        (Upturned, (5, 8), True),
        (Whole, (5, 8), True),
    ],
)
def test_it_is_that_of_the_whole_image(pair, tile, wide, make):
    torch.manual_seed(0)
    image, target = (pair.image, pair.target) if wide else (pair.image.transpose(1, 2), pair.target.transpose(1, 2))
    model = make().double()
    boxes, found = gg.compile(model, squares, tile=tile).image_gradient(image, target, out=Rows())
    expected = by_autograd(model, squares, image, target)
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-14)
    assert [box.y0 for box in boxes[1:]] == [box.y1 for box in boxes[:-1]]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_sink_it_is_a_tensor_and_twice_the_same(net, pair):
    engine = gg.compile(net, squares, tile=(5, 8))
    first = engine.image_gradient(pair.image, pair.target)
    assert first.shape == (1, *pair.image.shape)
    assert torch.equal(first, engine.image_gradient(pair.image, pair.target))


@pytest.mark.parametrize(
    "front",
    [
        lambda x: x.double() / 255,
        lambda x: x[:, [2, 1, 0]].to(torch.float32).double() * (x > 100),
        lambda x: (
            torch.cat([x[:, 1:], x[:, :1]], 1).flip(3) / torch.tensor(255.0, dtype=torch.float64).reshape(1, 1, 1, 1)
        ),
    ],
)
def test_bytes_are_the_numbers_they_stand_for(front):
    torch.manual_seed(0)
    model = Bytes(front)
    image = torch.randint(0, 256, (3, 31, 26), dtype=torch.uint8)
    weight = torch.tensor([[-2.0]], dtype=torch.float64)
    found = gg.compile(model, total, tile=(4, 6)).image_gradient(image, weight)
    assert found.dtype == torch.float32
    expected = by_autograd(model, total, image.double(), weight)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-9)


def test_slides_of_bytes_through_the_usual_front():
    torch.manual_seed(0)
    model = nn.Sequential(gg.models.Normalise(), Bytes(lambda x: x).float())
    image = torch.randint(0, 256, (3, 31, 26), dtype=torch.uint8)
    found = gg.compile(model, total, tile=(4, 6)).image_gradient(image, torch.ones(1, 1))
    expected = by_autograd(model, total, image.float() / 255, torch.ones(1, 1)) / 255  # floats mean 0 to 1 there
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-9)


def test_arithmetic_on_the_bytes_themselves_is_refused():
    engine = gg.compile(Bytes(lambda x: (x * 2).double()), total)
    with pytest.raises(CaptureError, match=r"mul.*test_image_gradient.*x\.float\(\)"):
        engine.image_gradient(torch.zeros(3, 31, 26, dtype=torch.uint8), torch.ones(1, 1))


def test_what_cannot_be_asked(net, pair):
    with pytest.raises(ConfigError, match="no loss"):
        gg.compile(net).image_gradient(pair.image, pair.target)
    with pytest.raises(ConfigError, match="bfloat16"):
        gg.compile(net.float(), squares, precision="float16").image_gradient(pair.image.float(), pair.target)
    with pytest.raises(ModelError, match="no gradient"):
        gg.compile(nn.Conv2d(2, 1, 1).double(), lambda output, target: target.mean()).image_gradient(
            *vars(pair).values()
        )
    with pytest.raises(ModelError, match="no gradient"):
        gg.compile(Detached().requires_grad_(False), squares).image_gradient(pair.image, pair.target)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.detach())


class Counted(Rows):
    def take(self, pieces, field):
        boxes = [box for box, _ in pieces]
        return boxes, sum(box.area for box in boxes)


def test_no_more_than_a_few_rows_are_held_of_it():
    slide = torch.zeros(1, dtype=torch.uint8).expand(3, 1500, 6000)
    conv = nn.Conv2d(3, 1, 5, stride=2).requires_grad_(False)
    model = Bytes(lambda x: conv(x.float()))
    model.conv, model.head = nn.Conv2d(1, 4, 1), nn.Linear(4, 1)
    model.requires_grad_(False)
    engine = gg.compile(model, total, device=FakeCpu(), tile=(32, 512), memory="540 MiB")
    boxes, pixels = engine.image_gradient(slide, torch.ones(1, 1), out=Counted())
    assert pixels == 1500 * 6000
    assert max(box.height for box in boxes) < 70
    with pytest.raises(BudgetError):  # it takes 103 MiB
        engine.image_gradient(slide, torch.ones(1, 1))


def test_the_rows_that_are_held_are_part_of_the_plan():
    image = torch.zeros(3, 300, 200, dtype=torch.float64, requires_grad=True)
    engine = gg.compile(Bytes(lambda x: x), total, device=FakeCpu())
    problem = engine.problem(image, torch.ones(1, 1, dtype=torch.float64))
    node = problem.graph.source("image")
    assert node is not None
    strips = replace(problem, handed=node.id, output_bytes=lambda rows, shape: 1000 * rows)
    (segment,) = make_plan(strips, tiles=((32, 50),)).segments
    assert amount_of(segment.memory, estimate.OUTPUT) == segment.crop[0] * (3 * 200 * node.bytes_per_pixel + 1000)
