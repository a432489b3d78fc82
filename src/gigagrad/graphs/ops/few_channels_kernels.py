"""Triton kernels of convolutions of few channels: forward, transposed, and the gradient of the weights.

Imported only where they run (`few_channels.py`): Triton comes with PyTorch for GPUs alone.

Notation is that of a convolution: it makes `y`, `(N, CO, rows, columns)`, of `x`, `(N, CI, height, width)`, with
weights `(CO, CI, KH, KW)`, strides `SY` and `SX`, and `pad_y` and `pad_x` zeros before the first row and column; what
is read beyond the last is zero, too. Its transpose makes `x` of `y` with the same weights.

Along x a block is `BLOCK` outputs of a convolution by `PHASES` pixels that each steps over (the next power of two), so
that lanes lie side by side in memory at any stride; a row of `KW` taps takes ceil(KW / SX) loads of them. Sums are
float32, in an order that sizes and constants fix. What is written is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNSPECIALISED = {
    "do_not_specialize": "height width rows columns pad_y pad_x first_y first_x blocks".split(),
    "do_not_specialize_on_alignment": "x y weight bias partial".split()
    + [f"{field}_{axis}" for field in "xy" for axis in "ncyx"],
}
"""Arguments of which Triton must not compile another kernel for each value: sizes differ from tile to tile, and crops
begin anywhere in memory. A pixel stride of 1 is compiled for."""
_NOWHERE = tl.constexpr(-(1 << 30))
"""Column of lanes that read nothing. Compared as unsigned, negative columns lie beyond the last."""


@triton.jit
def _added(sums: tl.tuple, k: tl.constexpr, value: tl.tensor) -> tl.tuple:
    """Return sums, of which the `k`-th has grown by a value."""
    return sums[:k] + (sums[k] + value,) + sums[k + 1 :]  # noqa: RUF005 (Triton knows no stars)


@triton.jit
def _zeros(count: tl.constexpr, BLOCK: tl.constexpr, PHASES: tl.constexpr) -> tl.tuple:
    """Return as many sums of a block."""
    sums = ()
    for _ in tl.static_range(count):
        sums += (tl.zeros([BLOCK, PHASES], tl.float32),)
    return sums


@triton.jit
def _add_row(
    sums: tl.tuple, row: tl.tensor, x_x: tl.tensor, at: tl.tensor, width: tl.tensor, weight: tl.tensor, i: tl.tensor,
    ci: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    W_O: tl.constexpr, W_I: tl.constexpr, W_Y: tl.constexpr, W_X: tl.constexpr, ROWS: tl.constexpr,
    PHASES: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Add to each row of outputs what the `i`-th row of inputs gives: of one row of outputs `i` is a number that the
    kernel computes, of several a constant.
    """
    phase = tl.arange(0, PHASES)[None, :]
    for j in tl.static_range((KW + SX - 1) // SX):
        tap = phase + j * SX
        inside = (at + j * SX).to(tl.uint32) < width
        if (j + 1) * SX > KW:
            inside = inside & (tap < KW)
        value = tl.load(row + j * SX * x_x, mask=inside, other=0.0)
        for r in tl.static_range(ROWS):
            if ROWS == 1 or (i - r * SY >= 0 and i - r * SY < KH):
                for co in tl.static_range(CO):
                    taps = weight + co * W_O + ci * W_I + (i - r * SY) * W_Y
                    if PHASES == 1:
                        factor = tl.load(taps + j * W_X)
                    else:
                        factor = tl.load(taps + tap * W_X, mask=(phase < SX) & (tap < KW), other=0.0)
                    sums = _added(sums, r * CO + co, value * factor)
    return sums


@triton.jit(**_UNSPECIALISED)
def convolve(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor,
    x_n: tl.tensor, x_c: tl.tensor, x_y: tl.tensor, x_x: tl.tensor, height: tl.tensor, width: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, pad_y: tl.tensor, pad_x: tl.tensor, blocks: tl.tensor,
    BIAS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    SX: tl.constexpr, W_0: tl.constexpr, W_O: tl.constexpr, W_I: tl.constexpr, W_Y: tl.constexpr, W_X: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PHASES: tl.constexpr,
) -> None:  # fmt: skip
    """Make `ROWS` rows of a block of y, of all channels. Several rows read an input once for all of them."""
    first, block, n = tl.program_id(0) // blocks * ROWS, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    ox, phase = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PHASES)[None, :]
    ix = ox[:, None] * SX - pad_x + phase
    at = tl.where(phase < SX, ix, _NOWHERE)
    sums = _zeros(ROWS * CO, BLOCK, PHASES)
    for ci in tl.static_range(CI):
        lanes = x + n * x_n + tl.cast(ci, tl.int64) * x_c + ix.to(tl.int64) * x_x
        if ROWS == 1:
            for i in range(KH):
                iy = first * SY - pad_y + i
                row, inside = lanes + iy.to(tl.int64) * x_y, tl.where((iy >= 0) & (iy < height), width, 0)
                sums = _add_row(
                    sums, row, x_x, at, inside.to(tl.uint32), weight + W_0, i,
                    ci, CO, KH, KW, SY, SX, W_O, W_I, W_Y, W_X, ROWS, PHASES,
                )  # fmt: skip
        else:
            for i in tl.static_range((ROWS - 1) * SY + KH):
                iy = first * SY - pad_y + i
                row, inside = lanes + iy.to(tl.int64) * x_y, tl.where((iy >= 0) & (iy < height), width, 0)
                sums = _add_row(
                    sums, row, x_x, at, inside.to(tl.uint32), weight + W_0, i,
                    ci, CO, KH, KW, SY, SX, W_O, W_I, W_Y, W_X, ROWS, PHASES,
                )  # fmt: skip
    for r in tl.static_range(ROWS):
        for co in tl.static_range(CO):
            value = tl.sum(sums[r * CO + co], 1)
            if BIAS:
                value += tl.load(bias + co)
            row = y + ((n * CO + co) * rows + first + r) * columns
            tl.store(row + ox, value, mask=(ox < columns) & (first + r < rows))


@triton.jit(**_UNSPECIALISED)
def transpose(
    y: tl.tensor, weight: tl.tensor, bias: tl.tensor, x: tl.tensor,
    y_n: tl.tensor, y_c: tl.tensor, y_y: tl.tensor, y_x: tl.tensor, height: tl.tensor, width: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, pad_y: tl.tensor, pad_x: tl.tensor, first_y: tl.tensor, first_x: tl.tensor,
    blocks: tl.tensor,
    BIAS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    SX: tl.constexpr, W_O: tl.constexpr, W_I: tl.constexpr, W_Y: tl.constexpr, W_X: tl.constexpr,
    BLOCK: tl.constexpr, PHASES: tl.constexpr,
) -> None:  # fmt: skip
    """Make a row of a block of x, of all channels. Pixel `i = s q - p + r`, r < s, gets from y at `q - t` the tap
    `t s + r`; `first_y` and `first_x` are the first q.
    """
    iy, block, n = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    ahead = iy + pad_y - first_y * SY
    q, phase = first_x + block * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, PHASES)[None, :]
    sums = _zeros(CI, BLOCK, PHASES)
    lanes = y + n * y_n + q.to(tl.int64) * y_x
    for t in range((KH + SY - 1) // SY):
        oy, ky = first_y + ahead // SY - t, ahead % SY + t * SY
        valid = (oy >= 0) & (oy < rows) & (ky < KH)
        inside = tl.where(valid, columns, 0).to(tl.uint32)
        for co in tl.static_range(CO):
            row = lanes + tl.cast(co, tl.int64) * y_c + oy.to(tl.int64) * y_y
            for j in tl.static_range((KW + SX - 1) // SX):
                tap = phase + j * SX
                known = (phase < SX) & (tap < KW)
                value = tl.load(row - j * y_x, mask=(q - j).to(tl.uint32) < inside, other=0.0)
                if (j + 1) * SX > KW:  # what is not finite must not meet a weight that is none
                    value = tl.where(known, value, 0.0)
                for ci in tl.static_range(CI):
                    taps = weight + co * W_O + ci * W_I + ky * W_Y
                    factor = tl.load(taps + tap * W_X, mask=known & valid, other=0.0)
                    sums = _added(sums, ci, value * factor)
    ix = q * SX - pad_x + phase
    for ci in tl.static_range(CI):
        value = sums[ci]
        if BIAS:
            value += tl.load(bias + ci)
        row = x + ((n * CI + ci) * height + iy) * width
        tl.store(row + ix, value, mask=(phase < SX) & (ix >= 0) & (ix < width))


@triton.jit(**_UNSPECIALISED)
def correlate(
    x: tl.tensor, y: tl.tensor, partial: tl.tensor,
    x_n: tl.tensor, x_c: tl.tensor, x_y: tl.tensor, x_x: tl.tensor,
    y_n: tl.tensor, y_c: tl.tensor, y_y: tl.tensor, y_x: tl.tensor,
    height: tl.tensor, width: tl.tensor, rows: tl.tensor, columns: tl.tensor, pad_y: tl.tensor, pad_x: tl.tensor,
    blocks: tl.tensor,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL_ROWS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
) -> None:  # fmt: skip
    """Make a row of `partial`: what a block's columns, in `STEPS` times `ROWS` rows, give to the weights' gradient. A
    program makes that of `CHANNELS` of x and `KERNEL_ROWS` rows of the kernel.
    """
    groups: tl.constexpr = (CI // CHANNELS) * (KH // KERNEL_ROWS)
    taps: tl.constexpr = (KW + SX - 1) // SX
    group, own, n = tl.program_id(0) % groups, tl.program_id(0) // groups, tl.program_id(1).to(tl.int64)
    block, first = own % blocks, own // blocks * STEPS * ROWS
    ci_first, ky_first = group // (KH // KERNEL_ROWS) * CHANNELS, group % (KH // KERNEL_ROWS) * KERNEL_ROWS
    ox, phase = block * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, PHASES)[None, :]
    ix = ox * SX - pad_x + phase
    at = tl.where((ox < columns) & (phase < SX), ix, _NOWHERE)
    sums = _zeros(CO * CHANNELS * KERNEL_ROWS * taps, BLOCK, PHASES)
    x_lanes = x + n * x_n + ci_first.to(tl.int64) * x_c + ix.to(tl.int64) * x_x
    y_lanes = y + n * y_n + ox.to(tl.int64) * y_x
    for step in range(STEPS):
        oy = first + step * ROWS
        cotangents = ()
        for r in tl.static_range(ROWS):
            for co in tl.static_range(CO):
                row = y_lanes + tl.cast(co, tl.int64) * y_c + (oy + r).to(tl.int64) * y_y
                cotangent = tl.load(row, mask=(ox < columns) & (oy + r < rows), other=0.0)
                cotangents += (cotangent,)
        for c in tl.static_range(CHANNELS):
            for i in tl.static_range((ROWS - 1) * SY + KERNEL_ROWS):
                iy = oy * SY - pad_y + ky_first + i
                row = x_lanes + tl.cast(c, tl.int64) * x_c + iy.to(tl.int64) * x_y
                limit = tl.where((iy >= 0) & (iy < height), width, 0).to(tl.uint32)
                for j in tl.static_range(taps):
                    inside = (at + j * SX).to(tl.uint32) < limit
                    if (j + 1) * SX > KW:
                        inside = inside & (phase + j * SX < KW)
                    value = tl.load(row + j * SX * x_x, mask=inside, other=0.0)
                    for r in tl.static_range(ROWS):
                        if i - r * SY >= 0 and i - r * SY < KERNEL_ROWS:
                            for co in tl.static_range(CO):
                                product = value * cotangents[r * CO + co]
                                sums = _added(
                                    sums, ((co * CHANNELS + c) * KERNEL_ROWS + i - r * SY) * taps + j, product
                                )
    made = partial + (n * (tl.num_programs(0) // groups) + own) * CO * CI * KH * KW
    for co in tl.static_range(CO):
        for c in tl.static_range(CHANNELS):
            for i in tl.static_range(KERNEL_ROWS):
                row = made + ((co * CI + ci_first + c) * KH + ky_first + i) * KW
                for j in tl.static_range(taps):
                    total = tl.sum(sums[((co * CHANNELS + c) * KERNEL_ROWS + i) * taps + j], 0)
                    tap = tl.arange(0, PHASES) + j * SX
                    tl.store(row + tap, total, mask=(tap < j * SX + SX) & (tap < KW))
