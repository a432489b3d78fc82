"""Predicted bytes of a tile against the bytes of tensors that are really alive while it runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gigagrad.allowances import whole_pages
from gigagrad.devices import device_for
from gigagrad.execution.scalars import ScalarGraph
from gigagrad.execution.tile_program import SegmentPrograms
from gigagrad.graphs import GATHER, InputSpec, capture
from gigagrad.plans import Grid, split_segments
from gigagrad.plans.memory import (
    _cast_bytes,
    compiled_convolutions,
    compiled_for_tiles,
    saved_by_convolutions,
    tile_bytes,
    whole_compiled_convolutions,
    whole_field_bytes,
    worst_tile,
)
from tests.plans.networks import Ladder, residual
from tests.plans.networks import graph_of as colour_graph_of

MIB = 2**20
SMALL = 16 * 2**10
"""Scalars, counts and rearranged weights are not worth predicting."""


class AliveBytes(TorchDispatchMode):
    """The peak of the storages made by operators and not yet freed; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        return result


def measured_peak(graph, segment, tile, *, backward: bool) -> int:
    """Runs one tile as the engine does and returns the peak bytes of its tensors, parameters not counted."""
    program = SegmentPrograms(graph, segment, torch.device("cpu")).at(tile)
    boundary = {
        i: torch.rand(graph[i].shape, dtype=graph[i].dtype).requires_grad_(backward and graph[i].differentiable)
        for i in segment.globals
    }
    with AliveBytes() as alive:
        crops = {}
        for i in segment.reads:
            if (box := tile.box(i)) is not None:
                crops[i] = torch.rand((*graph[i].shape[:-2], *box.shape)).to(graph[i].dtype)
        with torch.set_grad_enabled(backward):
            shares = program.run(tile, crops, boundary)
            sums = program.partial_sums(tile, shares)
        shares.clear()
        leaves = [value for value in boundary.values() if value.requires_grad]
        outputs = [value for value in sums.values() if value.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
    return alive.peak


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Pyramid(nn.Module):
    """Downsampling, upsampling, concatenation, an attention by multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 8, 3, padding=1)
        self.c = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x):
        a = F.silu(self.a(x))
        b = F.gelu(self.b(F.max_pool2d(a, 2)))
        up = F.interpolate(b, size=a.shape[-2:], mode="bilinear")
        joined = torch.cat([a, up], 1)
        return self.c(joined * torch.sigmoid(joined) / (1 + joined**2))


def cross_entropy(o, t):
    return F.cross_entropy(torch.cat([o, -o], 1), t[:, 0].long())


@pytest.fixture(scope="module")
def graphs(graph_of, models):
    size = (120, 150)
    bce = F.binary_cross_entropy_with_logits
    made = {
        "unet": graph_of(models.UNet(), bce, size),
        "gate": graph_of(models.Gate(), F.mse_loss, (121, 151), (61, 76)),
        "residual": graph_of(Residual().eval(), bce, size),
        "pyramid": graph_of(Pyramid(), cross_entropy, size),
        "frozen": graph_of(Residual().eval().requires_grad_(False), bce, size),
        "square": graph_of(nn.Sequential(nn.Conv2d(1, 4, 3)), lambda o, t: (o * o).mean() + t.mean(), size),
    }
    return lambda name: made[name]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", ["unet", "gate", "residual", "pyramid", "frozen", "square"])
@given(tile=st.tuples(st.integers(24, 110), st.integers(24, 110)))
@settings(max_examples=6)
def test_predicted_bytes_are_enough(graphs, name, tile, backward):
    graph = graphs(name)
    for segment in split_segments(graph):
        grid = Grid(graph, segment, tile)
        predicted = tile_bytes(graph, segment, worst_tile(grid), backward=backward)[0]
        for tile_id in {0, len(grid) // 2, len(grid) - 1}:
            assert measured_peak(graph, segment, grid[tile_id], backward=backward) <= predicted + SMALL


class Then(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 1)
        self.function = function

    def forward(self, x):
        return self.function(self.conv(x))


def eight(t):
    return t.expand(1, 8, -1, -1)


def mean(o, t):
    return o.mean() + 0 * t.sum()


OPERATORS = {
    "max_pool": (lambda x: F.max_pool2d(x, 2), mean),
    "power": (lambda x: x**3, mean),
    "quotient": (lambda x: x / (x + 1), mean),
    "reciprocal": (lambda x: 1 / (x + 1), mean),
    "square": (lambda x: x * x, mean),
    "where": (lambda x: torch.where(x > 0, x, 2 * x), mean),
    "resize by 3": (lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"), mean),
    "reflect": (lambda x: F.pad(x, [3, 3, 3, 3], "reflect"), mean),
    "logsumexp": (lambda x: x.logsumexp(1, keepdim=True), mean),
    "normalize": (lambda x: F.normalize(x, dim=1), mean),
    "cross entropy": (lambda x: x, lambda o, t: F.cross_entropy(o, t[:, 0].long())),
    "smoothed": (lambda x: x, lambda o, t: F.cross_entropy(o, t[:, 0].long(), torch.ones(8), label_smoothing=0.1)),
    "bce": (lambda x: x, lambda o, t: F.binary_cross_entropy_with_logits(o, eight(t), pos_weight=torch.ones(8, 1, 1))),
    "huber": (lambda x: x, lambda o, t: F.huber_loss(o, eight(t))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_intermediate_results(graph_of, name):
    """Those whose formulas allocate more than their result and what they save."""
    function, loss = OPERATORS[name]
    graph = graph_of(Then(function), loss, (60, 75))
    (segment,) = split_segments(graph)
    tile = worst_tile(Grid(graph, segment, (400, 400)))
    for backward in (True, False):
        predicted = tile_bytes(graph, segment, tile, backward=backward)[0]
        assert measured_peak(graph, segment, tile, backward=backward) <= predicted + SMALL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "residual", "pyramid"])
def test_predicted_bytes_are_not_far_too_many(graphs, name):
    """Else the budget would be left unused: PyTorch's own workspaces are the reason for any difference."""
    graph = graphs(name)
    (segment,) = split_segments(graph)
    tile = worst_tile(Grid(graph, segment, (120, 150)))
    measured = measured_peak(graph, segment, tile, backward=True)
    assert tile_bytes(graph, segment, tile, backward=True)[0] <= 1.6 * measured


def test_the_worst_tile_has_the_largest_crop(graphs):
    graph = graphs("residual")
    (segment,) = split_segments(graph)
    grid = Grid(graph, segment, (30, 40))
    image = graph.source("image").id
    largest = max(grid[i].box(image).area for i in range(len(grid)))
    assert worst_tile(grid).box(image).area == largest


class Attention(nn.Module):
    """Tokens of 4 x 4 px, eight times the same block of a transformer, their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.qkv = nn.Conv2d(1, 32, 4, 4), nn.LayerNorm(32), nn.Linear(32, 96)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        for _ in range(8):
            tokens = self._block(tokens)
        return self.head(tokens.mean(1))

    def _block(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(tokens)).reshape(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        tokens = tokens + (weights @ v).transpose(1, 2).reshape(tokens.shape)
        return tokens + self.mlp(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_whole_fields_take_what_was_predicted(graph_of, backward):
    graph = graph_of(Attention(), lambda y, t: (y - t.mean()).square().mean(), (64, 96))
    torch.manual_seed(0)
    values: dict[int, torch.Tensor] = {}
    scalars = ScalarGraph(graph, set(), device_for("cpu"), backward=backward)
    for node in graph.nodes:
        if node.is_source and not node.is_field:
            stored = graph.constants.get(node.arguments["name"])
            values[node.id] = torch.rand(node.shape, dtype=node.dtype) if stored is None else stored
        elif node.op == GATHER or node.is_reduction:
            values[node.id] = torch.rand(node.shape, dtype=node.dtype)
    with AliveBytes() as alive:
        for i, value in values.items():
            scalars.put(i, value.clone())
        scalars.compute()
        if backward:
            scalars.start()
            scalars.backward_from(0)
    parameters = sum(node.nbytes for node in graph.nodes if node.op == "parameter")
    predicted = whole_field_bytes(graph, backward=backward)
    assert alive.peak - parameters * (2 if backward else 1) - SMALL <= predicted <= 2 * alive.peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_cotangents_of_weights_that_were_cast_wait_for_one_another(precision):
    """Those of whole-field operators; those of convolutions arrive segment by segment."""
    image = InputSpec((1, 1, 64, 96), torch.float32, field=True)
    model = Attention()
    graph = capture(model, lambda y, t: (y.float() - t).mean(), image, image, precision)
    chunks = nn.ModuleList((model.qkv, model.mlp)), model.head
    block, head = (sum(parameter.numel() for parameter in chunk.parameters()) for chunk in chunks)
    assert _cast_bytes(graph) == (2 * (8 * block + head) if precision else 0)  # the block is cast at every use


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(0, 0), (5, 5), (2 * MIB - 1, 2 * MIB - 1), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)]
)
def test_large_blocks_take_whole_huge_pages(nbytes, pages):
    assert whole_pages(nbytes) == pages


class ConvolutionShapes(TorchDispatchMode):
    """What distinct convolutions are asked for: every one is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            _, _, _, _, padding, _, _, output_padding, _ = args
            self.seen.add((args[0].shape, args[1].data_ptr(), *padding, *output_padding))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "gate", "residual", "pyramid"])
@given(tile=st.tuples(st.integers(8, 130), st.integers(8, 160)))
@example(tile=(58, 76))  # crops of transposed convolutions that differ by a pixel
@settings(max_examples=6)
def test_every_convolution_is_compiled_for_every_shape_of_its_crop(graphs, name, tile):
    graph = graphs(name)
    for segment in split_segments(graph):
        grid = Grid(graph, segment, tile)
        assert max(grid.shape) <= 24  # more are sampled
        programs = SegmentPrograms(graph, segment, torch.device("cpu"))
        boundary = {i: torch.rand(graph[i].shape, dtype=graph[i].dtype) for i in segment.globals}
        with ConvolutionShapes() as shapes, torch.no_grad():
            for index in range(len(grid)):
                crops = {}
                for i in segment.reads:
                    if (box := grid[index].box(i)) is not None:
                        crops[i] = torch.zeros((*graph[i].shape[:-2], *box.shape), dtype=graph[i].dtype)
                programs.at(grid[index]).run(grid[index], crops, boundary)
        assert compiled_convolutions(grid, backward=False) == len(shapes.seen)
        assert compiled_for_tiles(grid, (grid[index] for index in range(len(grid)))) == len(shapes.seen)
        assert compiled_convolutions(grid, backward=True) == 3 * len(shapes.seen)


def test_convolutions_of_whole_fields_are_compiled_once(graph_of):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x):
            return self.conv(x.flatten(2)).reshape(x.shape)

    graph = graph_of(Whole(), F.mse_loss, (20, 20))
    assert whole_compiled_convolutions(graph, backward=True) == 3
    assert whole_compiled_convolutions(graph, backward=False) == 1


@pytest.mark.parametrize("network", [Ladder(), residual(2)])
def test_whole_fields_take_no_less_than_what_their_convolutions_read(network):
    graph = colour_graph_of(network, size=64)
    areas = sorted({node.size(0) * node.size(1) for node in graph.nodes if node.is_field})
    least = [saved_by_convolutions(graph, pixels) for pixels in areas]
    taken = [whole_field_bytes(graph.with_whole(pixels), backward=True) for pixels in areas]
    assert 0 < least[-1] < taken[-1]
    assert least == sorted(least)
    assert all(few <= many for few, many in zip(least, taken, strict=True))
    assert saved_by_convolutions(graph, areas[0] - 1) == 0
