"""What oneDNN's cache holds of a convolution: KiB per shape, forward and for both gradients.

    python bench/compiled_kernels.py [--dtypes bfloat16 float16 float32] [--shapes 12]

Each layer is run on so many crops that differ by a row, after two more that are not counted, in a process of its own
with a cache that forgets nothing; told is by how much its anonymous memory grows for each, when what was freed has been
given back. Prints one JSON line last. `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` shows the same without AMX.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

_LAYERS = (
    (3, 4, 3, 1), (4, 4, 3, 1), (8, 8, 3, 1), (16, 16, 3, 1), (24, 24, 3, 1), (64, 64, 3, 1), (64, 64, 3, 2),
    (256, 256, 3, 1), (64, 128, 1, 1), (3, 64, 7, 2),
)  # fmt: skip
"""Channels in and out, kernel and stride."""
_WIDTH_PX = 66
_FIRST_HEIGHT_PX = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", type=int, default=12)
    parser.add_argument("--one", nargs=2, metavar=("DTYPE", "LAYER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], _LAYERS[int(args.one[1])], args.shapes)))
        return
    rows = []
    environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1000000"}
    for dtype in args.dtypes:
        for index, (channels_in, channels_out, kernel, stride) in enumerate(_LAYERS):
            command = [sys.executable, __file__, "--shapes", str(args.shapes), "--one", dtype, str(index)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            layer = f"{channels_in} -> {channels_out}, {kernel} px, stride {stride}"
            rows.append({"dtype": dtype, "layer": layer, **json.loads(done.stdout)})
            print(rows[-1], flush=True)
    means = {
        dtype: round(sum(row["mean"] for row in rows if row["dtype"] == dtype) / len(_LAYERS)) for dtype in args.dtypes
    }
    print(json.dumps({"kib": rows, "mean_kib": means}))


def one(dtype_name: str, layer: tuple[int, int, int, int], shapes: int) -> dict[str, Any]:
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    channels_in, channels_out, kernel, stride = layer
    padding = kernel // 2
    heights = count(_FIRST_HEIGHT_PX)

    def run(gradients: tuple[bool, bool] | None) -> None:
        height = next(heights)
        x_NCHW = torch.zeros(1, channels_in, height, _WIDTH_PX, dtype=dtype)
        weight = torch.zeros(channels_out, channels_in, kernel, kernel, dtype=dtype)
        if gradients is None:
            torch.conv2d(x_NCHW, weight, stride=stride, padding=padding)
            return
        out = [(side + 2 * padding - kernel) // stride + 1 for side in (height, _WIDTH_PX)]
        torch.ops.aten.convolution_backward(
            torch.zeros(1, channels_out, *out, dtype=dtype), x_NCHW, weight, None, [stride] * 2, [padding] * 2, [1, 1],
            False, [0, 0], 1, [*gradients, False],
        )  # fmt: skip

    found: dict[str, Any] = {}
    for name, gradients in (("forward", None), ("gradient of x", (True, False)), ("of weights", (False, True))):
        for _ in range(2):
            run(gradients)
        before = _anonymous_kib()
        for _ in range(shapes):
            run(gradients)
        found[name] = round((_anonymous_kib() - before) / shapes)
    return found | {"mean": round(sum(found.values()) / 3)}


def _anonymous_kib() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
