"""Steers an engine by what `state_dict` holds of its plans: the one place that knows how these entries are called.

Every function asserts, by what the engine's plan then says, that its wish was heeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gigagrad as gg


def with_layout(engine: gg.Engine, image: Any, target: Any, layout: str) -> gg.Engine:
    """Makes the engine compute this image's tiles in the memory layout "contiguous" or "channels_last"."""
    _change(engine, image, target, lambda choice: choice.update(memory_format=layout))
    assert _planned(engine, image, target).memory_format == layout
    return engine


def with_workers(engine: gg.Engine, image: Any, target: Any, workers: int) -> gg.Engine:
    """Makes the engine compute so many of this image's tiles side by side, in the layout that it mostly runs in."""
    _change(engine, image, target, lambda choice: choice.update(workers=workers, memory_format="channels_last"))
    assert _planned(engine, image, target).workers == workers
    return engine


def with_fields_in(engine: gg.Engine, image: Any, target: Any, tier: str) -> gg.Engine:
    """Makes the engine keep all fields of this image that it keeps in this tier: "memory", "host" or "disk"."""

    def move(choice: dict[str, Any]) -> None:
        choice["kept"] = [[node, tier] for node, _ in choice["kept"]]

    _change(engine, image, target, move)
    assert tier == "disk" or not _planned(engine, image, target).bytes_in("disk")
    return engine


def with_tiles(state: dict[str, Any], tile: tuple[int, int]) -> dict[str, Any]:
    """Makes the plans of all sizes in an engine's state have tiles of this height and width. Returns the state."""
    for choice in _choices(state):
        choice["tiles"] = [list(tile)] * len(choice["tiles"])
    return state


def _change(engine: gg.Engine, image: Any, target: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    _planned(engine, image, target)
    state = engine.state_dict()
    for choice in _choices(state):
        change(choice)
    engine.load_state_dict(state)


def _choices(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from state["choices"].values()


def _planned(engine: gg.Engine, image: Any, target: Any) -> Any:
    return engine.plan(image) if target is None else engine.plan(image, target)


def has_several_tiles(engine: gg.Engine, image: Any, target: Any) -> bool:
    """Tells whether any piece of the network that is tiled by itself has more than one tile, in an engine that has
    planned nothing else."""
    tiles = _planned(engine, image, target).tile_count
    pieces = max(len(choice["tiles"]) for choice in _choices(engine.state_dict()))
    return bool(tiles > 2 * pieces)  # each is computed twice at most, forward and backward
