"""The graphs an engine has captured, each with the guard that says whether it is still the right one."""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict
from typing import Any

from gigagrad.events import Events, Notice
from gigagrad.execution.sources import Source
from gigagrad.graphs import Captured, LossModule, trace

_MOST_SIZES = 32
"""Sets of inputs whose graphs are kept; the one unused for longest goes first."""
_MOST_STATES = 4
"""Graphs kept of one set of inputs: of a model that is switched between a few modes."""


class Captures:
    """Graphs of one composite, by the shapes and dtypes of the inputs and by what Python could see then."""

    def __init__(self, composite: LossModule, events: Events) -> None:
        self._composite = composite
        self._events = events
        self._kept: OrderedDict[tuple[Any, ...], list[Captured]] = OrderedDict()

    def get(self, sources: dict[str, Source]) -> Captured:
        """Return the graph for these sources, for the model and the loss as they are now. Raises as `Engine.plan`."""
        key = tuple((name, source.spec) for name, source in sources.items())
        states = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        found = next((captured for captured in states if captured.holds(self._composite)), None)
        if found is not None:
            states.remove(found)
        else:
            found = self._capture(sources)
            same = next((known for known in states if known.graph.is_same_as(found.graph)), None)
            if same is not None:  # what changed does not matter to the graph: its plan serves on
                states.remove(same)
                found = dataclasses.replace(found, graph=same.graph)
        states.append(found)
        del states[:-_MOST_STATES]
        if len(self._kept) > _MOST_SIZES:
            self._kept.popitem(last=False)
        return found

    def _capture(self, sources: dict[str, Source]) -> Captured:
        images, targets = (
            tuple(source.spec for name, source in sources.items() if name.startswith(kind))
            for kind in ("image", "target")
        )
        with self._events.preparing("capture the model"):
            captured = trace(self._composite, images, targets if len(targets) > 1 else targets[0] if targets else None)
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
