"""Convolutions of few channels, by Triton's interpreter where there is no GPU, against PyTorch in float64."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gigagrad.graphs.ops import few_channels

HERE = importlib.util.find_spec("triton") is not None
interpreted = [
    pytest.mark.skipif(
        not HERE, reason="needs Triton, which comes with PyTorch for GPUs; python -m pip install triton"
    ),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU: Triton compiles, and test_on_a_gpu runs that"
    ),
]


def with_marks(test: Callable[..., None]) -> Callable[..., None]:
    for mark in interpreted:
        test = mark(test)
    return test


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Several blocks and programs for a few pixels, without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(few_channels, "_THREADS", 8)
            patch.setattr(few_channels, "_LEAST_CHUNKS", 1)
            patch.setattr(few_channels, "_MOST_STEPS", 2)
        yield


def plain(x, weight, bias, stride, before, size):
    """A convolution, padded by hand on all sides."""
    return torch.conv2d(window(x, before, extents(weight, stride, size)), weight, bias, stride)


def plain_transposed(x, weight, bias, stride, before, size):
    """A transposed convolution, cut and filled by hand."""
    y = window(torch.conv_transpose2d(x, weight, None, stride), [-b for b in before], size)
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)


def extents(weight, stride, size):
    """What an output of `size` reads."""
    return [(n - 1) * s + k for n, s, k in zip(size, stride, weight.shape[2:], strict=True)]


def window(x, before, size):
    """Rows and columns from `before` zeros before the first on."""
    more = 40
    height, width = size
    return F.pad(x, [more] * 4)[..., more - before[0] :, more - before[1] :][..., :height, :width]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, in memory of another order."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "crop":
        return F.pad(x, (3, 2, 1, 2))[..., 1:-2, 3:-2]
    return x.transpose(2, 3).contiguous().transpose(2, 3) if layout == "turned" else x.contiguous()


def compare(ours: Any, theirs: Any, leaves: list[Tensor | None], *geometry: Any) -> Tensor:
    """Compare values and all gradients, relative to the same sums of absolute values; returns the output."""
    given = [None if leaf is None else leaf.float().requires_grad_() for leaf in leaves]
    found = ours(*given, *geometry)
    cotangent = torch.randn_like(found)
    values = [found.detach(), *torch.autograd.grad(found, present(given), cotangent)]
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in given]
    absolute = [None if leaf is None else leaf.detach().abs().requires_grad_() for leaf in exact]
    expected, largest = theirs(*exact, *geometry), theirs(*absolute, *geometry)
    wanted = [expected, *torch.autograd.grad(expected, present(exact), cotangent.double())]
    bounds = [largest, *torch.autograd.grad(largest, present(absolute), cotangent.double().abs())]
    for value, true, bound in zip(values, wanted, bounds, strict=True):
        assert value.shape == true.shape
        assert ((value - true).abs() <= 1e-6 * bound).all()
    return values[0]


def present(leaves: list[Tensor | None]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf is not None]


channels = st.integers(1, 3)
kernels = st.tuples(st.integers(1, 5), st.integers(1, 6))
strides = st.tuples(st.integers(1, 4), st.integers(1, 5))
layouts = st.sampled_from(["contiguous", "channels last", "crop", "turned"])
several = settings(max_examples=6)


@with_marks
@several
@given(
    st.tuples(st.integers(1, 2), channels, st.integers(1, 6), st.integers(1, 11)), channels, kernels, strides,
    st.tuples(st.integers(-2, 4), st.integers(-2, 4)), st.tuples(st.integers(0, 4), st.integers(0, 4)), layouts,
    st.booleans(),
)  # fmt: skip
@example((1, 1, 15, 33), 3, (15, 15), (8, 8), (4, 4), (4, 4), "contiguous", True)  # the paper's first layer
@example((1, 3, 5, 9), 1, (3, 3), (1, 1), (1, 1), (1, 1), "contiguous", True)  # and its last
@example((1, 1, 1, 1), 1, (1, 1), (1, 1), (0, 0), (0, 0), "contiguous", False)
@example((1, 2, 4, 1), 2, (3, 3), (1, 1), (1, 1), (1, 1), "crop", True)  # one column
@example((1, 1, 3, 4), 2, (7, 9), (2, 15), (3, 4), (3, 4), "contiguous", True)  # a kernel larger than the input
@example((1, 1, 9, 31), 1, (2, 2), (15, 15), (0, 0), (0, 0), "contiguous", False)  # pixels that nothing reads
def test_convolution(noise, shape, channels_out, kernel, stride, before, after, layout, biased):
    over = [n + b + a - k for n, b, a, k in zip(shape[2:], before, after, kernel, strict=True)]
    assume(min(over) >= 0)
    size = tuple(n // s + 1 for n, s in zip(over, stride, strict=True))
    x = laid_out(noise(*shape).float(), layout)
    weight, bias = noise(channels_out, shape[1], *kernel), noise(channels_out) if biased else None
    made = compare(few_channels.convolved, plain, [x, weight, bias], stride, before, size)
    assert made.is_contiguous()


@with_marks
@several
@given(
    st.tuples(st.integers(1, 2), channels, st.integers(1, 3), st.integers(1, 5)), channels, kernels, strides,
    st.tuples(st.integers(-2, 4), st.integers(-2, 4)), st.tuples(st.integers(-2, 4), st.integers(-2, 4)), layouts,
    st.booleans(),
)  # fmt: skip
@example((1, 3, 2, 3), 3, (15, 15), (8, 8), (4, 4), (3, 4), "contiguous", True)  # the paper's last layer but one
@example((1, 1, 1, 1), 1, (1, 1), (1, 1), (0, 0), (0, 0), "contiguous", False)
@example((1, 1, 2, 3), 2, (2, 2), (5, 15), (0, -2), (-3, 1), "crop", True)  # pixels that get the bias alone
def test_transposed(noise, shape, channels_out, kernel, stride, before, after, layout, biased):
    sides = zip(shape[2:], stride, kernel, before, after, strict=True)
    size = tuple((n - 1) * s + k - b - a for n, s, k, b, a in sides)
    assume(min(size) >= 1)
    x = laid_out(noise(*shape).float(), layout)
    weight, bias = noise(shape[1], channels_out, *kernel), noise(channels_out) if biased else None
    compare(few_channels.transposed, plain_transposed, [x, weight, bias], stride, before, size)


@with_marks
def test_weights_in_any_memory_order(noise):
    weight = noise(3, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    compare(few_channels.convolved, plain, [noise(1, 2, 7, 9), weight, None], (1, 1), (1, 1), (7, 8))
    compare(few_channels.transposed, plain_transposed, [noise(1, 3, 3, 4), weight, None], (1, 1), (1, 1), (4, 6))
    compare(few_channels.transposed, plain_transposed, [noise(1, 3, 3, 4), weight, None], (2, 3), (1, 1), (5, 10))


@with_marks
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in lanes that nobody reads
@pytest.mark.parametrize("stride", [1, 5])
def test_what_is_not_finite_reaches_what_reads_it_alone(noise, stride):
    """Weights are filled up with zeros, and a zero times what is not finite is not finite either."""
    x, weight, y = noise(1, 2, 10, 24).float(), noise(2, 2, 3, 7).float().requires_grad_(), noise(1, 2, 3, 5).float()
    x[..., 9, :] = x[..., 23] = torch.nan  # beyond the last row and column that are read
    size = 6 // stride + 1, 16 // stride + 1
    few_channels.convolved(x, weight, None, (stride, stride), (0, 0), size).sum().backward()
    assert weight.grad.isfinite().all()
    x[0, 1, 4, 11] = y[0, 1, 1, 2] = torch.inf
    found = few_channels.convolved(x, weight, None, (stride, stride), (0, 0), size)
    assert torch.equal(found.isfinite(), torch.conv2d(x[..., :9, :23], weight, None, stride).isfinite())
    spread = torch.conv_transpose2d(y, weight, None, stride)
    size = spread.shape[2], spread.shape[3]
    made = few_channels.transposed(y, weight, None, (stride, stride), (0, 0), size)
    assert torch.equal(made.isfinite(), spread.isfinite())


@with_marks
def test_without_values_only_the_gradient_is_computed(noise, monkeypatch):
    leaves = [noise(*shape).float().requires_grad_() for shape in ((1, 2, 7, 9), (1, 2, 3, 3), (1,))]
    x, weight, bias = leaves
    expected = few_channels.convolved(x, weight, bias, (1, 1), (1, 1), (7, 9))
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    monkeypatch.setattr(few_channels, "_convolve", None)
    silent = few_channels.convolved(x, weight, bias, (1, 1), (1, 1), (7, 9), values=False)
    assert not silent.any()
    assert all(map(torch.equal, torch.autograd.grad(silent, leaves, cotangent), wanted))


@with_marks
def test_gradients_that_nobody_asks_for_are_not_computed(noise, monkeypatch):
    x, weight = noise(1, 1, 7, 9).float(), noise(1, 1, 3, 3).float().requires_grad_()
    monkeypatch.setattr(few_channels, "_transpose", None)
    few_channels.convolved(x, weight, None, (1, 1), (1, 1), (7, 9)).sum().backward()
    monkeypatch.setattr(few_channels, "_correlate", None)
    made = few_channels.convolved(x.requires_grad_(), weight.detach(), None, (1, 1), (1, 1), (7, 9))
    with pytest.raises(TypeError):
        made.sum().backward()


@with_marks
@settings(max_examples=4)
@given(
    st.sampled_from([((1, 3), 15, 8, 4), ((3, 1), 3, 1, 1), ((3, 3), 4, 4, 0), ((2, 3), 5, 2, 3)]),
    st.booleans(),
    st.data(),
)
def test_rules_run_them_on_crops(bench, some_box, noise, layer, is_transposed, data):
    (channels_in, channels_out), kernel, stride, padding = layer
    b, bias = bench(), noise(channels_out).float()
    if is_transposed:
        x, w = noise(1, channels_in, 3, 4), noise(channels_in, channels_out, kernel, kernel)
        more, operator = [min(1, stride - 1)] * 2, "conv_transpose2d.input"
    else:
        x, w = noise(1, channels_in, 19, 22), noise(channels_out, channels_in, kernel, kernel)
        more, operator = [], "conv2d.default"
    refs = b.field(x.float()), b.weight(w.float()), b.weight(bias)
    y = b.aten(operator, *refs, [stride] * 2, [padding] * 2, *([more] if more else []))
    asked = Mock(return_value=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_channels, "runs_on", asked)
        b.check(y, some_box(data, b.node(y)), tolerance=2e-4)
    assert asked.called


@pytest.mark.parametrize(
    ("weight", "stride", "dilation", "groups", "dtype", "wins"),
    [
        ((3, 1, 15, 15), 8, 1, 1, torch.float32, True),
        ((3, 3, 15, 15), 8, 1, 1, torch.float32, True),
        ((1, 3, 3, 3), 1, 1, 1, torch.float32, True),
        ((64, 3, 7, 7), 2, 1, 1, torch.float32, False),
        ((1, 16, 3, 3), 1, 1, 1, torch.float32, False),
        ((1, 3, 3, 3), 1, 2, 1, torch.float32, False),
        ((4, 1, 3, 3), 1, 1, 4, torch.float32, False),
        ((1, 1, 31, 31), 1, 1, 1, torch.float32, False),
        ((1, 3, 3, 3), 1, 1, 1, torch.float64, False),
        ((1, 3, 3, 3), 1, 1, 1, torch.bfloat16, False),
    ],
)
def test_where_they_are_used(weight, stride, dilation, groups, dtype, wins):
    assert few_channels.wins(weight, (stride, stride), (dilation, dilation), groups, dtype) is wins


def test_never_on_cpus(noise):
    assert not few_channels.runs_on(noise(1, 1, 2, 2))


def test_without_triton_pytorch_s_own_kernels_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigagrad.graphs.ops.few_channels_kernels", None)
    monkeypatch.delattr("gigagrad.graphs.ops.few_channels_kernels", raising=False)
    assert few_channels._compiles.__wrapped__(torch.device("cpu")) is False


@with_marks
def test_where_triton_finds_no_compiler_one_line_says_so(monkeypatch):
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("Failed to find C compiler.")

    assert few_channels._compiles.__wrapped__(torch.device("cpu")) is True
    monkeypatch.setattr(few_channels, "_convolve", fails)
    with pytest.warns(RuntimeWarning, match=r"Failed to find C compiler.*install a C compiler"):
        assert few_channels._compiles.__wrapped__(torch.device("cpu")) is False


COMPILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gigagrad.graphs.ops import few_channels, few_channels_kernels

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            given = dict(zip(self.kernel.arg_names, arguments))
            constants |= {n: v for n, v in given.items() if v is None or n in ("x_x", "y_x") and v == 1}
            types = {n: "*fp32" if isinstance(v, torch.Tensor) else "i32" for n, v in given.items()}
            types |= dict.fromkeys(constants, "constexpr")
            places = {(self.kernel.arg_names.index(n),): v for n, v in constants.items()}
            source = ASTSource(self.kernel, types, constexprs=places)
            made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": num_warps})
            print(self.kernel.__name__, len(made.asm["cubin"]))
        return launch

for name in ("convolve", "transpose", "correlate"):
    setattr(few_channels_kernels, name, Compiled(getattr(few_channels_kernels, name)))
for channels_in, channels_out, kernel, stride in ((1, 3, 15, 8), (3, 1, 3, 1)):
    x, weight, bias = torch.ones(1, channels_in, 90, 90), torch.ones(channels_out, channels_in, kernel, kernel), None
    for layout in (torch.contiguous_format, torch.channels_last):
        leaves = x.contiguous(memory_format=layout).requires_grad_(), weight.requires_grad_()
        y = few_channels.convolved(*leaves, bias, (stride, stride), (1, 1), (10, 10))
        torch.autograd.grad(y, leaves, y)
        bias = torch.ones(channels_out)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="needs Triton, which comes with PyTorch for GPUs")
def test_kernels_compile_without_a_gpu(tmp_path):
    """The interpreter takes Python that the compiler does not."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", textwrap.dedent(COMPILES)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    assert {name for name, _ in lines} == {"convolve", "transpose", "correlate"}
    assert all(int(size) > 0 for _, size in lines)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("channels_in", "channels_out", "kernel", "stride", "side", "layout"),
    [
        (1, 3, 15, 8, 1100, "contiguous"),
        (3, 3, 15, 8, 400, "crop"),
        (3, 1, 3, 1, 700, "contiguous"),
        (3, 1, 3, 1, 300, "channels last"),
        (2, 3, 4, 3, 90, "turned"),
    ],
)
def test_on_a_gpu(noise, channels_in, channels_out, kernel, stride, side, layout):
    """Both kinds of convolution; and twice the same bits."""
    assert few_channels.runs_on(torch.ones(1, device="cuda")), "Triton makes no kernels here; the warning says why"
    steps, before = (stride, stride), (kernel // 3, kernel // 3)
    weight, bias = noise(channels_out, channels_in, kernel, kernel).cuda(), noise(channels_out).cuda()
    x = laid_out(noise(1, channels_in, side, side + 7).float().cuda(), layout)
    size = tuple((n + 2 * before[0] - kernel) // stride + 1 for n in x.shape[2:])
    compare(few_channels.convolved, plain, [x, weight, bias], steps, before, size)
    weight = weight.transpose(0, 1).contiguous()
    x = laid_out(noise(2, channels_in, side // 8, side // 8 + 3).float().cuda(), layout).requires_grad_()
    height, width = ((n - 1) * stride + kernel - 2 * before[0] for n in x.shape[2:])
    compare(few_channels.transposed, plain_transposed, [x, weight, bias], steps, before, (height, width))
    leaves = x, weight.float().requires_grad_(), bias.float().requires_grad_()
    y = few_channels.transposed(*leaves, stride=steps, before=before, size=(height, width))
    cotangent = torch.randn_like(y)
    first, again = (torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
