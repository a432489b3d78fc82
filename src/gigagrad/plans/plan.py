"""A plan is data: frozen, comparable, printable, and round-trips through JSON."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gigagrad.plans.description import describe


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its tiles and what a tile costs. Sizes in pixels of the field named, memory in bytes."""

    index: int
    operators: int
    reductions: int
    keeps: int
    """Fields that this stage computes and the plan keeps."""
    tile: tuple[int, int]
    """Height and width of a tile on the stage's largest target field."""
    tiles: tuple[int, int]
    crop: tuple[int, int]
    """Height and width of the largest crop read of an image: tile plus halo."""
    computed_ratio: float
    """Pixels read per pixel of the image: 1 means that nothing is computed twice."""
    tile_peak_bytes: int
    parts: int = 1
    """Into how many runs of tiles its sums are divided (`gigagrad.plans.parts`)."""
    memory: tuple[Amount, ...] = ()
    """What its sweeps add to what is fixed."""
    beside_bytes: int = 0
    """What freed memory does not serve. Of what comes and goes beside its tiles (crops that wait, contributions to
    gradients) those blocks that the allocator takes from the system one by one; and where very many tiles are computed
    side by side, what their blocks may need beyond any order of freed ones."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """One sweep of this stage without and with gradients, by the cost model."""

    @property
    def tile_count(self) -> int:
        return self.tiles[0] * self.tiles[1]


@dataclass(frozen=True, slots=True)
class Pass:
    """One sweep of one stage: `forward`, `backward` (recompute and VJP), or `one pass` (both at once)."""

    stage: int
    phase: str


EXACT = "exact"
"""The storage of a field that is kept bit for bit."""

MEMORY = "memory"
"""The name of the tier that the budget bounds."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A named number of bytes: one line of a ledger."""

    name: str
    size_bytes: int


def total(amounts: Iterable[Amount]) -> int:
    return sum(amount.size_bytes for amount in amounts)


def amount_of(amounts: Iterable[Amount], *names: str) -> int:
    """Bytes under these names."""
    return sum(amount.size_bytes for amount in amounts if amount.name in names)


@dataclass(frozen=True, slots=True)
class KeptField:
    """A field that is there from the stage that computes it to the last one that reads it."""

    node: int
    tier: str
    operator: str
    module: str
    shape: tuple[int, ...]
    size_bytes: int
    """As it is stored; its cotangents take what its own dtype does."""
    storage: str = EXACT
    """What its values are rounded to, as `storage` of `compile` says it."""


@dataclass(frozen=True, slots=True)
class WholeField:
    """An operator that has no tile rule, or works on what such a one left: it runs once, on whole tensors."""

    operator: str
    module: str
    size_bytes: int
    """Of its output."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How a step is shared among ranks."""

    count: int
    held_share: float
    """What part of a field one of them holds at most, of those that are not replicated."""
    message_bytes: int
    sent_bytes: int
    """By all of them in a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run will do, known before it starts. All memory in bytes, sizes in pixels."""

    image_shape: tuple[int, ...]
    device: str
    memory_format: str
    workers: int
    """Tiles computed at the same time, by one thread each; with 1, all threads share the operators of one tile."""
    threads: int
    """That share the operators of a tile: their sums depend on how many there are."""
    stages: tuple[StagePlan, ...]
    passes: tuple[Pass, ...]
    kept: tuple[KeptField, ...]
    whole_field: tuple[WholeField, ...]
    budget_bytes: int | None
    fixed: tuple[Amount, ...] = ()
    """What is held whichever stage is swept."""
    elsewhere: tuple[Amount, ...] = ()
    """Peak of what is kept in each of the other tiers, by its name."""
    whole_seconds: float = 0.0
    """What whole-field operators take, by the cost model."""
    ranks: RankPlan | None = None
    """None: one process by itself."""
    whole: str | None = None
    """What PyTorch runs of the model and the loss by itself on the whole image, `forward` or `forward and backward`:
    then there are no stages. None: it is computed in tiles.
    """
    timed_seconds: tuple[float, ...] | None = None
    """Of each pass, by a tile of it that was timed on this machine; None where none was."""
    readers: int = 1
    """Threads that read and decode images ahead of the tiles."""

    @property
    def ledger(self) -> tuple[Amount, ...]:
        """What adds up to the peak: what is fixed, and what the stage adds whose sweeps need most."""
        stages = [stage.memory for stage in self.stages]
        return (*self.fixed, *max(stages, key=total, default=()))

    @property
    def predicted_peak_bytes(self) -> int:
        return total(self.ledger)

    def most(self, *names: str) -> int:
        """Of the bytes under these names of the ledger, what the stage holds that holds most of them."""
        stages = [amount_of(stage.memory, *names) for stage in self.stages]
        return amount_of(self.fixed, *names) + max(stages, default=0)

    def bytes_in(self, tier: str) -> int:
        """Peak of what is kept in another tier than the one that the budget bounds."""
        return amount_of(self.elsewhere, tier)

    @property
    def predicted_seconds(self) -> float:
        """Of one step."""
        return self.modelled_seconds if self.timed_seconds is None else sum(self.timed_seconds)

    @property
    def modelled_seconds(self) -> float:
        """Of one step, by the cost model alone."""
        return self.whole_seconds + sum(self._sweep_seconds)

    @property
    def pass_shares(self) -> tuple[float, ...]:
        """What part of the predicted time each pass takes; whole-field operators count to all passes alike."""
        passes = self._sweep_seconds if self.timed_seconds is None else self.timed_seconds
        total = sum(passes)
        return tuple(seconds / total if total else 1 / len(passes) for seconds in passes)

    @property
    def _sweep_seconds(self) -> tuple[float, ...]:
        stages = self.stages
        return tuple(
            stages[p.stage].forward_seconds if p.phase == "forward" else stages[p.stage].backward_seconds
            for p in self.passes
        )

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of the tiles of the last field; a model without any stage has one tile, the image."""
        return self.stages[-1].tile if self.stages else (self.image_shape[-2], self.image_shape[-1])

    @property
    def tile_count(self) -> int:
        """Tiles run in one step, over all passes; the whole image is one."""
        return bool(self.whole) + sum(self.stages[p.stage].tile_count for p in self.passes)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        derived = {"predicted_peak_bytes": self.predicted_peak_bytes, "predicted_seconds": self.predicted_seconds}
        return dataclasses.asdict(self) | derived

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`, also after a trip through JSON."""
        derived = ("predicted_peak_bytes", "predicted_seconds", "advice", "scaling")  # the last two stand beside it
        fields = {name: value for name, value in data.items() if name not in derived}
        amounts = {name: tuple(Amount(**one) for one in data[name]) for name in ("fixed", "elsewhere")}
        stages = tuple(
            StagePlan(
                **stage
                | {name: tuple(stage[name]) for name in ("tile", "tiles", "crop")}
                | {"memory": tuple(Amount(**one) for one in stage["memory"])}
            )
            for stage in data["stages"]
        )
        rest = {
            "image_shape": tuple(data["image_shape"]),
            "ranks": None if data["ranks"] is None else RankPlan(**data["ranks"]),
            "timed_seconds": None if data["timed_seconds"] is None else tuple(data["timed_seconds"]),
            "passes": tuple(Pass(**p) for p in data["passes"]),
            "kept": tuple(KeptField(**field | {"shape": tuple(field["shape"])}) for field in data["kept"]),
            "whole_field": tuple(WholeField(**operator) for operator in data["whole_field"]),
        }
        return cls(**fields | amounts | rest | {"stages": stages})

    def memory_parts(self) -> list[tuple[str, int]]:
        """What the predicted peak adds up from: a name for people, and bytes. Parts of nothing are left out."""
        return [(amount.name, amount.size_bytes) for amount in self.ledger if amount.size_bytes]

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        return str(describe(self))
