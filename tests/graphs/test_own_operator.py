"""The example of docs/operators.md: a custom operator runs whole without a rule and tile by tile with one, exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Span
from gigagrad.graphs import OpRule, Saved, op_rules
from tests.exactness.comparison import compare


@torch.library.custom_op("gigagrad_example::blur_rows", mutates_args=())
def blur_rows(x: torch.Tensor, radius: int) -> torch.Tensor:
    """The mean over `2 radius + 1` pixels of a row; zeros outside."""
    width = 2 * radius + 1
    return F.avg_pool2d(x, (1, width), stride=1, padding=(0, radius))


@blur_rows.register_fake
def _(x, radius):
    return torch.empty_like(x)


def _backward(ctx, cotangent):
    return blur_rows(cotangent, ctx.radius), None


def _setup(ctx, inputs, output):
    ctx.radius = inputs[1]


blur_rows.register_autograd(_backward, setup_context=_setup)


class BlurRows(OpRule):
    """Output x needs the inputs from x - radius to x + radius; y needs itself."""

    saved = Saved.NOTHING

    def axes(self, call, rank):
        return call.operands[0].axes

    def needs(self, call, axis, out):
        if axis == 0:
            return (out,)
        reach = Span(out.start - call["radius"], out.stop + call["radius"])
        return (reach.clamp(call.operands[0].size(axis)),)

    def run(self, call, arguments, site):
        # Between tiles the crop brings its neighbours along, and zeros belong at the image's border only: blur what is
        # there, then keep the tile's own pixels.
        crop, (_, inside) = arguments["x"], site.operands[0]
        blurred = blur_rows(crop, call["radius"])
        return blurred.narrow(-1, site.out[1].start - inside.start, site.out[1].length)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.b(blur_rows(self.a(x), 3))


@pytest.fixture(params=["without a rule", "with a rule"])
def has_rule(request, monkeypatch):
    if request.param == "with a rule":
        monkeypatch.setitem(op_rules._RULES, "gigagrad_example.blur_rows.default", BlurRows())
    return request.param == "with a rule"


def test_ones_own_operator(has_rule):
    torch.manual_seed(0)
    image, target = torch.randn(2, 23, 37, dtype=torch.float64), torch.rand(1, 23, 37, dtype=torch.float64)
    model = Net().double()
    plan = gg.compile(model, F.mse_loss, tile=(7, 5)).plan(image, target)
    whole = [entry.operator for entry in plan.whole_field]
    assert whole == ([] if has_rule else ["gigagrad_example.blur_rows.default"])
    result = compare(model, F.mse_loss, image, target, tile=(7, 5))
    assert max(result.loss_error, result.gradient_error) < 1e-12
