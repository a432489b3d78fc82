"""A program that needs no second trace becomes the graph that a second trace would give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram

from gigagrad.graphs import InputSpec, capture
from gigagrad.graphs.capture import functional

IMAGE = InputSpec((1, 2, 12, 12), torch.float32, field=True)


class Model(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def norm_twice(self, x):
    return self.norm(F.relu(self.norm(self.conv(x)), inplace=True))


def in_place_twice(self, x):
    y = self.conv(x)
    before = y * 2
    y.add_(1).mul_(before)
    F.silu(y, inplace=True)
    return y + before


def flattened(self, x):
    return F.adaptive_avg_pool2d(self.conv(x), 1).flatten(1)


def shared(self, x):
    y = self.conv(x)
    half = y[:, :1]
    y.mul_(3)
    return half * y


def counted_and_read(self, x):
    self.count.add_(1)
    return self.conv(x) * self.count


def of_two_dtypes(self, x):
    return self.conv(x).mul_(x.double().mean())


def decomposed(self, x):
    return F.softshrink(self.conv(x))


def dropped(self, x):
    return F.dropout(self.conv(x), 0.5)


def cast(self, x):
    return self.conv(x).double() * torch.asarray(2.0)


def cast_to_itself(self, x):
    return self.conv(x.to(x.dtype))


def cast_and_written(self, x):
    y = self.conv(x)
    same = y.to(y.dtype)
    y.mul_(2)
    return same + y


def never_dropped(self, x):
    return F.dropout(self.conv(x), 0.0) + F.dropout(x, 0.5, training=False)


def split(self, x):
    return self.conv(x).unflatten(1, (2, 1)).sum(2)


AS_IT_IS = (
    *(norm_twice, in_place_twice, flattened, counted_and_read, cast),
    *(dropped, never_dropped, cast_to_itself, split),
)
AGAIN = (shared, of_two_dtypes, decomposed, cast_and_written)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("body", [*AS_IT_IS, *AGAIN])
def test_the_graph_is_that_of_a_second_trace(body, training, monkeypatch):
    model = Model(body).train(training)
    traced = []
    run = ExportedProgram.run_decompositions

    def again(*given):
        traced.append(1)
        return run(*given)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", again)
    found = capture(model, None, IMAGE, None)
    assert bool(traced) == (body in AGAIN)
    monkeypatch.setattr(functional, "_stays", lambda *_: False)
    expected = capture(model, None, IMAGE, None)
    assert found.is_same_as(expected)
    assert [node.origin for node in found.nodes] == [node.origin for node in expected.nodes]
