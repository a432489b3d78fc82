"""Draw the pictures of docs/how-it-works and of a graph: `python docs/pictures.py` writes them into docs/images."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image
from scipy.ndimage import gaussian_filter

from gigagrad.images import open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import tissue_graph

IMAGES = Path(__file__).parent / "images"
INK, LINE, TILE, HALO, OTHER = "#1b2733", "#7a8894", "#f2b134", "#8fc1e3", "#e9eef2"
mpl.rcParams |= {"font.size": 10, "svg.hashsalt": "gigagrad", "svg.fonttype": "none", "text.color": INK}


def grid(axes: Axes, x: float, y: float, title: str, side: int, tiles: int) -> float:
    """Draw a square image cut into `tiles x tiles` and return the side of a tile."""
    step = side / tiles
    axes.add_patch(Rectangle((x, y), side, side, facecolor=OTHER, edgecolor=LINE))
    for k in range(1, tiles):
        axes.plot([x + k * step] * 2, [y, y + side], color=LINE, linewidth=0.6)
        axes.plot([x, x + side], [y + k * step] * 2, color=LINE, linewidth=0.6)
    axes.text(x + side / 2, y - 0.5, title, ha="center", va="bottom")
    return step


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", **style: object) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK, **style))
    if text:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.3, text, ha="center", va="bottom", fontsize=9)


def figure(width: float, height: float) -> Axes:
    _, axes = plt.subplots(figsize=(width / 3, height / 3), layout="constrained")
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return axes


def save(axes: Axes, name: str) -> None:
    axes.figure.savefig(IMAGES / name, metadata={"Date": None}, transparent=False)
    plt.close(axes.figure)


def tiles() -> None:
    """A tile of the output, and the box of each earlier image that it depends on."""
    axes = figure(31, 11.5)
    for x, title, reach in (
        (0.5, "image", 1.6),
        (11.5, "after layer 1", 0.8),
        (22.5, "after layer 2: the output", 0.0),
    ):
        step = grid(axes, x, 2, title, 8, 4)
        left, top = x + 2 * step - reach, 2 + step - reach
        if reach:
            axes.add_patch(Rectangle((left, top), step + 2 * reach, step + 2 * reach, facecolor=HALO, edgecolor=INK))
        axes.add_patch(Rectangle((x + 2 * step, 2 + step), step, step, facecolor=TILE, edgecolor=INK))
    for x in (8.6, 19.6):
        arrow(axes, (x, 5), (x + 2.8, 5), "layer")
    for x, colour, text in (
        (0.5, TILE, "the tile: each pixel is in exactly one"),
        (15, HALO, "its halo: read, but not counted"),
    ):
        axes.add_patch(Rectangle((x, 10.3), 0.8, 0.8, facecolor=colour, edgecolor=INK))
        axes.text(x + 1.2, 10.75, text, va="center")
    save(axes, "tiles.svg")


def sums() -> None:
    """Two tiles that lie side by side: what they read overlaps, what they count does not."""
    axes = figure(31, 10)
    for y, start, name in ((1.5, 4, "tile 1"), (4.5, 9, "tile 2")):
        axes.add_patch(Rectangle((start - 1.5, y), 8, 1.4, facecolor=HALO, edgecolor=INK))
        axes.add_patch(Rectangle((start, y), 5, 1.4, facecolor=TILE, edgecolor=INK))
        axes.text(start + 2.5, y + 0.7, name, ha="center", va="center")
        arrow(axes, (15.9, y + 0.7), (20.2, y + 0.7), "forward, backward")
        axes.text(20.6, y + 0.7, "its part of the gradient", va="center")
        arrow(axes, (28, y + 0.9), (28, 7.4))
    axes.text(20.6, 8.2, "added up: the gradient of the whole image", va="center")
    for x in (4, 9, 14):
        axes.plot([x, x], [1, 6.4], color=LINE, linewidth=0.8, linestyle=":")
    axes.text(2.5, 8.2, "Boxes that are read overlap. Tiles that are counted do not.", va="center")
    save(axes, "sums.svg")


def segments() -> None:
    """A network with a batch norm: the norm needs a mean over the whole image, so there are two segments."""
    axes = figure(33, 11)
    boxes = (
        (0.3, "image", OTHER),
        (5.3, "convolution", TILE),
        (11.3, "mean,\nvariance", HALO),
        (17.3, "normalise,\nReLU", TILE),
        (23.3, "convolution,\nloss", TILE),
    )
    for x, text, colour in boxes:
        axes.add_patch(FancyBboxPatch((x, 4), 4.2, 2, boxstyle="round,pad=0.05", facecolor=colour, edgecolor=INK))
        axes.text(x + 2.1, 5, text, ha="center", va="center")
    for (x, *_), (after, *_) in pairwise(boxes):
        arrow(axes, (x + 4.3, 5), (after - 0.1, 5))
    arrow(axes, (27.6, 5), (29, 5))
    axes.text(29.2, 5, "loss", va="center")
    arrow(axes, (7.4, 3.9), (19.4, 3.9), connectionstyle="arc3,rad=-0.28")
    axes.text(13.4, 1.7, "saved activation, or computed again", ha="center", va="center", fontsize=9)
    for left, right, text in ((5.2, 15.6, "segment 1: all tiles"), (17.2, 27.6, "segment 2: all tiles")):
        axes.plot([left, left, right, right], [6.6, 7.1, 7.1, 6.6], color=INK, linewidth=1)
        axes.text((left + right) / 2, 7.7, text, ha="center", va="center")
    arrow(axes, (5.3, 9), (27.6, 9))
    axes.text(28, 9, "forward", va="center")
    arrow(axes, (27.6, 10.2), (5.3, 10.2))
    axes.text(28, 10.2, "backward", va="center")
    save(axes, "segments.svg")


def graph() -> None:
    """A mask of glands and vessels, and the graph of its regions."""
    noise = gaussian_filter(np.random.default_rng(5).standard_normal((160, 320)), 6)
    mask = np.select([noise > 0.035, noise < -0.045], [1, 2], 0).astype(np.uint8)
    found = tissue_graph(open_image(mask), mask_classes(2, ["gland", "vessel"]), min_area_px=20)
    axes = plt.subplots(figsize=(8, 4), layout="constrained")[1]
    axes.imshow(mask, cmap=ListedColormap(["white", "#fbe3b4", "#cfe4f3"]), interpolation="nearest")
    for start, stop in found.edge_index.T[: found.edge_index.shape[1] // 2]:
        axes.plot(*found.pos[[start, stop]].T - 0.5, color=LINE, linewidth=0.8)
    for kind, colour in ((1, TILE), (2, "#2f7fb8")):
        own = found.y == kind
        sizes = found.x[own, 0] ** 0.5 * 3
        axes.scatter(*found.pos[own].T - 0.5, s=sizes, color=colour, edgecolor=INK, linewidth=0.6, zorder=3)
    axes.axis("off")
    path = IMAGES / "graph.png"
    axes.figure.savefig(path, dpi=110)
    plt.close(axes.figure)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(64)
    few.save(path, optimize=True)


if __name__ == "__main__":
    tiles()
    sums()
    segments()
    graph()
