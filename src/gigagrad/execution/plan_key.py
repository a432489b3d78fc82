"""Record what planning decided for one size: enough to make the same plan again, in another process, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gigagrad.graphs import Graph
from gigagrad.plans import Plan, split_stages


@dataclass(frozen=True, slots=True)
class PlanKey:
    memory_format: str
    workers: int
    threads: int
    tiles: tuple[tuple[int, int], ...]
    """Height and width in pixels, one for each stage."""
    kept: tuple[tuple[int, str], ...]
    """The nodes of the fields kept, each with its tier."""
    whole: bool = False
    """The whole image at once, as PyTorch runs it, in the place of tiles."""
    whole_pixels: int = 0
    """Fields of at most so many pixels are computed whole."""

    @classmethod
    def of(cls, plan: Plan) -> PlanKey:
        tiles = tuple(stage.tile for stage in plan.stages)
        return cls(
            plan.memory_format,
            plan.workers,
            plan.threads,
            tiles,
            tuple((field.node, field.tier) for field in plan.kept),
            plan.whole is not None,
            plan.whole_pixels,
        )

    def suits(self, graph: Graph) -> bool:
        """Say whether the graph has these fields and as many stages: it may come from another version of a model."""
        if self.whole:
            return True
        if self.whole_pixels and graph.coarse_whole is None:
            return False
        graph = graph.with_whole(self.whole_pixels)
        fields = [i for i, _ in self.kept]
        computed = all(i < len(graph.nodes) and graph[i].is_field and not graph[i].is_source for i in fields)
        return computed and len(split_stages(graph, fields)) == len(self.tiles)

    def to_dict(self) -> dict[str, Any]:
        tiles = [list(tile) for tile in self.tiles]
        return {
            "memory_format": self.memory_format,
            "workers": self.workers,
            "threads": self.threads,
            "tiles": tiles,
            "kept": [list(pair) for pair in self.kept],
            "whole": self.whole,
            "whole_pixels": self.whole_pixels,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PlanKey:
        tiles = tuple((int(h), int(w)) for h, w in data["tiles"])
        kept = tuple((int(i), str(tier)) for i, tier in data["kept"])
        workers = int(data["workers"])
        # Choices of earlier versions left it to PyTorch.
        threads = int(data.get("threads", 1 if workers > 1 else torch.get_num_threads()))
        whole, whole_pixels = bool(data.get("whole", False)), int(data.get("whole_pixels", 0))
        return cls(data["memory_format"], workers, threads, tiles, kept, whole, whole_pixels)
