"""Whether the last stage needs one pass or two, on hand-made losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.plans import Tiles, split_stages
from gigagrad.plans.schedule import Cotangents, last_cotangents, make_passes

AFFINE, SCALED, AFTER = Cotangents


class LearnedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, o, t):
        return self.weight * (o * t).mean() + self.weight**2


LOSSES = {
    "mean": (lambda o, t: F.mse_loss(o, t), AFFINE),
    "sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), AFFINE),
    "weighted sum": (lambda o, t: 3 * (o * t).mean() - o.sum() / 7 + 2, AFFINE),
    "difference": (lambda o, t: 1 - (o * t).mean(), AFFINE),
    "plus a count": (lambda o, t: o.mean() + (t > 0).sum(), AFFINE),
    "learned factor": (LearnedWeight(), AFFINE),
    "mean of channel sums": (lambda o, t: o.sum((0, 2, 3)).mean(), AFFINE),
    "times itself": (lambda o, t: (lambda m: m * m.detach())(o.mean()), SCALED),
    "logarithm": (lambda o, t: torch.log(1 + (o * t).square().mean()), SCALED),
    "square": (lambda o, t: o.mean() ** 2, SCALED),
    "over a count": (lambda o, t: (o * (t > 0)).sum() / (t > 0).sum(), SCALED),
    "one over": (lambda o, t: 1 / (1 + o.square().mean()), SCALED),
    "product of two": (lambda o, t: o.mean() * (o * t).mean(), AFTER),
    "dice": (lambda o, t: 1 - 2 * (o * t).sum() / (o.sum() + t.sum()), AFTER),
    "bce and dice": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t) + (o * t).sum() / (o + t).sum(),
        AFTER,
    ),
    "norm of a vector": (lambda o, t: torch.cat([o, o * t], 1).mean((2, 3)).square().sum(), AFTER),
}


@pytest.mark.parametrize("name", LOSSES)
def test_rule(graph_of, name):
    loss, rule = LOSSES[name]
    graph = graph_of(nn.Conv2d(1, 1, 1), loss, (6, 5))
    (stage,) = stages = split_stages(graph)
    assert last_cotangents(graph, stage) is rule
    passes = make_passes(graph, stages, backward=True)
    both = (Tiles(0, "forward"), Tiles(0, "backward"))
    assert passes == (both if rule is AFTER else (Tiles(0, "one pass"),))
    assert make_passes(graph, stages, backward=False) == (Tiles(0, "forward"),)


def test_stages_run_backward_in_reverse(gate):
    assert make_passes(gate, split_stages(gate), backward=True) == (
        Tiles(0, "forward"),
        Tiles(1, "one pass"),
        Tiles(0, "backward"),
    )


def test_a_frozen_network_has_no_backward(graph_of):
    graph = graph_of(nn.Conv2d(1, 1, 1).requires_grad_(False), F.mse_loss, (6, 5))
    assert make_passes(graph, split_stages(graph), backward=True) == (Tiles(0, "forward"),)


def test_a_stage_before_the_first_parameter_is_not_differentiated(graph_of):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.conv(x - x.mean())

    graph = graph_of(Normalised(), F.mse_loss, (6, 5))
    assert make_passes(graph, split_stages(graph), backward=True) == (Tiles(0, "forward"), Tiles(1, "one pass"))
