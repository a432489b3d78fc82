"""What an operator refuses only when it sees values is one of our errors, with its place; nothing is left half done."""

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.errors import CaptureError, OperatorError


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x):
        return self.body(x)


def by_pixel(output, target):
    return nn.functional.cross_entropy(output, target[:, 0].long())


def test_a_class_out_of_range_names_the_operator_and_its_place():
    net, target = Classes(), torch.zeros(1, 16, 16)
    target[0, 9, 9] = 7
    with pytest.raises(
        OperatorError, match=r"cross_entropy_loss.default in the loss at .*test_refusals.py:\d+ refuses"
    ):
        gg.compile(net, by_pixel, tile=(4, 4)).backward(torch.rand(1, 16, 16), target)
    assert all(p.grad is None for p in net.parameters())


def test_a_class_out_of_range_of_a_whole_image():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    engine = gg.compile(net, nn.CrossEntropyLoss())
    with pytest.raises(OperatorError, match="in the model or the loss refuses what it is given: Target 7 is out of"):
        engine.backward(torch.rand(1, 16, 16), torch.tensor([7]))
    engine.in_tiles = True
    with pytest.raises(OperatorError, match="in the loss refuses what it is given: Target 7 is out of bounds"):
        engine.backward(torch.rand(1, 16, 16), torch.tensor([7]))


@pytest.mark.parametrize(
    "image", [torch.zeros(1, 6, 40, dtype=torch.uint8), torch.zeros(1, 6, 40, dtype=torch.float64)]
)
def test_dtypes_that_do_not_go_together(image):
    net = nn.Sequential(nn.Identity(), nn.Linear(40, 5))
    with pytest.raises(OperatorError, match=r"aten.linear.default in module '1' refuses .*the same dtype") as caught:
        gg.compile(net, lambda output, target: output.mean(), tile=(3, 4)).backward(image, torch.zeros(1))
    assert caught.value.module_path == "1"


def test_a_linear_layer_over_the_width_runs():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Linear(40, 5)).double()
    image = torch.rand(1, 30, 40, dtype=torch.float64)
    loss = lambda output, target: output.square().mean()  # noqa: E731
    expected = torch.autograd.grad(loss(net(image[None]), None), list(net.parameters()))
    gg.compile(net, loss, tile=(7, 9)).backward(image, torch.zeros(1))
    for p, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-11, atol=1e-13)


def test_a_linear_layer_over_another_width_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Linear(40, 5))
    with pytest.raises(
        CaptureError, match=r"cannot capture the model or the loss in module '1': .*\[60, 44\] X \[40, 5\]"
    ):
        gg.compile(net, lambda output, target: output.mean()).backward(torch.rand(1, 30, 44), torch.zeros(1))
