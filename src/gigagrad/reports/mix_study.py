"""The cheapest mix of machines for a cohort: plans of every size of slide on every kind of machine, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from gigagrad.cohorts import Row
from gigagrad.config.machines import MachineKind, planned_for
from gigagrad.devices import Machine
from gigagrad.errors import BudgetError, ConfigError, extra
from gigagrad.events import Listener
from gigagrad.execution import Engine, compile
from gigagrad.losses import named_loss
from gigagrad.mix import Mix, buckets, cheapest_mix, least_deadline
from gigagrad.models import resolve
from gigagrad.plans.description import GOOD, OWN, Table
from gigagrad.training.targets import planned_target
from gigagrad.units import format_seconds


@dataclass(frozen=True, slots=True)
class MixStudy:
    """Plans of every size on every kind of machine, the mix, and what each kind would cost alone."""

    title: str
    deadline: float
    kinds: tuple[MachineKind, ...]
    sizes: tuple[tuple[int, int], ...]
    """Height and width of the largest slide of each bucket."""
    slides: tuple[int, ...]
    """Number of slides of each bucket."""
    seconds: tuple[tuple[float, ...], ...]
    """For each bucket, the seconds of its mean slide on each kind; infinite where it does not fit."""
    mix: Mix
    alone: tuple[Mix | None, ...]
    """The mix of each kind by itself; None where it cannot."""

    @property
    def best_alone(self) -> int | None:
        """Return the cheapest kind by itself, None where no kind can do it by itself."""
        able = [(mix.cost, kind) for kind, mix in enumerate(self.alone) if mix is not None]
        return min(able)[1] if able else None

    @property
    def saving(self) -> float | None:
        """Return the share of the cheapest kind's cost that the mix saves."""
        best = None if self.best_alone is None else self.alone[self.best_alone]
        return 1 - self.mix.cost / best.cost if best is not None and best.cost else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON; costs in the currency of the prices."""
        names = [each.name for each in self.kinds]
        return {
            "deadline_seconds": self.deadline,
            "cost": self.mix.cost,
            "gap": self.mix.gap,
            "best_single": None if self.best_alone is None else names[self.best_alone],
            "saving": self.saving,
            "machines": [
                {"name": names[m.kind], "slides": list(m.slides), "seconds": m.seconds, "cost": m.cost}
                for m in self.mix.machines
            ],
            "single": {n: None if mix is None else mix.cost for n, mix in zip(names, self.alone, strict=True)},
            "sizes": [
                {"largest": list(size), "slides": count, "seconds": {n: t if isfinite(t) else None for n, t in timed}}
                for size, count, timed in zip(
                    self.sizes, self.slides, (zip(names, row, strict=True) for row in self.seconds), strict=True
                )
            ],
        }


def plan_cohort(
    model: str,
    loss: str | None,
    slides: Sequence[Row],
    kinds: tuple[MachineKind, ...],
    deadline: float,
    *,
    storage: str | None = None,
    listeners: Sequence[Listener] = (),
) -> MixStudy:
    """Find the cheapest machines for all `slides` within `deadline` seconds: for a training step of a `model` with a
    `loss` on each, or for a prediction without.

    Raises:
        ConfigError: a slide fits on no machine, a machine cannot be planned for, or all together need longer.
        ModelError: a name is none of a model or loss.
    """
    with extra("mix"):
        import scipy.optimize  # noqa: F401  # before minutes of planning
    network, named = resolve(model, published=False), None if loss is None else named_loss(loss)
    network.train(loss is not None)

    @cache
    def engine_on(kind: MachineKind) -> tuple[Engine, Machine | None]:
        rates = None if kind.rates is None else Path(kind.rates)
        try:
            device, machine = planned_for(kind.device, kind.card, rates, kind.cores, kind.memory)
        except ConfigError as error:
            raise ConfigError(f"machine {kind.name}: {error}") from error
        function = None if named is None else named.function
        engine = compile(network, function, memory=kind.memory, storage=storage, device=device)
        for listener in listeners:
            engine.events.subscribe(listener)
        return engine, machine

    def predict(kind: MachineKind, row: Row) -> float:
        engine, machine = engine_on(kind)
        with row.open() as slide:
            target = None if named is None else planned_target(network, named, slide.shape)
            return float(engine.plan(slide, target, machine=machine).predicted_seconds)

    step = "prediction" if loss is None else "training step"
    title = f"Cheapest machines for a {step} of {model} on each slide, in {format_seconds(deadline)}"
    return _study(title, slides, kinds, deadline, predict)


def _study(
    title: str,
    slides: Sequence[Row],
    kinds: tuple[MachineKind, ...],
    deadline: float,
    predict: Callable[[MachineKind, Row], float],
) -> MixStudy:
    """Find the mix. `predict` plans a slide on a machine and returns its seconds, or raises `BudgetError`."""
    shapes = [_shape_of(slide) for slide in slides]
    pixels = [prod(shape[-2:]) for shape in shapes]
    found = buckets(pixels)
    rows = []
    for members in found:
        share = sum(pixels[i] for i in members) / len(members) / pixels[members[0]]
        row, why = [], ""
        for each in kinds:
            try:
                row.append(share * predict(each, slides[members[0]]))
            except BudgetError as error:
                row.append(inf)
                why = why or f"{each.name}: {error}"
        if not any(map(isfinite, row)):
            raise ConfigError(f"{slides[members[0]].slide} fits on no machine; {why}")
        rows.append(tuple(row))
    counts, prices, most = tuple(map(len, found)), [o.price for o in kinds], [o.most for o in kinds]
    mix = cheapest_mix(counts, rows, prices, most, deadline)
    if mix is None:
        least = least_deadline(counts, rows, most)
        told = f"all of them need {format_seconds(least)} at least" if isfinite(least) else "a size fits on none left"
        raise ConfigError(
            f"no mix of these machines is done in {format_seconds(deadline)}: {told}; raise the "
            "--deadline, or 'most' of a machine"
        )
    alone = [
        cheapest_mix(counts, [row[k : k + 1] for row in rows], prices[k : k + 1], most[k : k + 1], deadline)
        for k in range(len(kinds))
    ]
    sizes = tuple((shapes[members[0]][-2], shapes[members[0]][-1]) for members in found)
    return MixStudy(title, deadline, kinds, sizes, counts, tuple(rows), mix, tuple(alone))


def _shape_of(slide: Row) -> tuple[int, ...]:
    with slide.open() as image:
        return image.shape


def mix_tables(study: MixStudy, note: str = "") -> tuple[Table, ...]:
    """Tabulate the machines of the mix, what a slide of each size takes and costs, and each kind by itself."""
    names = [each.name for each in study.kinds]
    machines = []
    for kind, name in enumerate(names):
        own = [machine for machine in study.mix.machines if machine.kind == kind]
        if own:
            slides = sum(sum(machine.slides) for machine in own)
            paid = sum(machine.seconds for machine in own)
            longest, cost = max(machine.seconds for machine in own), sum(machine.cost for machine in own)
            machines.append(
                (name, str(len(own)), str(slides), f"{longest / 3600:.2f}", f"{paid / 3600:.2f}", f"{cost:.2f}")
            )
    machines.append(("together", str(len(study.mix.machines)), str(sum(study.slides)), "", "", f"{study.mix.cost:.2f}"))
    best = study.best_alone
    if best is None:
        told = "No kind of machine is done in time by itself."
    else:
        told = f"The cheapest kind by itself is {names[best]}"
        told += "." if study.saving is None else f"; the mix saves {100 * study.saving:.1f} % of its cost."
    if study.mix.gap:
        told += f" The search was stopped: a mix may be {100 * study.mix.gap:.1f} % cheaper."
    heading = ("machine", "machines", "slides", "hours", "all hours", "cost")
    tones = (*("" for _ in machines[1:]), OWN)
    return (
        Table(study.title, heading, tuple(machines), f"{told}{note}", tones=tones),
        Table(
            "One kind by itself",
            ("machine", "machines", "cost", "the mix costs"),
            tuple(
                (name, "-", "-", "not in time, or a size does not fit")
                if mix is None
                else (name, str(len(mix.machines)), f"{mix.cost:.2f}", _percent(study.mix.cost, mix.cost))
                for name, mix in zip(names, study.alone, strict=True)
            ),
            tones=tuple(GOOD if kind == best else "" for kind in range(len(names))),
        ),
        Table(
            "A slide of each size: time, and cost",
            ("largest", "slides", *names),
            tuple(
                (f"{size[0]}x{size[1]}", str(count), *map(_slide, row, study.kinds))
                for size, count, row in zip(study.sizes, study.slides, study.seconds, strict=True)
            ),
        ),
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} % of it" if whole else "-"


def _slide(seconds: float, each: MachineKind) -> str:
    return f"{format_seconds(seconds)}, {each.price * seconds / 3600:.4f}" if isfinite(seconds) else "too large"
