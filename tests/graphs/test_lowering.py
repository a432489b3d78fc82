"""A captured graph, interpreted by plain operators, is the module; reductions and gathered fields leave the image."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.errors import UnsupportedOperatorError
from gigagrad.graphs import FIELD_SUM, GATHER, SCATTER, Graph, InputSpec, capture, operators
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
            values[node.id] = ({**graph.constants, **graph.closed}).get(node.arguments["name"], known.get(node.op))
        elif node.op == SCATTER:
            values[node.id] = values[node.operands[0]]
        else:
            arguments = {name: substitute(value, values) for name, value in node.arguments.items()}
            values[node.id] = operators.call(node.op, arguments)
        if isinstance(values[node.id], torch.Tensor):
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
        assert node.is_field or not reads_field or node.is_reduction or node.op == GATHER, node.op
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


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, target = LOSSES[name]
    graph = check(lambda x: x, loss, target)
    assert graph.has_loss


def test_copies_leave_no_node():
    """Not those of dropout that drops nothing, either; a copy that is to lie otherwise stays."""
    graph = check(lambda x: F.dropout(x.relu().clone(), 0.0).tanh())
    assert [node.op for node in graph.nodes][-2:] == ["aten.relu.default", "aten.tanh.default"]
    assert any("clone" in node.op for node in check(lambda x: x.relu().transpose(2, 3).contiguous()).nodes)


def test_a_dead_branch_leaves_no_node():
    graph = check(lambda x: (x + 0 * x.sigmoid().shape[0]).relu())
    assert not any("sigmoid" in node.op for node in graph.nodes)


REWRITTEN = {
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "maximum per channel": lambda x: F.adaptive_max_pool2d(x, 1),
    "maximum": lambda x: x / x.amax(),
    "minimum": lambda x: x * x.min(),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 3, torch.ones(3).double(), torch.zeros(3).double()),
    "instance norm": lambda x: F.instance_norm(x),
    "layer norm over the image": lambda x: F.layer_norm(x, [3, 7, 6]),
    "variance": lambda x: x.var((2, 3), keepdim=True),
    "deviation": lambda x: x.std(),
    "deviation and mean": lambda x: sum(torch.std_mean(x, (0, 2, 3), correction=2)),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_statistics_of_the_image_are_reductions(name):
    graph = check(REWRITTEN[name])
    assert any(node.is_reduction for node in graph.nodes)
    assert not any(node.op == GATHER for node in graph.nodes)


WHOLE = {
    "sum over one axis": (lambda x: x.sum(2), "aten.sum.dim_IntList"),
    "pool's indices": (
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1] * 1.0,
        "aten.max_pool2d_with_indices.default",
    ),
    "turned": (lambda x: x.flip(2), "aten.flip.default"),
    "tokens": (lambda x: x.flatten(2), "aten.view.default"),
    "fourier": (lambda x: torch.fft.rfft2(x).abs(), "aten.fft_rfft2.default"),
    "matrix product": (lambda x: torch.einsum("nchw,nchv->nwv", x, x), "aten.einsum.default"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_tile_rule_reads_the_whole_field(name):
    function, operator = WHOLE[name]
    graph = check(function)
    assert operator in {node.op for node in graph.nodes if node.whole}


def test_an_image_made_by_a_whole_field_operator_is_a_field_again():
    graph = check(lambda x: F.avg_pool2d(x.flip(2), 2) + F.avg_pool2d(x, 2))
    assert [node.op for node in graph.nodes if node.is_field and not node.is_source].count(
        "aten.avg_pool2d.default"
    ) == 2
    assert sum(node.op == SCATTER for node in graph.nodes) == 1


def test_going_whole_twice_gathers_once():
    graph = check(lambda x: x.flip(2) + F.relu(x).flip(3) + x.flip(3))
    assert sum(node.op == GATHER for node in graph.nodes) == 2


RANDOM = {
    "dropout": (lambda x: F.dropout(x, 0.25, True), lambda x: x != 0, 0.75),
    "noise": (lambda x: torch.rand_like(x), lambda x: (x >= 0) & (x < 1), 1.0),
    "alpha dropout": (lambda x: F.alpha_dropout(torch.ones_like(x), 0.3, True), lambda x: x > 0, 0.7),
    "normal noise": (lambda x: torch.randn_like(x), lambda x: x.abs() < 1, 0.6827),
    "normal": (lambda x: torch.empty_like(x).normal_(2, 3), lambda x: (x - 2).abs() < 3, 0.6827),
    "normal of pixels": (lambda x: torch.normal(0 * x + 1, 0 * x + 2), lambda x: (x - 1).abs() < 2, 0.6827),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 3), lambda x: (x >= -1) & (x < 0), 0.25),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), lambda x: x > math.log(2) / 2, 0.5),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.25), lambda x: x == 1, 0.25),
    "cauchy": (lambda x: torch.empty_like(x).cauchy_(1, 2), lambda x: (x - 1).abs() < 2, 0.5),
    "log normal": (lambda x: torch.empty_like(x).log_normal_(1, 0.5), lambda x: x > math.e, 0.5),
    "integers": (lambda x: torch.empty_like(x).random_(2, 6), lambda x: x == 5, 0.25),
    "integers from 0": (lambda x: torch.empty_like(x).random_(4), lambda x: x == 0, 0.25),
    "integers like": (lambda x: torch.randint_like(x, -1, 3), lambda x: x == -1, 0.25),
    "bernoulli of pixels": (lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()), lambda x: x == 1, 0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_have_the_right_distribution(name):
    function, event, share = RANDOM[name]
    graph = capture(Apply(function), None, InputSpec((1, 8, 100, 100), torch.float64, field=True), None)
    assert not any(node.op == GATHER for node in graph.nodes)
    torch.manual_seed(0)
    image = torch.randn(1, 8, 100, 100, dtype=torch.float64)
    first, second = (interpret(graph, image) for _ in range(2))
    for drawn in (first, second):
        assert abs(event(drawn).double().mean().item() - share) < 0.006  # more than four standard deviations
        assert abs(event(drawn[..., :-1] * 1.0).double().mean().item() - share) < 0.006
    assert not torch.equal(first, second), "each run has a key of its own"


def test_an_image_without_pixels_is_refused():
    with pytest.raises(UnsupportedOperatorError, match="too small") as caught:
        graph_of(lambda x: x[:, :, 7:])
    assert "\n" not in str(caught.value)
