"""Sums of what tiles contribute."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gigagrad as gg
from gigagrad.devices import device_for
from gigagrad.execution import scalars
from gigagrad.execution.scalars import ScalarGraph, add
from gigagrad.graphs import GATHER, SCATTER, InputSpec, capture


@given(
    st.lists(st.integers(1, 9), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 5, 40, 10_000]),
    st.booleans(),
)
def test_sums_of_any_shape_added_in_parts(shape, dtype, at_once, last):
    noise = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=noise).to(dtype) for _ in range(3)]
    if last and len(shape) == 4:
        values[1:] = [value.contiguous(memory_format=torch.channels_last) for value in values[1:]]
    sums: dict[int, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scalars, "_AT_ONCE", at_once)
        for value in values:
            add(sums, 7, value.requires_grad_(), torch.float64)
    assert sums[7].dtype == torch.float64
    assert not sums[7].requires_grad
    expected = values[0].double() + values[1].double() + values[2].double()
    assert torch.equal(sums[7], expected.detach())


def test_a_sum_is_no_view_of_its_first_value_and_lies_as_it_does():
    first = torch.ones(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    sums: dict[int, torch.Tensor] = {}
    add(sums, 0, first, torch.float64)
    add(sums, 0, first, torch.float64)
    assert first.eq(1).all()
    assert sums[0].is_contiguous(memory_format=torch.channels_last)


def test_a_first_value_that_nobody_else_holds_becomes_the_sum():
    sums: dict[int, torch.Tensor] = {}
    given = [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 8)[:, :4]]
    held, places = given[1].detach(), [value.data_ptr() for value in given]
    for key, value in enumerate(given):
        add(sums, key, value, torch.float32, take=True)
    add(sums, 3, torch.ones(4, 4), torch.float64, take=True)
    assert [sums[key].data_ptr() == place for key, place in enumerate(places)] == [True, False, False]
    add(sums, 1, torch.ones(4, 4), torch.float32)
    assert held.eq(1).all()
    assert sums[3].dtype == torch.float64


class _Shared(nn.Module):
    """The gradients of two parameters lie in the same memory, and only one of them gets more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.full((1, 4, 1, 1), value)) for value in (0.5, 0.25))
        self.norm = nn.Sequential(nn.Conv2d(4, 4, 7), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 7), nn.BatchNorm2d(4))

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x_NCHW * self.one) + (self.one + self.two))


def test_gradients_in_one_memory_stay_apart():
    model, plain = _Shared().double(), _Shared().double()
    plain.load_state_dict(model.state_dict())
    image, target = torch.randn(1, 4, 30, 30).double(), torch.randn(1, 4, 18, 18).double()
    F.mse_loss(plain(image), target).backward()
    engine = gg.compile(model, F.mse_loss)
    engine.in_tiles = True
    engine.backward(image, target)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)


class _Scaled(nn.Module):
    """Each channel is multiplied by an entry of a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(10, 4, sparse=True), nn.Conv2d(3, 4, 3)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return self.first(x_NCHW) * self.table(torch.tensor([3])).view(1, 4, 1, 1)


@pytest.mark.parametrize("in_tiles", [False, True])
def test_sparse_gradients_are_added_up_as_dense_ones(in_tiles):
    model, image, target = _Scaled(), torch.rand(1, 3, 16, 16), torch.rand(1, 4, 14, 14)
    expected = torch.autograd.grad(F.mse_loss(model(image), target), model.table.weight)[0].to_dense()
    engine = gg.compile(model, F.mse_loss)
    engine.in_tiles = in_tiles
    engine.backward(image, target)
    assert model.table.weight.grad is not None
    torch.testing.assert_close(model.table.weight.grad, expected)


class _Tokens(nn.Module):
    """Features of every pixel, mixed over all pixels, back in the image's form: a copy of them in another order."""

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        tokens = x_NCHW.flatten(2).transpose(1, 2)
        mixed = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
        return mixed.transpose(1, 2).reshape(x_NCHW.shape)


def test_whole_values_that_nothing_reads_are_gone_before_gradients_are_made(monkeypatch):
    image = InputSpec((1, 1, 8, 8), torch.float32, field=True)
    target = InputSpec((1, 4, 8, 8), torch.float32, field=True)
    graph = capture(nn.Sequential(nn.Conv2d(1, 4, 1), _Tokens()), F.mse_loss, image, target)
    globals_ = ScalarGraph(graph, set(), device_for("cpu"), backward=True)
    (gathered,) = (node for node in graph.nodes if node.op == GATHER)
    globals_.put(gathered.id, torch.rand(gathered.shape))
    globals_.compute()
    (read,) = (node.operands[0] for node in graph.nodes if node.op == SCATTER)
    value, alive = weakref.ref(globals_.values[read]), []
    made = torch.autograd.grad

    def grad(*args, **options):
        alive.append(value() is not None)
        return made(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    globals_.accumulate(read, torch.rand(graph[read].shape))
    globals_.backward_from(0)
    assert alive == [False]
    assert globals_.cotangent(gathered.id) is not None
