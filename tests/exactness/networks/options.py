"""The options of each operator, as drawn. Sizes are those of the first input."""

from __future__ import annotations

from .recipe import Draw, Options, chance, pair, pick

MODES = ("nearest", "bilinear", "bicubic", "nearest-exact", "area")


def _draw_weights(draw: Draw) -> str:
    return pick(draw, ["plain"] * 6 + ["weight norm", "spectral norm"])


def draw_convolution(draw: Draw) -> Options:
    depthwise = chance(draw, 20)
    weights = "standardised" if chance(draw, 8) else _draw_weights(draw)
    options: Options = {"out": draw(1, 2) if depthwise else draw(1, 6), "depthwise": depthwise, "weights": weights}
    kind = draw(0, 9)
    if kind == 9:
        size = draw(2, 4)
        return options | {"kernel_size": size, "stride": size}
    if kind == 8:
        return options | {"kernel_size": pair(draw, 1, 4), "padding": "same", "dilation": pair(draw, 1, 3)}
    if kind < 4:
        size = pick(draw, [3, 1, 5])
        return options | {"kernel_size": size, "padding": size // 2, "stride": draw(1, 2), "bias": chance(draw, 60)}
    return options | {
        "kernel_size": pair(draw, 1, 5),
        "stride": pair(draw, 1, 3),
        "padding": pair(draw, 0, 3),
        "dilation": pair(draw, 1, 3),
        "bias": chance(draw, 60),
        "padding_mode": pick(draw, ["zeros", "zeros", "reflect", "replicate", "circular"]),
    }


def draw_transposed(draw: Draw) -> Options:
    stride, dilation = pair(draw, 1, 3), pair(draw, 1, 2)
    depthwise = chance(draw, 20)
    return {
        "out": draw(1, 2) if depthwise else draw(1, 5),
        "depthwise": depthwise,
        "weights": _draw_weights(draw),
        "kernel_size": pair(draw, 1, 5),
        "stride": stride,
        "padding": pair(draw, 0, 2),
        "output_padding": tuple(draw(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)),
        "dilation": dilation,
        "bias": chance(draw, 60),
    }


def draw_pool(draw: Draw) -> Options:
    kernel = pair(draw, 2, 4)
    return {
        "kernel_size": kernel,
        "stride": pair(draw, 1, 3),
        "padding": tuple(draw(0, k // 2) for k in kernel),
        "ceil_mode": chance(draw, 50),
    }


def draw_average(draw: Draw) -> Options:
    return draw_pool(draw) | {
        "count_include_pad": chance(draw, 50),
        "divisor_override": pick(draw, [None, None, None, 3]),
    }


def draw_resize(draw: Draw) -> Options:
    mode = pick(draw, [*MODES, "bilinear"])
    options: Options = {"mode": mode}
    if mode in ("bilinear", "bicubic"):
        options["align_corners"] = chance(draw, 40)
        if not options["align_corners"] and chance(draw, 15):
            options["antialias"] = True
    if chance(draw, 40):
        return options | {"size": pair(draw, 3, 50)}
    factor = pick(draw, [2, 0.5, 3, 1.7, 0.6, (2.0, 1.3)])
    if isinstance(factor, float) and chance(draw, 30):
        options["recompute_scale_factor"] = True
    return options | {"scale_factor": factor}


def draw_norm(draw: Draw) -> Options:
    kind = pick(draw, ["batch", "batch", "batch", "group", "instance", "channels", "whole"])
    options: Options = {"kind": kind}
    if kind in ("batch", "instance"):
        options |= {
            "training": chance(draw, 75),
            "affine": chance(draw, 75),
            "track_running_stats": chance(draw, 75 if kind == "batch" else 50),
            "momentum": pick(draw, [0.1, 0.1, 0.5, 1.0, 0.0, 0.01] + [None] * (kind == "batch")),
            "eps": pick(draw, [1e-5, 1e-3]),
        }
    elif kind == "group":
        options |= {"groups": draw(1, 4), "affine": chance(draw, 75)}
    return options


def draw_merge(draw: Draw) -> Options:
    how = ["add", "concatenate", "multiply", "gate", "subtract", "maximum", "lerp", "where", "divide"]
    return {
        "how": pick(draw, ["add", "concatenate", *how]),
        "fit": pick(draw, ["resize", "crop", "pad"]),
        "mode": pick(draw, MODES),
    }


def draw_attention(draw: Draw) -> Options:
    kind = pick(draw, ["explicit", "fused", "module"])
    return {"kind": kind, "factor": draw(2, 6), "heads": draw(1, 2), "mode": pick(draw, MODES)}


def draw_slice(draw: Draw) -> Options:
    return {"start": pair(draw, 0, 3), "cut": pair(draw, 0, 3), "step": pair(draw, 1, 2)}


def draw_pad(draw: Draw) -> Options:
    mode = pick(draw, ["constant", "reflect", "replicate", "circular"])
    return {"amounts": tuple(draw(-1 if mode == "constant" else 0, 3) for _ in range(4)), "mode": mode}


def draw_squeeze(draw: Draw) -> Options:
    pool = pick(draw, ["mean", "adaptive", "max", "std"])
    return {"pool": pool, "linear": chance(draw, 50), "gate": pick(draw, ["sigmoid", "hardsigmoid"])}


def draw_pyramid(draw: Draw) -> Options:
    return {"grid": pair(draw, 1, 7), "pool": pick(draw, ["mean", "max"]), "mode": pick(draw, MODES)}


def draw_nothing(draw: Draw) -> Options:
    return {}


def draw_windows(draw: Draw) -> Options:
    return {"kind": pick(draw, ["attention", "mix"]), "window": pair(draw, 2, 7), "shift": chance(draw, 40)}
