"""Draws a recipe. Nodes are tried on the image while they are drawn: what PyTorch itself cannot run, or what would
vanish or explode, never enters a recipe."""

from __future__ import annotations

import math
import warnings

import torch

from .cases import buffers, gradients, make_case, step
from .losses import CLASS_LOSSES, LOSSES
from .network import Network
from .operators import OPERATORS
from .options import draw_merge
from .recipe import Draw, Node, Options, Recipe, chance, pick

MOST_PIXELS, MOST_CHANNELS, MOST_TILES = 4000, 16, 60
_ASKED_FOR = [name for name, operator in OPERATORS.items() for _ in range(operator.weight)]


def draw_recipe(draw: Draw) -> Recipe | None:
    """A network of one to twelve nodes and its loss; None (rarely) where its loss or a gradient is not finite."""
    seed = draw(0, 999)
    shape = (draw(1, 3), draw(20, 60), draw(20, 60))
    image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    network = Network(image, seed)
    for _ in range(draw(1, 9)):
        _extend(draw, network)
    loose = set(range(1, len(network.values) - 1)) - {i for node in network.nodes for i in node.inputs}
    for i in sorted(loose)[-3:]:
        if chance(draw, 60):
            _try(network, Node("merge", (len(network.nodes), i), draw_merge(draw)))
    loss, options, channels = _draw_loss(draw)
    last = len(network.nodes)
    heads = [last]
    if chance(draw, 20) and last > 1:
        heads.append(draw(1, last - 1))
        options["named"] = chance(draw, 50)
    outputs = []
    for i in heads:
        head = Node("conv", (i,), {"out": channels, "kernel_size": 1})
        if loss == "label" and chance(draw, 60):
            head = Node("classifier", (i,), OPERATORS["classifier"].draw(draw) | {"out": channels})
        if not _try(network, head, area=1 if "label" in loss else 4):
            return None
        outputs.append(len(network.nodes))
    recipe = Recipe(
        image=shape,
        nodes=tuple(network.nodes),
        outputs=tuple(outputs),
        loss=loss,
        loss_options=options,
        tile=_draw_tile(draw, shape, tuple(network.values[outputs[0]].shape[2:]) or (1, 1)),  # type: ignore[arg-type]
        seed=seed,
        training=chance(draw, 85),
        frozen=tuple(i for i in range(1, last + 1) if chance(draw, 6)),
        steps=pick(draw, [1, 1, 2]),
        layout="channels_last" if chance(draw, 25) else "",
    )
    return recipe if _is_sound(recipe) else None


def _extend(draw: Draw, network: Network) -> None:
    op = pick(draw, _ASKED_FOR)
    inputs = tuple(_draw_input(draw, len(network.values)) for _ in range(OPERATORS[op].arity))
    node = Node(op, inputs, OPERATORS[op].draw(draw))
    tied = [i for i, earlier in enumerate(network.nodes, 1) if earlier.op == op and len(earlier.inputs) == len(inputs)]
    if tied and chance(draw, 30):
        earlier = network.nodes[tied[-1] - 1]
        _try(network, Node("again", inputs, {"node": tied[-1]})) or _try(network, Node(op, inputs, earlier.options))
    else:
        _try(network, node)


def _draw_input(draw: Draw, count: int) -> int:
    """The newest value more often than not, any other otherwise."""
    return count - 1 if chance(draw, 65) else draw(0, count - 1)


def _try(network: Network, node: Node, area: int = 1) -> bool:
    """Grow the node if PyTorch runs it and its value is of a useful size and spread."""
    try:
        with warnings.catch_warnings():
            # The variance of a single position is not a number, and not kept.
            warnings.simplefilter("ignore")
            value = network.grow(node)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):  # what PyTorch refuses is no network
        return False
    n, c, h, w = value.shape if value.ndim == 4 else (*value.shape, 1, 1)
    useful = n == 1 and c <= MOST_CHANNELS and area <= h * w <= MOST_PIXELS and (h * w == 1 or min(h, w) > 1)
    spread = value.std(correction=0) if useful and value.numel() > 1 else torch.tensor(1.0)
    if not useful or not torch.isfinite(value).all() or value.abs().max() > 300 or spread < 1e-3:
        network.shrink()
        return False
    return True


def _draw_loss(draw: Draw) -> tuple[str, Options, int]:
    loss = pick(draw, list(LOSSES))
    options: Options = {"target": pick(draw, ["output", "output", "image"])}
    if loss == "cross entropy":
        options |= {
            "weighted": chance(draw, 60),
            "smoothing": pick(draw, [0.0, 0.0, 0.1]),
            "reduction": pick(draw, ["mean", "mean", "sum"]),
        }
    return loss, options, draw(2, 4) if loss in CLASS_LOSSES else draw(1, 3)


def _draw_tile(draw: Draw, image: tuple[int, int, int], output: tuple[int, int]) -> tuple[int, int]:
    tile = draw(5, 30), draw(5, 30)
    if chance(draw, 15):
        tile = tile[0], 70
    largest = max(image[1], output[0]), max(image[2], output[1])
    while math.prod(-(-n // t) for n, t in zip(largest, tile, strict=True)) > MOST_TILES:
        tile = 2 * tile[0], 2 * tile[1]
    return tile


def _is_sound(recipe: Recipe) -> bool:
    """Whether plain PyTorch runs the step, and everything it gives is finite."""
    case = make_case(recipe)
    try:
        loss = step(case, recipe.steps)[-1]
    except (RuntimeError, ValueError):
        return False
    numbers = [loss, *gradients(case).values(), *buffers(case).values()]
    return len(numbers) > 1 and all(torch.isfinite(n).all() for n in numbers) and loss.abs() < 1e8  # type: ignore[return-value]
