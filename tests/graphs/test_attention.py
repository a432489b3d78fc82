"""Attention among all positions, as models write it: one operator, no matrix of all pairs."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import gigagrad as gg
from gigagrad.graphs import InputSpec
from gigagrad.graphs.capture.trace import capture

SIDE = 12
POSITIONS = SIDE * SIDE
WIDTH = 8


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(((q @ k.transpose(-2, -1)) * 0.3 / 2).softmax(-1), 0.0) @ v


def batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q / 2, k.transpose(1, 2)), 2), v).reshape(shape)


class Mixing(nn.Module):
    """Attention among all pixels, added to them, by a function of queries, keys and values."""

    def __init__(self, function, heads: tuple[int, ...], *, narrow: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.function, self.heads, self.turned = function, heads, turned
        self.queries, self.keys = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(3, WIDTH, 1)
        self.values = nn.Conv2d(3, WIDTH // 2 if narrow else WIDTH, 1)
        self.head = nn.Conv2d(WIDTH // 2 if narrow else WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = [one(x).flatten(2).unflatten(1, (*self.heads, -1)) for one in (self.queries, self.keys, self.values)]
        q, k, v = (one.transpose(-2, -1) if self.turned else one.transpose(-2, -1).contiguous() for one in tokens)
        mixed = self.function(q, k, v).transpose(-2, -1).reshape(1, -1, *x.shape[-2:])
        return self.head(mixed)


class Module(nn.Module):
    """PyTorch's own module, which averages the weights of its heads for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.attention = nn.Conv2d(3, WIDTH, 1), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inside(x).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0].mean(-1).reshape(1, 1, *x.shape[-2:])


WAYS = {
    "kernel, three axes": lambda: Mixing(kernel, ()),
    "kernel, four axes": lambda: Mixing(kernel, (2,)),
    "kernel, five axes": lambda: Mixing(kernel, (2, 2)),
    "kernel, columns": lambda: Mixing(kernel, (2,), turned=True),
    "kernel, narrow values": lambda: Mixing(kernel, (2,), narrow=True),
    "products": lambda: Mixing(products, (2,)),
    "products, columns": lambda: Mixing(products, (), turned=True),
    "products, narrow values": lambda: Mixing(products, (2,), narrow=True),
    "batches": lambda: Mixing(batches, (2,)),
    "module": Module,
}


def largest(graph) -> int:
    return max(prod(node.shape) for node in graph.nodes)


def captured(model: nn.Module):
    return capture(
        model,
        F.mse_loss,
        InputSpec((1, 3, SIDE, SIDE), torch.float64, field=True),
        InputSpec((1, 1, SIDE, SIDE), torch.float64, field=True),
    )


@pytest.mark.parametrize("way", WAYS)
def test_no_matrix_of_all_pairs(way):
    graph = captured(WAYS[way]().double())
    assert [node.op for node in graph.nodes].count("gigagrad.attention") == 1
    assert largest(graph) < POSITIONS**2


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("batches", "module")])
def test_no_copies_of_what_it_reads(way):
    nodes = captured(WAYS[way]().double()).nodes
    (attention,) = (node for node in nodes if node.op == "gigagrad.attention")
    behind, stack = set(), [*attention.operands]
    while stack:
        behind.add(i := stack.pop())
        stack += nodes[i].operands
    assert "aten.clone.default" not in {nodes[i].op for i in behind}


@pytest.mark.parametrize("way", WAYS)
def test_exact(way):
    torch.manual_seed(0)
    model = WAYS[way]().double()
    image, target = torch.rand(1, 3, SIDE, SIDE).double(), torch.rand(1, 1, SIDE, SIDE).double()
    expected = F.mse_loss(model(image), target)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    engine = gg.compile(model, F.mse_loss, tile=(5, 7))
    assert abs(engine.backward(image, target) - expected) < 1e-12
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_in_bfloat16(way):
    """No matrix of all pairs there either, and gradients as near to float64 as eight bits allow."""
    torch.manual_seed(0)
    model = WAYS[way]()
    image, target = torch.rand(1, 3, SIDE, SIDE), torch.rand(1, 1, SIDE, SIDE)
    exact = copy.deepcopy(model).double()
    F.mse_loss(exact(image.double()), target.double()).backward()
    field = InputSpec((1, 3, SIDE, SIDE), torch.float32, field=True)
    label = InputSpec((1, 1, SIDE, SIDE), torch.float32, field=True)
    assert largest(capture(model, F.mse_loss, field, label, torch.bfloat16)) < POSITIONS**2
    gg.compile(model, F.mse_loss, tile=(5, 7), precision="bfloat16").backward(image, target)
    found, expected = (
        parameters_to_vector([p.grad for p in each.parameters() if p.grad is not None]) for each in (model, exact)
    )
    assert (found - expected).norm() < 0.01 * expected.norm()


class OfABag(nn.Module):
    """Attention among all patches of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.attention = nn.Conv2d(3, WIDTH, 2), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, bag: Tensor) -> Tensor:
        tokens = self.encoder(bag).flatten(1)[None]
        return self.attention(tokens, tokens, tokens)[0].mean()


def test_among_the_patches_of_a_bag():
    model, shape = OfABag().double(), (40, 3, 2, 2)
    graph = capture(
        model,
        F.mse_loss,
        InputSpec(shape, torch.float64, field=True, bag=True),
        InputSpec((), torch.float64, field=False),
    )
    assert [node.op for node in graph.nodes].count("gigagrad.attention") == 1
    assert largest(graph) < 40**2


class Weights(Mixing):
    """The weights are used, too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).flatten(2).transpose(1, 2) for one in (self.queries, self.keys, self.values))
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).reshape(1, -1, *x.shape[-2:])) + weights.amax()


@pytest.mark.parametrize(
    "other",
    [
        lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
        lambda q, k, v: (q @ k.transpose(-2, -1)).relu() @ v,
        lambda q, k, v: (q @ k.transpose(-2, -1) + q[..., :1]).softmax(-1) @ v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q @ q.transpose(-2, -1)),
    ],
    ids=["over queries", "no softmax", "added", "causal", "mask"],
)
def test_what_is_something_else_stays(other):
    torch.manual_seed(0)
    model = Mixing(other, (2,)).double()
    assert "gigagrad.attention" not in [node.op for node in captured(model).nodes]


def test_few_positions_of_many_channels_stay():
    model = Mixing(products, ()).double()
    graph = capture(
        model,
        F.mse_loss,
        InputSpec((1, 3, 3, 3), torch.float64, field=True),
        InputSpec((1, 1, 3, 3), torch.float64, field=True),
    )
    assert "gigagrad.attention" not in [node.op for node in graph.nodes]


def test_weights_that_are_used_stay_exact():
    torch.manual_seed(0)
    model = Weights(products, ()).double()
    image, target = torch.rand(1, 3, SIDE, SIDE).double(), torch.rand(1, 1, SIDE, SIDE).double()
    expected = F.mse_loss(model(image), target)
    assert abs(gg.compile(model, F.mse_loss, tile=(5, 7)).backward(image, target) - expected) < 1e-12
