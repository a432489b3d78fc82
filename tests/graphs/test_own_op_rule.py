"""An operator from outside states all that rules of ours state, through public imports, and planning believes it."""

import torch
from torch import nn

import gigagrad as gg
from gigagrad.execution.rounding_error import error_gains
from gigagrad.graphs import Affine, InputSpec, OpRule, Saved, capture, lookup, register, scaled_gains
from gigagrad.plans import split_segments
from tests.exactness.comparison import compare

NAME = "gigagrad_example.doubled.default"


@torch.library.custom_op("gigagrad_example::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, cotangent: doubled(cotangent))


class Doubled(OpRule):
    saved = Saved.NOTHING
    pixelwise = True
    affine = Affine.JOINTLY
    products = 0.0

    def axes(self, call, rank):
        return call.operands[0].axes

    def needs(self, call, axis, out):
        return (out,)

    def run(self, call, arguments, site):
        return doubled(arguments["x"])

    def flops(self, call):
        return self.products

    def workspace_bytes(self, call, out_pixels, operands):
        return 1000 * out_pixels if self.products else 0

    def error_gains(self, call, read, value):
        return scaled_gains(read[0], 2.0)


if type(lookup(NAME)) is not Doubled:
    register(Doubled(), [NAME])


class Twice(nn.Module):
    def forward(self, x):
        return doubled(x)


def mean(output, target):
    return doubled(output.mean(dim=(2, 3))).sum()


def test_its_gradient_and_its_costs(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), Twice())
    image, target = torch.randn(2, 1, 23, 37, dtype=torch.float64)
    cheap = gg.compile(model.double(), mean, tile=(7, 5)).plan(image, target)
    assert (cheap.whole_field, len(cheap.passes)) == ((), 1)  # affine in its sums: cotangents are known before
    monkeypatch.setattr(Doubled, "products", 1e12)
    dear = gg.compile(model, mean, tile=(7, 5)).plan(image, target)
    assert dear.modelled_seconds > cheap.modelled_seconds + 10
    assert dear.segments[0].tile_peak_bytes >= cheap.segments[0].tile_peak_bytes + 1000 * 30
    result = compare(model, mean, image, target, tile=(7, 5))
    assert max(result.loss_error, result.gradient_error) < 1e-12


def test_the_errors_it_passes_on_are_foretold():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), Twice(), nn.Conv2d(3, 1, 3))
    graph = capture(model, None, InputSpec((1, 1, 16, 16), torch.float32, field=True), None)
    first, second = (node.id for node in graph.nodes if "conv2d" in node.op)
    assert error_gains(graph, split_segments(graph, [first])[1], {first}, {})[second].tolist() == [2, 2, 2]
