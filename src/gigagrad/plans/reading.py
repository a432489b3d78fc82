"""Predict what reading images takes: seconds and bytes of the threads that decode them while tiles are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gigagrad.graphs import Graph
from gigagrad.plans.stages import Stage

_MARGIN = 2
"""So many times the readers that rates ask for: a pass that waits for its images loses more than a crop that waits for
its pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The cost of reading a graph's images: seconds, bytes and threads."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that one thread takes to decode each image once, by the name of the input; none for what is in memory."""
    thread_bytes: int = 0
    """Bytes that a thread holds of a file, beside the pixels it reads."""
    threads: int = 1
    """The largest number of them."""
    beside: bool = False
    """True where tiles are computed on the same cores."""

    def seconds_of(self, graph: Graph, stage: Stage) -> float:
        """Tell what one thread takes for a pass over a stage: what is decoded serves every tile that reads it."""
        images = [graph[i].arguments["name"] for i in stage.reads if graph[i].is_source]
        return sum(self.seconds.get(name, 0.0) for name in images)

    def pass_seconds(self, seconds: float, computing: float, readers: int) -> float:
        """Tell what a pass takes by the clock that computes so long, and whose images take one thread `seconds`."""
        beside = seconds / self.threads if self.beside else 0.0
        return max(computing + beside, seconds / readers)

    def readers(self, seconds: float, computing: float) -> int:
        """Tell how many must read so that a pass which computes so long does not wait for what takes one `seconds`."""
        if not seconds:
            return 1
        needed = math.ceil(_MARGIN * seconds / computing) if self.beside and computing else self.threads
        return max(1, min(needed, self.threads))
