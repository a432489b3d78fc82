"""A bag is served by what was traced of bags of other sizes where its graph is the one that tracing would find."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.execution import captures
from gigagrad.graphs import InputSpec, LossModule, lines_through, trace, trace_again
from gigagrad.models.mil import AttentionPool, BagNetwork, Clam

LABEL = InputSpec((1,), torch.int64, field=False)
scale: float | None = None


def spec(size: int) -> InputSpec:
    return InputSpec((size, 2, 4, 4), torch.float32, field=True, bag=True)


def logits_loss(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.2), nn.ReLU(), nn.Flatten())


class Looking(nn.Module):
    """Features of patches, and something else for bags of more than nine."""

    def __init__(self, above) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 2), nn.Linear(32, 2)
        self.largest = 0
        self.above = above

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self, x.flatten(1), len(x) > 9).mean(0, keepdim=True)


def doubled(self, x, many):
    return self.first(2 * x if many else x)


def by_other_weights(self, x, many):
    return (self.second if many else self.first)(x)


def by_a_constant(self, x, many):
    return self.first(x) * torch.tensor([0.5 if many else 2.0])


def without_gradient(self, x, many):
    with torch.set_grad_enabled(not many):
        return self.first(x) + self.second(x).detach()


def by_a_number(self, x, many):
    return self.first(x) * min(len(x), 9)


def of_the_highest(self, x, many):
    return self.first(x).topk(min(len(x), 9), 0).values


def remembered(self, x, many):
    self.largest = 10 if many else self.largest
    return self.first(x)


def scaled(x):
    return x if scale is None else x * scale


def by_a_setting(self, x, many):
    return self.first(scaled(x) if many else x)


ABOVE = [
    *(doubled, by_other_weights, by_a_constant, without_gradient),
    *(by_a_number, of_the_highest, remembered, by_a_setting),
]


@pytest.mark.parametrize(
    ("head", "training"), [(AttentionPool(12, 2, width=4, hidden=3), False), (Clam(12, 2, width=4, k=2), True)]
)
def test_the_graph_is_that_of_a_trace_of_its_own(head, training) -> None:
    module = LossModule(BagNetwork(encoder(), head).train(training), logits_loss)
    first, second = trace(module, spec(6), LABEL), trace(module, spec(9), LABEL)
    lines = lines_through(first, 6, second, 9)
    assert lines is not None
    found, expected = trace_again(module, spec(23), LABEL, first, lines, 23), trace(module, spec(23), LABEL)
    assert found is not None
    for pixels in (0, 16):
        assert found.graph.with_whole(pixels).is_same_as(expected.graph.with_whole(pixels))
        assert first.graph.with_whole(pixels).is_same_as(first.graph.with_whole(0)) == (pixels == 0)
    assert [node.origin for node in found.graph.nodes] == [node.origin for node in expected.graph.nodes]


@pytest.mark.parametrize("above", ABOVE)
def test_what_looks_at_the_size_is_traced(above) -> None:
    module = LossModule(Looking(above), logits_loss)
    first, second = trace(module, spec(5), LABEL), trace(module, spec(7), LABEL)
    lines = lines_through(first, 5, second, 7)
    if lines is not None:
        assert trace_again(module, spec(8), LABEL, first, lines, 8) is not None
        assert trace_again(module, spec(12), LABEL, first, lines, 12) is None
    else:
        assert above is by_a_number
    assert module.model.largest == 0


def test_gradients_have_the_bits_of_an_engine_of_its_own(monkeypatch) -> None:
    traced = []

    def counted(*given):
        traced.append(given)
        return trace(*given)

    monkeypatch.setattr(captures, "trace", counted)
    model = BagNetwork(encoder(), AttentionPool(12, 2, width=4, hidden=3))
    engine = gg.compile(model, logits_loss, tile=(2, 1))
    target = torch.tensor([1])

    def gradients(engine, bag):
        model.zero_grad()
        torch.manual_seed(0)
        loss = engine.backward(bag, target)
        return [loss, *(parameter.grad for parameter in model.parameters())]

    for size in (4, 6, 11):
        bag = torch.rand(size, 2, 4, 4)
        found = gradients(engine, bag)
    assert len(traced) == 2
    fresh = gg.compile(model, logits_loss, tile=(2, 1))
    fresh.load_state_dict(engine.state_dict())  # the layout, which is timed
    expected = gradients(fresh, bag)
    assert all(map(torch.equal, found, expected))
    engine.plan(bag[:4], target)
    model.eval()
    engine.plan(bag[:4], target)
    model.train()
    engine.plan(bag[:5], target)
    assert len(traced) == 4
