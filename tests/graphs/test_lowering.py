"""A captured graph, interpreted by plain operators, is the module; its only reductions are field sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.errors import UnsupportedOperatorError
from gigagrad.graphs import FIELD_SUM, Graph, InputSpec, capture, operators
from gigagrad.graphs.graph import substitute

SHAPE = (1, 3, 7, 6)


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale)


def graph_of(function, loss=None, target=None) -> Graph:
    spec = None if target is None else InputSpec(tuple(target.shape), target.dtype, field=target.ndim > 2)
    return capture(Apply(function), loss, InputSpec(SHAPE, torch.float64, field=True), spec)


def interpret(graph: Graph, image, target=None):
    values = {}
    for node in graph.nodes:
        if node.is_source:
            known = {"image": image, "target": target, "parameter": torch.tensor(1.5, dtype=torch.float64)}
            values[node.id] = graph.constants[node.arguments["name"]] if node.op == "constant" else known[node.op]
        else:
            arguments = {name: substitute(value, values) for name, value in node.arguments.items()}
            values[node.id] = operators.call(node.op, arguments)
        assert tuple(values[node.id].shape) == node.shape, node.op
        assert values[node.id].dtype == node.dtype, node.op
    return values[graph.output]


def check(function, loss=None, target=None):
    torch.manual_seed(0)
    image = torch.randn(SHAPE, dtype=torch.float64)
    expected = Apply(function)(image)
    expected = loss(expected, target) if loss else expected
    graph = graph_of(function, loss, target)
    torch.testing.assert_close(interpret(graph, image, target), expected.detach(), rtol=1e-12, atol=1e-12)
    for node in graph.nodes:
        reads_field = any(graph[i].is_field for i in node.operands)
        assert node.is_field or not reads_field or node.op == FIELD_SUM, node.op
    return graph


REDUCTIONS = {
    "mean": lambda x: x.mean(),
    "mean over the image": lambda x: x.mean((2, 3)),
    "mean, axes kept": lambda x: x.mean((-1, -2), keepdim=True),
    "mean over everything named": lambda x: x.mean((0, 1, 2, 3)),
    "sum": lambda x: x.sum(),
    "sum in another dtype": lambda x: x.sum(dtype=torch.float32),
    "sum over channels and image": lambda x: x.sum((1, 2, 3)),
    "sum of truth values": lambda x: (x > 0).sum() + x.mean(),
    "global pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "global pool, flat": lambda x: F.adaptive_avg_pool2d(x, (1, 1)).flatten(1),
    "over channels only": lambda x: x.sum(1).mean(),
}
STRUCTURE = {
    "split": lambda x: torch.cat(x.split([1, 2], 1)[::-1], 1),
    "split in steps": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "split along the image": lambda x: torch.cat(x.split(3, 2)[::-1], 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 3)[::-1], 3),
    "unbind": lambda x: x.unbind(1)[2],
    "stack": lambda x: torch.stack([x, 2 * x], 1).sum(1),
    "stack at the end": lambda x: torch.stack([x, 2 * x], -1).sum(-1),
    "pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "on a pooled vector": lambda x: x * sum(x.mean((2, 3), keepdim=True).chunk(3, 1)),
    "stack of pooled vectors": lambda x: torch.stack([x.mean((2, 3)), x.sum((2, 3))]).sum(),
    "assignment to a channel": lambda x: torch.ones_like(x).index_put((), x) if False else assigned(x),
    "chained": lambda x: torch.cat([part * number for number, part in enumerate(x.unbind(1), 1)])[None],
}
C = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
CLASSES = torch.randint(0, 3, (1, 1, 7, 6), generator=torch.Generator().manual_seed(1))
DENSE = torch.rand(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
LOSSES = {
    "bce": (F.binary_cross_entropy_with_logits, DENSE),
    "bce sum": (lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="sum"), DENSE),
    "bce none": (lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="none").mean(), DENSE),
    "bce weighted": (lambda o, t: F.binary_cross_entropy_with_logits(o, t, t, pos_weight=C[:, None, None]), DENSE),
    "mse": (F.mse_loss, DENSE),
    "mse against a number": (lambda o, t: F.mse_loss(o, torch.zeros_like(o)) + t.sum(), DENSE),
    "mse of means": (lambda o, t: F.mse_loss(o.mean((2, 3)), t), torch.rand(1, 3, dtype=torch.float64)),
    "l1 of one mean": (lambda o, t: F.l1_loss(t, o.mean()), torch.tensor(0.3, dtype=torch.float64)),
    "l1": (F.l1_loss, DENSE),
    "smooth l1": (lambda o, t: F.smooth_l1_loss(o, t, beta=0.3), DENSE),
    "huber": (lambda o, t: F.huber_loss(o, t, reduction="sum", delta=0.3), DENSE),
    "cross entropy": (lambda o, t: F.cross_entropy(o, t[:, 0]), CLASSES),
    "cross entropy sum": (lambda o, t: F.cross_entropy(o, t[:, 0], reduction="sum"), CLASSES),
    "cross entropy weighted": (lambda o, t: F.cross_entropy(o, t[:, 0], C, ignore_index=1), CLASSES),
    "cross entropy smoothed": (
        lambda o, t: F.cross_entropy(o, t[:, 0], C, ignore_index=2, label_smoothing=0.1),
        CLASSES,
    ),
    "cross entropy of labels": (lambda o, t: F.cross_entropy(o.mean((2, 3)), t), torch.tensor([2])),
    "cross entropy of probabilities": (lambda o, t: F.cross_entropy(o, t.softmax(1), C), DENSE),
    "nll": (lambda o, t: F.nll_loss(o.log_softmax(1), t[:, 0], C, ignore_index=0), CLASSES),
    "dice": (lambda o, t: 1 - 2 * (o.sigmoid() * t).sum() / (o.sigmoid().sum() + t.sum()), DENSE),
}


def assigned(x):
    y = x.clone()
    y[:, 0] = y[:, 1] * 2
    y[:, 2] = 1
    return y


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    graph = check(REDUCTIONS[name])
    assert any(node.op == FIELD_SUM for node in graph.nodes)
    assert not graph[graph.output].is_field


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name):
    check(STRUCTURE[name])


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, target = LOSSES[name]
    graph = check(lambda x: x, loss, target)
    assert graph.has_loss


def test_a_dead_branch_leaves_no_node():
    graph = check(lambda x: (x + 0 * x.sigmoid().shape[0]).relu())
    assert not any("sigmoid" in node.op for node in graph.nodes)


REFUSED = {
    "sum over one axis": (lambda x: x.sum(2), "not over the other"),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 3), "only \\(1, 1\\)"),
    "pool's indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], "output number 1"),
    "batch statistics": (lambda x: F.batch_norm(x, None, None, training=True), "model.eval\\(\\)"),
    "dropout": (lambda x: F.dropout(x, 0.5, True), "model.eval\\(\\)"),
    "noise": (lambda x: x + torch.rand_like(x), "no row"),
    "group norm": (lambda x: F.group_norm(x, 3), "group normalisation"),
    "instance norm": (lambda x: F.instance_norm(x), "instance normalisation"),
    "maximum": (lambda x: x / x.amax(), "all axes"),
    "turned": (lambda x: x.flip(2), "along an axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    function, reason = REFUSED[name]
    with pytest.raises(UnsupportedOperatorError, match=reason) as caught:
        graph_of(function)
    assert caught.value.operator.startswith("aten.")
    assert "\n" not in str(caught.value)
