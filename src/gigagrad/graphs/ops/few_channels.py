"""Convolutions of few channels on a GPU, by kernels of our own (`few_channels_kernels.py`), forward and all gradients.

cuDNN's kernels compute channels in blocks of 32 or more, so of few channels most of what they do is padding. Ours read
any strides, pad on all sides by themselves, and add up in an order that sizes fix: no atomics, the same bits each time.
They compute in float32 throughout, whatever PyTorch's flags say of TF32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Pair = tuple[int, int]

_MOST_CHANNELS = 4
_MOST_LOADS = 16
"""Loads of a row of the kernel, each as wide as the stride, up to which the compiled loops stay small."""
_ROWS = 4
"""Rows of outputs that share what they read, at stride 1."""
_MOST_UNROLLED = 432
"""Products of an output block up to which rows share what they read: the code has a line for each."""
_MOST_SUMS = 72
"""Sums that a thread of the weights' gradient keeps in registers; half as many where rows share what they read."""
_THREADS = 128
_MOST_STEPS = 32
_LEAST_CHUNKS = 16
"""Rows of outputs, or groups of rows, that one program of the weights' gradient goes through at most; and into how many
programs they are divided before these get longer.
"""


def wins(weight: Sequence[int], stride: Pair, dilation: Pair, groups: int, dtype: torch.dtype) -> bool:
    """Tell whether ours are faster than cuDNN's kernels, for a weight of this shape, of either kind of convolution."""
    # In the paper's step an H200 spends 0.05 s in ours, 0.4 in cuDNN's. `python bench/few_channels.py` on a GPU prints
    # both for each layer, and beyond it for up to 8 channels.
    few = max(weight[:2]) <= _MOST_CHANNELS and -(-weight[3] // stride[1]) <= _MOST_LOADS
    return few and dilation == (1, 1) and groups == 1 and dtype == torch.float32


def runs_on(x_NCHW: torch.Tensor) -> bool:
    """Tell whether the kernels run where a crop lies."""
    return x_NCHW.device.type == "cuda" and _compiles(x_NCHW.device)


def convolved(
    x_NCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    before: Pair,
    size: Pair,
    *,
    values: bool = True,
) -> torch.Tensor:
    """Convolve: `before` zeros come before the first row and column, and as many after the last as an output of `size`
    reads; negative, pixels are skipped. Without `values` make zeros that have its gradient.
    """
    made: torch.Tensor = _FewChannels.apply(x_NCHW, weight, bias, stride, before, size, False, values)  # type: ignore[no-untyped-call]
    return made


def transposed(
    x_NCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Pair, before: Pair, size: Pair
) -> torch.Tensor:
    """Convolve transposed, leaving out the first `before` rows and columns; negative, as many more of the bias alone
    come first, and so they do last as far as `size` goes.
    """
    made: torch.Tensor = _FewChannels.apply(x_NCHW, weight, bias, stride, before, size, True, True)  # type: ignore[no-untyped-call]
    return made


class _FewChannels(torch.autograd.Function):
    """A convolution, or a transposed one, by our kernels: each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        before: Pair,
        size: Pair,
        is_transposed: bool,
        values: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        ctx.geometry, ctx.is_transposed = (stride, before), is_transposed
        if not values:
            return given.new_zeros(()).expand(given.shape[0], weight.shape[0], *size)
        return (_transpose if is_transposed else _convolve)(given, weight, bias, stride, before, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        to_given, to_weight, to_bias = ctx.needs_input_grad[:3]
        x, y = (cotangent, given) if ctx.is_transposed else (given, cotangent)
        (stride, before), size = ctx.geometry, (given.shape[2], given.shape[3])
        adjoint = _convolve if ctx.is_transposed else _transpose
        return (
            adjoint(cotangent, weight, None, stride, before, size) if to_given else None,
            _correlate(x, y, weight, stride, before) if to_weight else None,
            cotangent.sum((0, 2, 3)) if to_bias else None,
            *(None,) * 5,
        )


@cache
def _compiles(device: torch.device) -> bool:
    """Tell whether Triton is here and makes kernels for a device: it needs a C compiler and Python's headers."""
    try:
        from gigagrad.graphs.ops import few_channels_kernels  # noqa: F401
    except ImportError:
        return False
    one = torch.ones(1, 1, 1, 1, device=device)
    try:
        return bool(_convolve(one, one, None, (1, 1), (0, 0), (1, 1)) == 1)
    except Exception as error:
        warnings.warn(
            f"Triton makes no kernel for {device} ({type(error).__name__}: {error}), so convolutions of few channels "
            "run by cuDNN, several times slower; install a C compiler and Python's headers (gcc, python3-dev)",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Pair, before: Pair, size: Pair
) -> torch.Tensor:
    (co, ci, kh, kw), (o, i, y, x_) = weight.shape, weight.stride()
    constants = {"CI": ci, "CO": co, "KH": kh, "KW": kw, "W_0": 0, "W_O": o, "W_I": i, "W_Y": y, "W_X": x_}
    return _gathered(x, weight, bias, stride, before, size, constants)


def _transpose(
    y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Pair, before: Pair, size: Pair
) -> torch.Tensor:
    from gigagrad.graphs.ops import few_channels_kernels as kernels

    (co, ci, kh, kw), (w_o, w_i, w_y, w_x) = weight.shape, weight.stride()
    if stride == (1, 1):  # a convolution with the weights turned by half a circle
        turned = {"W_0": (kh - 1) * w_y + (kw - 1) * w_x, "W_O": w_i, "W_I": w_o, "W_Y": -w_y, "W_X": -w_x}
        constants = {"CI": co, "CO": ci, "KH": kh, "KW": kw, **turned}
        return _gathered(y, weight, bias, stride, (kh - 1 - before[0], kw - 1 - before[1]), size, constants)
    x = y.new_empty(y.shape[0], ci, *size)
    phases = _power_of_two(stride[1])
    block = max(1, 8 * _THREADS // phases)
    first_y, first_x = before[0] // stride[0], before[1] // stride[1]
    blocks = -(-((size[1] - 1 + before[1]) // stride[1] + 1 - first_x) // block)
    _launch(
        kernels.transpose, (blocks * size[0], y.shape[0]),
        y, weight, bias, x, *y.stride(), *size, *y.shape[2:], *before, first_y, first_x, blocks,
        BIAS=bias is not None, CI=ci, CO=co, KH=kh, KW=kw, SY=stride[0], SX=stride[1],
        W_O=w_o, W_I=w_i, W_Y=w_y, W_X=w_x, BLOCK=block, PHASES=phases, num_warps=2,
    )  # fmt: skip
    return x


def _gathered(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    before: Pair,
    size: Pair,
    constants: dict[str, int],
) -> torch.Tensor:
    """Convolve with weights that lie as `constants` say."""
    from gigagrad.graphs.ops import few_channels_kernels as kernels

    y = x.new_empty(x.shape[0], constants["CO"], *size)
    products = constants["CI"] * constants["CO"] * constants["KH"] * constants["KW"] * _ROWS
    rows = _ROWS if stride == (1, 1) and constants["KH"] > 1 and products <= _MOST_UNROLLED else 1
    phases = _power_of_two(min(stride[1], constants["KW"]))
    block = max(1, (2 if rows > 1 else 8) * _THREADS // phases)
    blocks = -(-size[1] // block)
    _launch(
        kernels.convolve, (blocks * -(-size[0] // rows), x.shape[0]),
        x, weight, bias, y, *x.stride(), *x.shape[2:], *size, *before, blocks,
        BIAS=bias is not None, SY=stride[0], SX=stride[1], ROWS=rows, BLOCK=block, PHASES=phases, num_warps=4,
        **constants,
    )  # fmt: skip
    return y


def _correlate(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, stride: Pair, before: Pair) -> torch.Tensor:
    """Make the weights' gradient in two stages: sums of blocks, and the sum of these."""
    from gigagrad.graphs.ops import few_channels_kernels as kernels

    (co, ci, kh, kw), (rows, columns) = weight.shape, y.shape[2:]
    taps, phases = -(-kw // stride[1]), _power_of_two(min(stride[1], kw))
    # All of the kernel in one program where its sums fit; else the channels, or the rows of the kernel, apart.
    whole = stride == (1, 1) and co * kh * taps <= _MOST_SUMS // 2
    kernel_rows = kh if whole else 1
    most = _MOST_SUMS // 2 if whole else _MOST_SUMS
    channels = ci if co * ci * kernel_rows * taps <= (most if whole else most // 4) else 1
    shared = _ROWS if whole and kh > 1 else 1
    sums, each = co * channels * kernel_rows * taps, 8
    while each > 1 and sums * each > most:
        each //= 2
    block = max(1, each * _THREADS // phases)
    steps = min(_power_of_two(-(-rows // (shared * _LEAST_CHUNKS))), _MOST_STEPS // (2 if whole else 1))
    blocks, chunks = -(-columns // block), -(-rows // (shared * steps))
    # Rows as far as outputs read: what is not finite beyond must not meet zeros that fill up the last rows of y.
    height, width = min(x.shape[2], (rows - 1) * stride[0] - before[0] + kh), x.shape[3]
    partial = x.new_empty(x.shape[0] * blocks * chunks, co, ci, kh, kw)
    _launch(
        kernels.correlate, (blocks * chunks * (ci // channels) * (kh // kernel_rows), x.shape[0]),
        x, y, partial, *x.stride(), *y.stride(), height, width, rows, columns, *before, blocks,
        CI=ci, CO=co, KH=kh, KW=kw, SY=stride[0], SX=stride[1],
        CHANNELS=channels, KERNEL_ROWS=kernel_rows, STEPS=steps, ROWS=shared, BLOCK=block, PHASES=phases, num_warps=4,
    )  # fmt: skip
    return partial.sum(0, dtype=torch.float64).to(weight.dtype)


def _launch(kernel: Any, grid: Pair, *arguments: Any, **constants: Any) -> None:
    """Run a kernel where its first argument lies, which need not be the current device."""
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
