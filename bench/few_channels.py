"""Convolutions of few channels at full resolution: one by one, several pixels of a row as one, and as a fused loop.

    python bench/few_channels.py [--side 800] [--repeats 12]

oneDNN fills a vector register with the channels of one pixel, so most of it is padding. *Pixels as one*: as
graphs/ops/convolution.py does, for so many outputs of a row at once. *Loop*: a loop over a row compiled by Numba,
where that is installed (pip install numba), on contiguous crops. One thread; forward, the gradient of the weights, and
that with the input's. Prints one JSON line last: CPU seconds per gigapixel of the input, the best of the repeats, and
what Numba adds to the process in MiB, before and after it has compiled.

On a GPU, unless `--device cpu` says otherwise: layers of the paper's network on a tile of `side` px (3520), and some
of more channels, as the op rules run them, with PyTorch's kernels (contiguous crops, then channels last) and with
those of graphs/ops/few_channels.py. Milliseconds of the forward pass, of the gradient of the weights and the bias, and
of the input's; the median of the repeats (20). One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gigagrad.boxes import Span
from gigagrad.devices.heap import resident_bytes
from gigagrad.graphs import Call, Site, lookup, operators
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.op_rules import Bound
from gigagrad.graphs.ops import few_channels
from gigagrad.graphs.ops.convolution import by_groups

_LAYERS = (
    (3, 1, 3, 1), (3, 3, 3, 1), (1, 3, 3, 1), (4, 2, 3, 1), (8, 8, 3, 1), (8, 1, 3, 1),
    (1, 3, 15, 8), (3, 3, 15, 8), (3, 48, 4, 4), (3, 64, 7, 2),
)  # fmt: skip
"""Channels in and out, kernel and stride."""
_OUTPUTS = (1, 2, 4)
_GPU_LAYERS = (
    ("down8", False, 1, 3, 15, 8, 4, 1), ("down40", False, 3, 3, 9, 5, 2, 8), ("up8", True, 3, 3, 9, 5, 2, 40),
    ("up1", True, 3, 3, 15, 8, 4, 8), ("head", False, 3, 1, 3, 1, 1, 1), ("3 -> 3", False, 3, 3, 3, 1, 1, 1),
    ("4 -> 4", False, 4, 4, 3, 1, 1, 1), ("8 -> 1", False, 8, 1, 3, 1, 1, 1), ("8 -> 8", False, 8, 8, 3, 1, 1, 1),
    ("3 -> 8, 7 px", False, 3, 8, 7, 2, 3, 1),
)  # fmt: skip
"""Name, whether transposed, channels in and out, kernel, stride, padding, and what the tile's side is divided by."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cuda":
        on_gpu(args.side or 3520, args.repeats or 20)
        return
    args.side, args.repeats = args.side or 800, args.repeats or 12
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


def on_gpu(side: int, repeats: int) -> None:
    """Print what each layer takes with PyTorch's kernels and with ours."""
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for name, is_transposed, channels_in, channels_out, kernel, stride, padding, divided in _GPU_LAYERS:
        x = torch.rand(1, channels_in, side // divided, side // divided, device="cuda")
        shape = (channels_in, channels_out) if is_transposed else (channels_out, channels_in)
        weight = torch.rand(*shape, kernel, kernel, device="cuda").requires_grad_()
        bias = torch.rand(channels_out, device="cuda").requires_grad_()
        found = results[name] = {}
        for ours in (False, True):
            few_channels.wins = lambda *_, ours=ours: ours
            # Our kernels are compiled for each, which takes seconds; what they make is contiguous.
            layouts = (torch.contiguous_format, torch.channels_last)[: 1 if ours and name != "head" else 2]
            for layout in layouts:
                leaves = [x.contiguous(memory_format=layout).requires_grad_(), weight, bias]
                kind = f"{'ours' if ours else 'PyTorch'}, {str(layout).removeprefix('torch.')}"
                found[kind] = milliseconds(bound(is_transposed, leaves, stride, padding), leaves, repeats)
        print(name, found, flush=True)
    card = torch.cuda.get_device_name()
    print(json.dumps({"device": card, "torch": torch.__version__, "side": side, "milliseconds": results}))


def bound(is_transposed: bool, leaves: list[torch.Tensor], stride: int, padding: int) -> Bound:
    """What the op rule runs for a whole layer."""
    builder = Builder()
    refs = [
        builder.source(kind, kind, tuple(leaf.shape), leaf.dtype, field=kind == "image", differentiable=True)
        for kind, leaf in zip(("image", "parameter", "parameter"), leaves, strict=True)
    ]
    op = "aten.conv_transpose2d.input" if is_transposed else "aten.conv2d.default"
    node = builder.node(builder.call(op, operators.bind(op, (*refs, [stride] * 2, [padding] * 2), {})))
    inside, out = ((Span(0, shape[2]), Span(0, shape[3])) for shape in (leaves[0].shape, node.shape))
    return lookup(op).bind(Call(node, tuple(map(builder.node, refs))), Site(out, (inside, None, None)))


def milliseconds(run: Bound, leaves: list[torch.Tensor], repeats: int) -> list[float]:
    """The forward pass, the gradient of the weights and the bias, and that of the input."""
    made = run(leaves)
    cotangent = torch.rand_like(made)

    def forward() -> None:
        with torch.no_grad():
            run(leaves)

    def to_weights() -> None:
        torch.autograd.grad(made, leaves[1:], cotangent, retain_graph=True)

    def to_input() -> None:
        torch.autograd.grad(made, leaves[:1], cotangent, retain_graph=True)

    found = []
    for work in (forward, to_weights, to_input):
        work()
        taken = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        found.append(round(statistics.median(taken) * 1e3, 3))
    return found


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
