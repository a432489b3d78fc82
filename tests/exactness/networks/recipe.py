"""What a network is as data, and how it is drawn: the recipe, and dice that give integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Draw = Callable[[int, int], int]
"""`draw(low, high)` is an integer, both ends included: `random.Random(0).randint`, or Hypothesis behind a lambda."""

Options = dict[str, Any]
Shapes = list[tuple[int, int, int]]
"""`(C, H, W)` of each input of a node."""


class Node(NamedTuple):
    """One step of a network. Value 0 is the image, value i the output of the i-th node."""

    op: str
    inputs: tuple[int, ...]
    options: Options


@dataclass(frozen=True)
class Recipe:
    """Everything a case is made of.

    `frozen` numbers the nodes (from 1) whose parameters ask for no gradient. `layout` is the memory layout of tiles,
    `""` the engine's own choice: double precision would never see the one that single precision mostly runs in.
    """

    image: tuple[int, int, int]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    loss: str
    loss_options: Options
    tile: tuple[int, int]
    seed: int = 0
    training: bool = True
    frozen: tuple[int, ...] = ()
    steps: int = 1
    layout: str = ""

    def covered(self) -> set[str]:
        """The names of all that this recipe uses."""
        names = {f"loss: {self.loss}", f"layout: {self.layout or 'usual'}"}
        for node in self.nodes:
            detail = next((node.options[key] for key in ("name", "kind", "how") if key in node.options), None)
            names.add(f"{node.op}: {detail}" if detail else node.op)
        return names


def pick(draw: Draw, options: Sequence[T]) -> T:
    return options[draw(0, len(options) - 1)]


def chance(draw: Draw, percent: int) -> bool:
    return draw(1, 100) > 100 - percent


def pair(draw: Draw, low: int, high: int) -> tuple[int, int]:
    return draw(low, high), draw(low, high)
