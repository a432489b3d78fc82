"""The graphs an engine has captured, each with the guard that says whether it is still the right one."""

from __future__ import annotations

import gc
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from gigagrad.events import Events, Notice
from gigagrad.execution.sources import Source
from gigagrad.graphs import Captured, InputSpec, Lines, LossModule, lines_through, trace, trace_again

_MOST_SIZES = 32
"""Sets of inputs whose graphs are kept; the one unused for longest goes first."""
_MOST_KINDS = 4
"""Kinds of bags whose graphs serve bags of other sizes: of patches of a few sizes, with targets or without."""
_MOST_STATES = 4
"""Graphs kept of one set of inputs: of a model that is switched between a few modes."""


@dataclass(frozen=True, slots=True)
class _Bags:
    """A graph for bags of `size` patches. With `lines`, through it and through another one, it serves other sizes."""

    captured: Captured
    size: int
    lines: Lines | None = None


class Captures:
    """Graphs of one composite, by the shapes and dtypes of the inputs and by what Python could see then."""

    def __init__(self, composite: LossModule, events: Events) -> None:
        self._composite = composite
        self._events = events
        self._kept: OrderedDict[tuple[Any, ...], list[Captured]] = OrderedDict()
        self._bags: OrderedDict[tuple[Any, ...], list[_Bags]] = OrderedDict()
        """Graphs of bags, by the inputs without the number of patches."""

    def get(self, sources: dict[str, Source]) -> Captured:
        """Return the graph for these sources, for the model and the loss as they are now. Raises as `Engine.plan`."""
        key = tuple((name, source.spec) for name, source in sources.items())
        states = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        found = next((captured for captured in reversed(states) if captured.holds(self._composite)), None)
        if found is not None:
            states.remove(found)
        else:
            found = self._of_bags(sources) or self._capture(sources)
            same = next((known for known in states if known.graph.is_same_as(found.graph)), None)
            if same is not None:  # what changed does not matter to the graph: its plan serves on
                found = replace(found, graph=same.graph)
        states.append(found)
        if len(states) > _MOST_STATES:  # of a model that counts its calls, all have one graph
            states.remove(next((known for known in states[:-1] if known.graph is found.graph), states[0]))
        if len(self._kept) > _MOST_SIZES:
            self._kept.popitem(last=False)
        return found

    def _of_bags(self, sources: dict[str, Source]) -> Captured | None:
        """Return the graph for a bag by those of bags of other sizes; None if there is no bag, or none serves."""
        bags = [source.spec for source in sources.values() if source.spec.bag]
        if len(bags) != 1:
            return None
        size = bags[0].shape[0]
        key = tuple((n, replace(s.spec, shape=s.spec.shape[1:]) if s.spec.bag else s.spec) for n, s in sources.items())
        states = self._bags.setdefault(key, [])
        self._bags.move_to_end(key)
        known = next((one for one in reversed(states) if one.captured.holds(self._composite)), None)
        if known is not None:
            states.remove(known)
            if known.lines is not None:
                with self._events.preparing("capture the model"):
                    found = trace_again(self._composite, *_specs(sources), known.captured, known.lines, size)
                gc.collect(0)  # as in `_capture`; what this made is young
                if found is not None:
                    states.append(known)
                    return found
        found = self._capture(sources)
        lines = None
        if known is not None and known.size != size:
            lines = lines_through(found, size, known.captured, known.size)
        states.append(_Bags(found, size, lines))
        del states[:-_MOST_STATES]
        if len(self._bags) > _MOST_KINDS:
            self._bags.popitem(last=False)
        return found

    def _capture(self, sources: dict[str, Source]) -> Captured:
        with self._events.preparing("capture the model"):
            captured = trace(self._composite, *_specs(sources))
        gc.collect()  # tracing leaves cycles behind, which would count as held by the process
        if captured.left_out:
            told = f"forward stores {', '.join(captured.left_out)} for somebody to look at; it will not be found there"
            self._events.emit_once(Notice(told, warning=True))
        if (unfollowed := captured.guard.unfollowed) is not None:
            told = (
                f"the model is traced anew in every call, because {unfollowed} may answer differently each time; keep "
                "settings in attributes, dictionaries or lists of the model"
            )
            self._events.emit_once(Notice(told, warning=True))
        return captured


def _specs(sources: dict[str, Source]) -> tuple[tuple[InputSpec, ...], tuple[InputSpec, ...] | InputSpec | None]:
    """Return the specs of the images and those of the targets, as they come to the loss."""
    images, targets = (
        tuple(source.spec for name, source in sources.items() if name.startswith(kind)) for kind in ("image", "target")
    )
    return images, targets if len(targets) > 1 else targets[0] if targets else None
