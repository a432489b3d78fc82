"""Choosing which fields to keep and where: the fastest plan that fits in the budget of every tier."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from operator import itemgetter
from typing import Any, TypeVar

from gigagrad.errors import BudgetError
from gigagrad.plans.cost import Costs
from gigagrad.plans.cuts import Cuts
from gigagrad.plans.emit import shared_by
from gigagrad.plans.estimate import ABOUT_AS_FAST, fixed_amounts
from gigagrad.plans.evictions import Asked, evictions, placed
from gigagrad.plans.fit import Fitter, Kept
from gigagrad.plans.memory import saved_by_convolutions
from gigagrad.plans.plan import COTANGENTS, FIELDS, Plan, RankPlan, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.segments import gathered, split_segments
from gigagrad.plans.whole import whole_plan
from gigagrad.threads import uncollected

_GOOD_ENOUGH = 1.1
"""A candidate this close to what unlimited memory would allow is taken without looking at what else could be done."""

_ABOUT_AS_LEAN = 1.1
"""Peaks that differ by less are alike."""

_HOPELESS = 1.3
"""A candidate that a rough look finds so much slower than what is known is not looked at closely."""

_OF_BAGS = 1.05
"""Rough looks at bags that differ by less are alike: nothing is computed twice there, wherever the cuts are."""

_FIRST_LOOK = 24
"""Candidates of one kind that are tried before the search narrows."""
_SLOWER_IN_A_ROW = 4
"""So many that fit and are slower than the best one end the search among further ones."""


_SOON = 1.0
"""Seconds of the whole image in plain PyTorch up to which no tiles are looked for."""

_MOST_WHOLE = 0.8
"""Part of the memory that may be held whatever is tiled, where fields are computed whole."""
_TRIED_WHOLE = 2
"""So many sizes of fields to be computed whole are planned for, from the largest that fit on."""

_LONG, _FEW_SEGMENTS = 10.0, 64
"""Seconds of a step from which on single fields of the plan are looked at again, and the most segments with which."""
_BETTER, _MOST_IN_VAIN = 0.995, 36_000
"""Part of the time that makes it worth another choice, and the operators of plans in a row that gained nothing after
which no more are made."""

_FEWER, _MORE = (0, 1, 1, 2), (1, 1, 2, 3)
"""Fields that a drawn choice keeps no more, and fields that it keeps instead: one of these numbers each."""
_MOST_DRAWN, _MOST_DRAWN_IN_VAIN = 250_000, 60_000
"""Operators of the plans drawn in all, and of those in a row that gained nothing: 90 plans of Unet(resnet34)."""

_SHARINGS, _LEEWAY = 6, 1.05
"""Plans made at most for several ranks, and how much more than the last one they may hold and send: both are known of a
plan only."""

Found = TypeVar("Found")
Rated = tuple[float, Kept]
"""The seconds of a step by a rough look, and the fields kept."""
Tried = Callable[[float | None], None]
"""Gets the seconds that a step takes in a way that was tried, None where it does not fit or takes too many."""
Make = Callable[[Problem, Tried, RankPlan | None], Plan | None]
"""Makes a plan in tiles, of several ranks by what one of them holds and sends at most; None where it takes too long."""


@uncollected()
def make_plan(
    problem: Problem,
    *,
    memory_format: str = "contiguous",
    tiles: tuple[tuple[int, int], ...] | None = None,
    kept: Kept | None = None,
    whole_pixels: int | None = None,
    saved: tuple[int, ...] | None = None,
    costs: Costs | None = None,
    tried: Tried = lambda seconds: None,
) -> Plan:
    """Return the fastest plan that fits: in tiles, with fields of few pixels whole, or the whole image at once, which
    comes first where it is about as fast.

    With `tiles` (one shape for each segment; the last serves the rest), `kept`, `whole_pixels` and `saved`: the plan
    with these tiles that keeps these fields in these tiers, with fields of at most so many pixels whole, and so many
    tiles of each segment saved for the backward pass. Several plans of one
    graph are made sooner with the same `costs`, made for the same machine and storage. `tried` is called for each set
    of kept fields that was looked at.

    Raises:
        BudgetError: even the smallest tile does not fit; names the segment, the tile and every number.
    """
    if problem.unplaced is not None:
        given: dict[str, Any] = {"memory_format": memory_format, "tiles": tiles, "kept": kept, "saved": saved}
        given |= {"whole_pixels": whole_pixels, "tried": tried}
        try:
            return make_plan(replace(problem, unplaced=None), costs=costs, **given)
        except BudgetError:
            return make_plan(replace(problem.unplaced, budget_bytes=problem.budget_bytes), **given)
    known = costs or Costs(problem.graph, problem.machine, rounds=problem.rounding is not None)

    def tiled(pixels: int, at_most: float = inf) -> Plan | None:
        of_it = known.with_whole(pixels) if pixels else known

        def make(own: Problem, tried: Tried, ranks: RankPlan | None) -> Plan | None:
            chooser = _Chooser(own, of_it, tiles, saved, tried, ranks)
            best = chooser.best(at_most) if kept is None else chooser.again(kept)
            return best and _emitted(own, best, ranks)

        plan = _make_tiled(problem.of(pixels), make, tried)
        return plan and replace(plan, whole_pixels=pixels, memory_format=memory_format)

    if tiles is not None or kept is not None:
        plan = tiled(whole_pixels or 0)
        assert plan is not None
        return plan
    whole = whole_plan(problem, memory_format)
    if whole is not None and whole.predicted_seconds <= _SOON:
        tried(whole.predicted_seconds)
        return whole
    # Tiles of a bag do what the whole does, without halos: there the faster one is that.
    alike = 1.0 if _is_bag(problem) else ABOUT_AS_FAST
    at_most = inf if whole is None else whole.predicted_seconds / alike
    best: Plan | None = None
    refusal: BudgetError | None = None
    for pixels in (0, *islice(_worth_whole(problem), _TRIED_WHOLE)):
        try:
            plan = tiled(pixels, at_most)
        except BudgetError as error:
            refusal = refusal or error.with_traceback(None)  # in tiles alone, which is the leanest
        else:
            if plan is not None and plan.predicted_seconds < at_most:
                best, at_most = plan, plan.predicted_seconds
    best = best or whole
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _is_bag(problem: Problem) -> bool:
    image = problem.graph.source("image")
    return image is not None and image.patches is not None


def _worth_whole(problem: Problem) -> Iterator[int]:
    """Yield how many pixels fields may have to be computed whole, the most first: those whose values fit by far.
    Nothing where all is to be computed in tiles.
    """
    graph = problem.graph
    if problem.whole is None or not problem.backward or graph.coarse_whole is None:
        return
    areas = sorted({node.size(0) * node.size(1) for node in graph.nodes if node.is_field and len(node.shape) == 4})
    able, room = [area for area in areas[:-1] if area > 1], problem.room_bytes

    def is_too_much(pixels: int) -> bool:
        most = inf if room is None else _MOST_WHOLE * room
        return saved_by_convolutions(graph, pixels) > most or total(fixed_amounts(problem.of(pixels))) > most

    # Larger fields take more memory, so that few graphs are made to find the largest that fit.
    yield from reversed(able[: bisect_left(able, True, key=is_too_much)])


def _make_tiled(problem: Problem, make: Make, tried: Tried) -> Plan | None:
    """Return the plan that `make` makes of a problem; of one for several ranks the refusal, too, counts messages."""
    if problem.ranks == 1:
        return make(problem, tried, None)
    try:
        return _make_shared(problem, make, tried)
    except BudgetError as error:
        if error.remedy:
            raise
        smallest = error.smallest_bytes
        for _ in range(_SHARINGS):  # it was named before messages were known
            try:
                _make_shared(replace(problem, budget_bytes=smallest), make, lambda seconds: None)
                break
            except BudgetError as more:
                smallest = more.smallest_bytes
        raise error.with_smallest(smallest) from None


def _make_shared(problem: Problem, make: Make, tried: Tried) -> Plan | None:
    """Make a plan for several ranks: what they hold and send is known once there is a plan, and changes it."""
    most = RankPlan(problem.ranks, min(1.0, _LEEWAY / problem.ranks), 0, 0)
    for sharing in range(_SHARINGS):
        made = make(problem, tried, most)
        if made is None:
            return None
        assert made.ranks is not None
        plan, found = made, made.ranks
        if found.held_share <= most.held_share and found.message_bytes <= most.message_bytes:
            break
        share = 1.0 if sharing == _SHARINGS - 2 else max(most.held_share, min(1.0, _LEEWAY * found.held_share))
        message_bytes = max(most.message_bytes, int(_LEEWAY * found.message_bytes))
        most = replace(most, held_share=share, message_bytes=message_bytes)
    return replace(plan, ranks=replace(most, sent_bytes=found.sent_bytes))


def _emitted(problem: Problem, plan: Plan, ranks: RankPlan | None) -> Plan:
    """Return the plan with all its steps: they count what buffers take, and segments no more."""
    beside = [[one for one in segment.memory if one.name not in (FIELDS, COTANGENTS)] for segment in plan.segments]
    pairs = zip(plan.segments, beside, strict=True)
    segments = tuple(replace(segment, memory=tuple(amounts)) for segment, amounts in pairs)
    shared = shared_by(problem, replace(plan, segments=segments), problem.ranks)
    return replace(shared, ranks=None) if ranks is None else shared


class _Chooser:
    """Looks for the fastest plan that fits."""

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        tiles: tuple[tuple[int, int], ...] | None,
        saved: tuple[int, ...] | None,
        tried: Tried,
        ranks: RankPlan | None,
    ) -> None:
        self._problem, self._graph, self._costs = problem, problem.graph, costs
        self._fitter, self._tried = Fitter(problem, costs, tiles, ranks, saved), tried
        self._is_bag = _is_bag(problem)
        self._refused: dict[frozenset[tuple[int, str]], tuple[int, int]] = {}
        """Fields by tier, the bytes that a rough look found them to need, and those that they take without any tile."""
        self._samples: list[tuple[Sequence[Kept], list[int]]] = []
        """Candidates, and which of them a rough look begins with: it may end before the last, which need least."""

    def best(self, at_most: float) -> Plan | None:
        """Keep what is worth keeping in memory; where that does not fit, the faster of evicting single fields and of
        fewer cuts. The refusal names the leanest of all candidates tried. None, and soon, where a rough look tells that
        it takes more than `at_most` seconds, in which another plan computes the same.
        """
        in_memory = self._fitter.in_memory
        cuts = Cuts(self._graph, self._costs.usual_seconds, backward=self._problem.backward)
        selections = [selection.kept for selection in cuts.selections()]
        single = len(split_segments(self._graph, selections[-1])) == 1  # may be faster: the chain model is rough
        unbounded = self._fitter.unbounded()

        def soonest(kept: frozenset[int]) -> float:
            return unbounded.rough_seconds(in_memory(kept))

        if at_most < inf and min(map(soonest, {selections[0], selections[-single]})) > _HOPELESS * at_most:
            return None
        wanted = self._attempt(in_memory(selections[0]))
        at_once = self._attempt(in_memory(selections[-1])) if single else None
        if wanted is not None:
            return self._better([wanted, at_once or wanted])
        without = self._first_that_fits(self._without(selections[0], at_most), at_most)
        if without is not None and without.modelled_seconds < _GOOD_ENOUGH * soonest(selections[0]):
            return without
        known = at_most if without is None else min(at_most, without.modelled_seconds)
        fewer = self._looked([*map(in_memory, selections[1:])], known)
        faster = [one for one in fewer if without is None or one[0] < without.modelled_seconds]
        found = min(
            filter(None, (at_once, without, self._first_that_fits(faster, at_most))), key=_seconds, default=None
        )
        if found is not None:
            return self._drawn(self._polished(found, selections[0]), selections[0])
        if at_most < inf:
            return None
        samples = (candidates[place] for candidates, places in self._samples for place in places)
        for kept in (*map(in_memory, selections), *filter(self._fitter.has_room, samples)):
            self._refuse(kept, self._fitter.least_bytes(kept))
        return self._closely()

    def _polished(self, plan: Plan, wanted: frozenset[int]) -> Plan:
        """Look once at every single field, the largest first, where a step takes long: one in another tier may better
        be computed again by now, one that is computed again may fit in memory.
        """
        if plan.modelled_seconds < _LONG or len(plan.segments) > _FEW_SEGMENTS:
            return plan
        memory, in_vain = self._problem.memory.name, 0
        for field in sorted(wanted - gathered(self._graph), key=lambda i: -self._graph[i].nbytes):
            kept = {each.node: each.tier for each in plan.kept}
            tier = kept.pop(field, None)
            if tier == memory:
                continue
            if in_vain * len(self._graph.nodes) > _MOST_IN_VAIN:
                break
            in_vain += 1
            changed = kept if tier is not None else {**kept, field: memory}
            if (other := self._faster(plan, changed, _BETTER)) is not None:
                plan, in_vain = other, 0
        return plan

    def _drawn(self, plan: Plan, wanted: frozenset[int]) -> Plan:
        """Keep other fields in the place of some, again and again, where a step takes long: what a field is worth
        depends on all that are kept, and what was given up early may by now be worth more than what stayed.

        A large neighbourhood search (P. Shaw, CP 1998) whose draws are the same each time.
        """
        able, operators = sorted(wanted - gathered(self._graph)), len(self._graph.nodes)
        if plan.modelled_seconds < _LONG:
            return plan
        tiers, draws, in_vain = [self._problem.memory.name, *self._problem.rooms], random.Random(0), 0  # noqa: S311
        for _ in range(_MOST_DRAWN // operators):
            if in_vain * operators > _MOST_DRAWN_IN_VAIN:
                break
            in_vain += 1
            kept = {field.node: field.tier for field in plan.kept}
            there = [field for field in able if field in kept]
            left = [kept.pop(field) for field in draws.sample(there, min(draws.choice(_FEWER), len(there)))]
            tier, others = draws.choice(left or tiers), [field for field in able if field not in kept]
            kept |= dict.fromkeys(draws.sample(others, min(draws.choice(_MORE), len(others))), tier)
            if (other := self._faster(plan, kept)) is not None:
                plan, in_vain = other, 0
        return plan

    def _faster(self, plan: Plan, kept: Kept, share: float = 1.0) -> Plan | None:
        """Return the plan that keeps these fields instead, where it takes less than this share of a plan's time."""
        rough = self._rough_seconds(kept, workers=plan.workers, at_most=plan.modelled_seconds)
        if rough is None or rough >= plan.modelled_seconds:  # a rough look is off by more than the share asks
            return None
        other = self._attempt(kept)
        return other if other is not None and other.modelled_seconds < share * plan.modelled_seconds else None

    def _closely(self) -> Plan:
        """Try what was refused once more, with all shapes of tiles. Raises the `BudgetError` that asks for least: what
        asks for more is left as soon as that is known.
        """
        leanest: BudgetError | None = None
        candidates = []
        for kept, (_, least) in sorted(self._refused.items(), key=lambda refused: refused[1]):
            needed = inf if leanest is None else leanest.needed_bytes
            if least >= needed:
                continue
            try:
                candidates.append(self._fitter.fit(dict(kept), closely=True, below=needed))
            except BudgetError as error:
                error = error.with_traceback(None)  # which would hold all that was found on the way
                leanest = error if leanest is None else min(leanest, error, key=lambda one: one.needed_bytes)
        if candidates:
            return min(candidates, key=_seconds)
        assert leanest is not None
        raise leanest

    def _refuse(self, kept: Kept, least_bytes: int, needed_bytes: int = 0) -> None:
        self._refused.setdefault(frozenset(kept.items()), (max(least_bytes, needed_bytes), least_bytes))

    def _better(self, candidates: list[Plan]) -> Plan:
        """Return the fastest; where memory is no matter, of those that are about as fast and as lean the simplest."""
        fastest = min(candidates, key=_seconds)
        if self._problem.budget_bytes is not None:
            return fastest
        fast = [plan for plan in candidates if plan.modelled_seconds <= ABOUT_AS_FAST * fastest.modelled_seconds]
        leanest = min(plan.predicted_peak_bytes for plan in fast)
        lean = [plan for plan in fast if plan.predicted_peak_bytes <= _ABOUT_AS_LEAN * leanest]
        return min(lean, key=lambda plan: len(plan.segments))

    def again(self, kept: Kept) -> Plan:
        """Repeat an earlier choice. Raises `BudgetError` if it does not fit, also where a tier has less room than
        before.
        """
        try:
            return self._fitter.fit(kept)
        except BudgetError:
            return self._fitter.fit(kept, closely=True)

    def _attempt(self, kept: Kept) -> Plan | None:
        """Return the plan that keeps these fields; None where it does not fit."""
        plan = self._unless_refused(kept, self._fitter.fit)
        self._tried(None if plan is None else plan.modelled_seconds)
        return plan

    def _rough_seconds(self, kept: Kept, *, workers: int | None = None, at_most: float = inf) -> float | None:
        """Return what a rough look at that tells (`Fitter.rough_seconds`); None where it does not fit."""
        seconds = self._unless_refused(kept, partial(self._fitter.rough_seconds, workers=workers, at_most=at_most))
        self._tried(None if seconds == inf else seconds)
        return seconds

    def _unless_refused(self, kept: Kept, fit: Callable[[Kept], Found]) -> Found | None:
        budget, has_room = self._problem.budget_bytes, self._fitter.has_room(kept)
        # Where another tier has too little room, the refusal will say what memory would do instead.
        least = self._fitter.least_bytes(kept if has_room else self._fitter.in_memory(kept))
        candidate, needed = None, least
        if has_room and (budget is None or least <= budget):
            try:
                candidate = fit(kept)
            except BudgetError as error:
                needed = error.needed_bytes
        if candidate is None:
            self._refuse(kept, least, needed)
        return candidate

    def _without(self, wanted: frozenset[int], at_most: float) -> list[Rated]:
        """Return ways to evict some of these fields, as far as a rough look tells. Where memory is tight, computing a
        field again takes much longer than usual tiles say: with other tiers, to move as many or all that are left is
        tried, too.
        """
        in_memory = self._fitter.in_memory(wanted)
        order = partial(evictions, self._problem, self._costs, wanted)
        able, tried = wanted - gathered(self._graph), list[Sequence[Kept]]()
        if any(self._problem.rooms.values()):
            moved = {**in_memory, **dict.fromkeys(able, [*self._problem.rooms][-1])}
            tried += [
                Asked(placed(in_memory, order(dropping=True, moving=True)), len(able)),
                [*placed(in_memory, order(dropping=False, moving=True))],
                Asked(chain([moved], placed(moved, order(dropping=True, moving=False))), len(able) + 1),
            ]
        else:
            tried.append(Asked(placed(in_memory, order(dropping=True, moving=False)), len(able)))
        return [one for candidates in tried for one in self._looked(candidates, at_most)]

    def _first_that_fits(self, rated: list[Rated], at_most: float) -> Plan | None:
        """Return the plan of the fastest that fits after all, of those that may become as fast as asked; of bags that
        of the leanest, of those that are about as fast.
        """
        promising = sorted((one for one in rated if one[0] <= _HOPELESS * at_most), key=itemgetter(0))
        if promising and self._is_bag:
            alike = _OF_BAGS * promising[0][0]
            promising.sort(key=lambda one: (max(one[0], alike), self._fitter.least_bytes(one[1])))
        return next(filter(None, (self._attempt(kept) for _, kept in promising)), None)

    def _looked(self, candidates: Sequence[Kept], at_most: float) -> list[Rated]:
        """Look roughly for the fastest candidate, of which each gives up more than the one before. Those that are
        hopeless beside another, or beside a plan of `at_most` seconds, are left.

        Giving up more leaves room for larger tiles, and neither its memory nor its time grows steadily (halos do), so
        that no bisection finds it: all are tried roughly until several in a row are slower, of many first some at equal
        distances, then those near the best.
        """
        tried = set[int]()
        found: list[tuple[float, int]] = []
        step = max(1, -(-len(candidates) // _FIRST_LOOK))
        asked = [*range(len(candidates) - 1, -1, -step)][::-1]
        self._samples.append((candidates, asked))
        while True:
            slower = 0
            for count in (count for count in asked if count not in tried):
                tried.add(count)
                fastest = min([at_most, *(seconds for seconds, _ in found)])
                seconds = self._rough_seconds(candidates[count], at_most=_HOPELESS * fastest)
                if seconds is None:
                    continue
                if seconds < inf:
                    found.append((seconds, count))
                if found:
                    slower = 0 if (seconds, count) == min(found) else slower + 1
                if slower == _SLOWER_IN_A_ROW:
                    break
            if step == 1 or not found:
                break
            step = -(-step // 2)
            asked = [count for count in (min(found)[1] - step, min(found)[1] + step) if 0 <= count < len(candidates)]
        return [(seconds, candidates[count]) for seconds, count in found]


def _seconds(plan: Plan) -> float:
    return plan.modelled_seconds
