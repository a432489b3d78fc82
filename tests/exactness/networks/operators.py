"""The table of operators: all that a node can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .attention import AttentionPool, CrossAttention, LinearAttention, Regions, SelfAttention, Transformer, Windows
from .blocks import ChannelsAsBatch, Coordinates, Merge, Product, Quantise, Residual, SpatialGate, Views, Volume
from .functions import FUNCTIONS, Function
from .global_blocks import (
    Classifier,
    Dynamic,
    GlobalPool,
    Mixer,
    Modulate,
    Position,
    Pyramid,
    Recurrent,
    RunningScale,
    Scan,
    Squeeze,
    TokenNorm,
    Warp,
)
from .layers import (
    ACTIVATIONS,
    Join,
    Pad,
    Resize,
    Shuffle,
    Slice,
    make_activation,
    make_convolution,
    make_norm,
    make_transposed,
)
from .options import (
    MODES,
    draw_attention,
    draw_average,
    draw_convolution,
    draw_merge,
    draw_norm,
    draw_nothing,
    draw_pad,
    draw_pool,
    draw_pyramid,
    draw_resize,
    draw_slice,
    draw_squeeze,
    draw_transposed,
    draw_windows,
)
from .recipe import Draw, Options, chance, pair, pick


@dataclass(frozen=True)
class Operator:
    """How a node's options are drawn, how its module is made, and how often it is asked for."""

    draw: Callable[[Draw], Options]
    make: Callable[..., nn.Module]
    weight: int = 1
    arity: int = 1


OPERATORS: dict[str, Operator] = {
    "conv": Operator(draw_convolution, make_convolution, weight=14),
    "norm": Operator(draw_norm, make_norm, weight=12),
    "activation": Operator(
        lambda draw: {"name": pick(draw, [*ACTIVATIONS, "prelu", "glu"])}, make_activation, weight=5
    ),
    "merge": Operator(draw_merge, Merge, weight=8, arity=2),
    "max pool": Operator(
        lambda draw: draw_pool(draw) | {"dilation": draw(1, 2)}, lambda shapes, **o: nn.MaxPool2d(**o), weight=2
    ),
    "average pool": Operator(draw_average, lambda shapes, **o: nn.AvgPool2d(**o), weight=2),
    "resize": Operator(draw_resize, Resize, weight=4),
    "transposed": Operator(draw_transposed, make_transposed, weight=3),
    "function": Operator(lambda draw: {"name": pick(draw, list(FUNCTIONS))}, Function, weight=9),
    "residual": Operator(
        lambda draw: {
            "kernel": pick(draw, [1, 3, 5]),
            "norm": pick(draw, ["batch", "group"]),
            "scale": chance(draw, 50),
        },
        Residual,
        weight=2,
    ),
    "squeeze": Operator(draw_squeeze, Squeeze, weight=3),
    "spatial gate": Operator(draw_nothing, SpatialGate),
    "global pool": Operator(
        lambda draw: {"pool": pick(draw, ["mean", "max"]), "broadcast": chance(draw, 70)}, GlobalPool, weight=2
    ),
    "pyramid": Operator(draw_pyramid, Pyramid, weight=3),
    "attention pool": Operator(lambda draw: {"heads": draw(1, 2), "gated": chance(draw, 60)}, AttentionPool, weight=2),
    "self-attention": Operator(draw_attention, SelfAttention, weight=2),
    "linear attention": Operator(draw_nothing, LinearAttention),
    "regions": Operator(lambda draw: {"count": draw(1, 4)}, Regions),
    "cross-attention": Operator(lambda draw: {"grid": pair(draw, 1, 4)}, CrossAttention, arity=2),
    "modulate": Operator(draw_nothing, Modulate, arity=2),
    "dynamic": Operator(draw_nothing, Dynamic, arity=2),
    "product": Operator(
        lambda draw: {"kind": pick(draw, ["einsum", "matmul", "tokens", "linear"]), "out": draw(1, 5)},
        Product,
        weight=2,
    ),
    "windows": Operator(draw_windows, Windows, weight=2),
    "mixer": Operator(lambda draw: {"grid": pair(draw, 1, 5)}, Mixer),
    "scan": Operator(draw_nothing, Scan),
    "shuffle": Operator(lambda draw: {"kind": pick(draw, ["apart", "together", "groups"])}, Shuffle, weight=2),
    "position": Operator(lambda draw: {"grid": pair(draw, 1, 6), "mode": pick(draw, MODES)}, Position, weight=2),
    "coordinates": Operator(draw_nothing, Coordinates),
    "running scale": Operator(draw_nothing, RunningScale),
    "warp": Operator(draw_nothing, Warp),
    "transformer": Operator(
        lambda draw: {
            "patch": draw(3, 8),
            "first": chance(draw, 50),
            "activation": pick(draw, ["relu", "gelu"]),
        },
        Transformer,
        weight=2,
    ),
    "views": Operator(lambda draw: {"norm": chance(draw, 50)}, Views),
    "volume": Operator(draw_nothing, Volume),
    "channels as batch": Operator(lambda draw: {"norm": chance(draw, 50)}, ChannelsAsBatch),
    "quantise": Operator(lambda draw: {"count": draw(2, 5)}, Quantise),
    "recurrent": Operator(lambda draw: {"kind": pick(draw, ["gru", "lstm"])}, Recurrent),
    "token norm": Operator(draw_nothing, TokenNorm),
    "classifier": Operator(
        lambda draw: {"kind": pick(draw, ["mean", "grid", "flat"]), "out": draw(2, 4)}, Classifier, weight=0
    ),
    "slice": Operator(draw_slice, Slice),
    "pad": Operator(draw_pad, Pad),
    "join": Operator(lambda draw: {"axis": draw(2, 3), "cut": draw(1, 4)}, Join),
}
