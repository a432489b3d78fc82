"""Convolutions of few channels at full resolution: one by one, several pixels of a row as one, and as a fused loop.

    python bench/few_channels.py [--side 800] [--repeats 12]

oneDNN fills a vector register with the channels of one pixel, so most of it is padding. *Pixels as one*: as
graphs/ops/convolution.py does, for so many outputs of a row at once. *Loop*: a loop over a row compiled by Numba,
where that is installed (pip install numba), on contiguous crops. One thread; forward, the gradient of the weights, and
that with the input's. Prints one JSON line last: CPU seconds per gigapixel of the input, the best of the repeats, and
what Numba adds to the process in MiB, before and after it has compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gigagrad.devices.heap import resident_bytes
from gigagrad.graphs.ops.convolution import by_groups

_LAYERS = (
    (3, 1, 3, 1), (3, 3, 3, 1), (1, 3, 3, 1), (4, 2, 3, 1), (8, 8, 3, 1), (8, 1, 3, 1),
    (1, 3, 15, 8), (3, 3, 15, 8), (3, 48, 4, 4), (3, 64, 7, 2),
)  # fmt: skip
"""Channels in and out, kernel and stride."""
_OUTPUTS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def seconds(work: Callable[[], Any]) -> float:
        found = []
        for _ in range(args.repeats):
            start = time.thread_time()
            work()
            found.append(time.thread_time() - start)
        return round(min(found) / args.side**2 * 1e9, 1)

    results: dict[str, Any] = {}
    for layer in _LAYERS:
        name = "{} -> {}, {} px, stride {}".format(*layer)
        results[name] = by_onednn(*layer, args.side, seconds)
        print(name, results[name], flush=True)
    try:
        results["loop, 3 -> 1"] = by_loop(args.side, seconds)
    except ImportError:
        results["loop, 3 -> 1"] = None
    print(json.dumps({"side": args.side, "cpu_seconds_per_gigapixel": results}))


def by_onednn(
    channels_in: int, channels_out: int, kernel: int, stride: int, side: int, seconds: Callable[..., float]
) -> dict[str, list[float]]:
    """One by one, and for so many outputs at once."""
    weight = torch.rand(channels_out, channels_in, kernel, kernel)
    steps = (side // stride // max(_OUTPUTS)) * max(_OUTPUTS)
    widest = (steps * stride + kernel) // (stride * max(_OUTPUTS)) * stride * max(_OUTPUTS)
    crop = torch.rand(1, widest, widest, channels_in).permute(0, 3, 1, 2)

    def plain(x: torch.Tensor, w: torch.Tensor, outputs: int = 0) -> torch.Tensor:
        if not outputs:
            return torch.conv2d(x, w, None, stride)
        return by_groups(x, w, None, (stride, stride), outputs, lambda *given: torch.conv2d(*given))

    found = {}
    for outputs in (0, *(n for n in _OUTPUTS if n > 1 or stride > 1)):
        x, w = crop.detach().requires_grad_(), weight.requires_grad_()
        made = plain(x, w, outputs)
        assert torch.allclose(made, plain(x, w)[..., : made.shape[3]], rtol=1e-3)
        cotangent = torch.rand_like(made)

        def gradient(*leaves: torch.Tensor, made: Any, cotangent: Any) -> Any:
            return torch.autograd.grad(made, leaves, cotangent, retain_graph=True)

        fixed, trained = plain(crop, w, outputs), made
        with torch.no_grad():
            forward = seconds(lambda outputs=outputs: plain(crop, weight, outputs))
        found[str(outputs or "one by one")] = [
            forward,
            seconds(lambda fixed=fixed, cotangent=cotangent, w=w: gradient(w, made=fixed, cotangent=cotangent)),
            seconds(lambda trained=trained, x=x, w=w, c=cotangent: gradient(x, w, made=trained, cotangent=c)),
        ]
    return found


def by_loop(side: int, seconds: Callable[..., float]) -> dict[str, Any]:
    """Three channels to one, forward and backward. Raises ImportError without Numba."""
    before = resident_bytes()
    from numba import njit  # type: ignore[import-not-found]

    imported = resident_bytes()
    compiled = njit(nogil=True, fastmath=True, error_model="numpy")
    forward, backward = compiled(_forward), compiled(_backward)
    rng = np.random.default_rng(0)
    crop, cotangent = (rng.random(shape, np.float32) for shape in ((3, side + 2, side + 2), (side, side)))
    weight = rng.random((3, 3, 3), np.float32)
    made, to_crop, to_weight = np.empty((side, side), np.float32), np.empty_like(crop), np.zeros((3, 3, 3))
    forward(crop, weight, made)
    backward(crop, weight, cotangent, to_crop, to_weight)
    x, w = (torch.from_numpy(value)[None].requires_grad_() for value in (crop, weight))
    expected = torch.conv2d(x, w)
    wanted = torch.autograd.grad(expected, (x, w), torch.from_numpy(cotangent)[None, None])
    for found, true in ((made, expected.detach()[0, 0]), (to_crop, wanted[0][0]), (to_weight, wanted[1][0])):
        assert np.allclose(found, true, rtol=1e-3)
    return {
        "forward, backward": [
            seconds(lambda: forward(crop, weight, made)),
            seconds(lambda: backward(crop, weight, cotangent, to_crop, to_weight)),
        ],
        "mib_imported": (imported - before) >> 20,
        "mib_compiled": (resident_bytes() - before) >> 20,
    }


def _forward(crop: Any, weight: Any, made: Any) -> None:
    height, width = made.shape
    for y in range(height):
        made[y] = 0
        for c in range(3):
            for i in range(3):
                row, (a, b, d) = crop[c, y + i], (weight[c, i, 0], weight[c, i, 1], weight[c, i, 2])
                for x in range(width):
                    made[y, x] += a * row[x] + b * row[x + 1] + d * row[x + 2]


def _backward(crop: Any, weight: Any, cotangent: Any, to_crop: Any, to_weight: Any) -> None:
    height, width = cotangent.shape
    for y in range(height + 2):
        for c in range(3):
            row = to_crop[c, y]
            row[:] = 0
            for i in range(max(0, y - height + 1), min(3, y + 1)):
                g, (a, b, d) = cotangent[y - i], (weight[c, i, 0], weight[c, i, 1], weight[c, i, 2])
                for x in range(2, width):
                    row[x] += a * g[x] + b * g[x - 1] + d * g[x - 2]
                row[0] += a * g[0]
                row[1] += a * g[1] + b * g[0]
                row[width] += b * g[width - 1] + d * g[width - 2]
                row[width + 1] += d * g[width - 1]
    for y in range(height):
        g = cotangent[y]
        for c in range(3):
            for i in range(3):
                row = crop[c, y + i]
                a = b = d = np.float32(0)
                for x in range(width):
                    a += g[x] * row[x]
                    b += g[x] * row[x + 1]
                    d += g[x] * row[x + 2]
                to_weight[c, i, 0] += a
                to_weight[c, i, 1] += b
                to_weight[c, i, 2] += d


if __name__ == "__main__":
    main()
