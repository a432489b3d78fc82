"""Networks with norms, as graphs: what the tests of planning share."""

import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.devices import Machine
from gigagrad.graphs import InputSpec, capture
from gigagrad.plans import MEMORY, Amount, Problem, estimate, make_plan, split_segments
from gigagrad.plans.cost import Costs
from gigagrad.plans.cuts import Cuts

SIZE = 256
MIB = 2**20


def graph_of(model, loss=F.mse_loss, size=SIZE):
    image = InputSpec((1, 3, size, size), torch.float32, field=True)
    target = InputSpec((1, 1, size, size), torch.float32, field=True)
    return capture(model.train(), loss, image, target)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


def residual(blocks, width=8):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(blocks)), nn.Conv2d(width, 1, 1)
    )


class Ladder(nn.Module):
    """A U-Net with two skips and a norm after every convolution."""

    def __init__(self):
        super().__init__()
        widths = [(3, 4), (4, 6), (6, 8), (14, 6), (10, 4)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o in widths)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        a = self.norms[0](self.convs[0](x)).relu()
        b = self.norms[1](self.convs[1](F.max_pool2d(a, 2))).relu()
        c = self.norms[2](self.convs[2](F.max_pool2d(b, 2))).relu()
        b = self.norms[3](self.convs[3](torch.cat([b, F.interpolate(c, scale_factor=2)], 1))).relu()
        return self.head(self.norms[4](self.convs[4](torch.cat([a, F.interpolate(b, scale_factor=2)], 1))).relu())


def chain_of(graph, backward=True):
    """The chain of cuts as planning sees it."""
    costs = Costs(graph, Machine())

    def seconds(segment):
        cost = costs.of(segment, (64, 64), backward=True, roughly=True)
        return cost.forward_seconds, cost.backward_seconds

    return Cuts(graph, seconds, backward=backward)


def kept_at_best(graph):
    """Fields kept where memory is no matter."""
    return sorted(chain_of(graph).selections()[0].kept)


def problem_of(graph, budget=None, *, backward=True, base=MIB, machine=None, **more):
    """What there is to plan for, beside a process of `base` bytes that has compiled its kernels."""
    given = {"compiled_bytes": lambda count: 0} | more
    held = (Amount(estimate.PROCESS, base),)
    return Problem(
        graph=graph, backward=backward, machine=machine or Machine(), budget_bytes=budget, held=held, **given
    )


def plan_of(graph, budget=None, *, tiles=None, kept=None, **more):
    """A plan for such a problem that keeps these fields in memory."""
    there = None if kept is None else dict.fromkeys(kept, MEMORY)
    return make_plan(problem_of(graph, budget, **more), tiles=tiles, kept=there)


class Planned:
    """A ladder's problem, with plans of any tiles for one rank."""

    def __init__(self) -> None:
        self.graph = graph_of(Ladder(), size=96)
        self.problem = problem_of(self.graph)
        self.kept = kept_at_best(self.graph)
        self.segments = split_segments(self.graph, self.kept)

    def plan(self, tile=(8, 16)):
        return plan_of(self.graph, tiles=(tile,) * len(self.segments), kept=self.kept)
