"""Runs a plan over one image: pass after pass, from the first stage's sweep to the last gradient.

Map-reduce autodiff. Forward, each stage maps over its tiles, merges partial reductions and keeps the fields that the
plan names. Between sweeps the global values are computed once, on a tape. Backward, each tile runs again with autograd
on: its vector-Jacobian product, for the final cotangents of the stage's reductions and of its kept fields, is added
into one float64 sum per parameter and into the cotangents of the fields it read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.events import Events
from gigagrad.execution.backward import Backward
from gigagrad.execution.exchange import Exchange
from gigagrad.execution.executor import Serial, Threads
from gigagrad.execution.fields import Fields
from gigagrad.execution.journal import Journal, key_of
from gigagrad.execution.layout import laid_out
from gigagrad.execution.observers import Memory, Progress
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.sources import Source
from gigagrad.execution.sweeps import Piece, Sweeps
from gigagrad.execution.tape import Tape, Values
from gigagrad.execution.tracebacks import empty_frames
from gigagrad.graphs import GATHER
from gigagrad.ranks import Alone, Ranks
from gigagrad.stores import Quantised
from gigagrad.threads import SideThreads, uninterrupted


class Run:
    """One forward, or forward and backward, of one image. `stored` looks up parameters and buffers.

    An interrupt may come at the first instruction of `__exit__`, too: `with Run(...) as run, closing(run)` closes it
    whenever a single one comes.
    """

    def __init__(
        self,
        prepared: Prepared,
        sources: dict[str, Source],
        stored: Callable[[str, str], torch.Tensor],
        events: Events,
        *,
        backward: bool,
        overflows: int = 0,
        draws: int = 0,
        ranks: Ranks | None = None,
        journal: Path | None = None,
    ) -> None:
        """`draws`: what random operators draw from. `ranks`: who computes this run's parts, all with the same plan; by
        itself unless others are named. `journal`: a folder where finished parts are written down, until the run is
        over.
        """
        ranks = ranks or Alone()
        plan, device = prepared.plan, prepared.device
        self._prepared, self._graph = prepared, prepared.graph
        self._closing = threading.Lock()
        self._threads, self._with_grad = torch.get_num_threads(), torch.is_grad_enabled()
        kept = {field.node for field in plan.kept}
        owners = prepared.owners(ranks.count)
        self._exchange = Exchange(prepared, owners, ranks)
        share = self._exchange.share
        self._tape = Tape(
            prepared.graph, kept, device, backward=backward, overflows=overflows, draws=draws, share=share
        )
        self._fields = Fields(prepared, sources, self._tape, owners, ranks.index, draws)
        # They live from sweep to sweep: what a new thread's first operators set up takes longer than a small tile.
        self._readers = SideThreads(plan.readers, "gigagrad-read")
        self._executor = Threads(plan.workers) if plan.workers > 1 else Serial(plan.threads)
        _put_what_is_known(self._tape, prepared, sources, stored)
        place = None if journal is None else journal / key_of(prepared, self._tape, draws, overflows)
        self.journal, self._first = Journal(place), ranks.index == 0
        self._watch = device.watch(plan.predicted_peak_bytes, plan.budget_bytes)
        memory = Memory(prepared, self._watch, self._fields, self._executor, events)
        self._progress = Progress(prepared, events)
        self._observers = (memory, self._progress)
        self._sweeps = Sweeps(
            prepared,
            self._fields,
            self._tape,
            self._exchange,
            self._executor,
            self._readers,
            self._watch,
            self._observers,
            self.journal,
        )
        self.pass_seconds: tuple[float, ...] | None = None
        """What each pass took, once `run` is over; None where parts of it were in the journal, and in a stream: whoever
        takes the pieces has a part in that.
        """
        self._backward = Backward(prepared, self._sweeps, self._tape, self._fields, self._exchange, self._watch)

    def __enter__(self) -> Run:
        """Raises StoreError if a tier has no room for what the plan keeps there."""
        try:
            self._fields.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self.close()
        if error is None:
            return
        if not isinstance(error, GeneratorExit):  # it may have come as a block was left that would have set these back
            torch.set_num_threads(self._threads)
            torch.set_grad_enabled(self._with_grad)
        # Notebooks keep the last traceback: with it only what they may want to see, not what the run held.
        self._fields.forget()
        self._tape.forget()
        self._sweeps.forget()
        empty_frames(error)
        self._prepared.device.trim()  # there may be no next step that takes what this one freed

    def close(self) -> None:
        """End the threads and remove the files; results stay. May be called again, by any thread."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing, ExitStack() as stack:  # goes on past errors, the last one first
            stack.callback(self._watch.close)
            stack.callback(self._fields.close)
            stack.callback(self._executor.close)
            stack.callback(self._readers.shutdown, cancel=True)

    def run(self) -> None:
        """Every pass of the plan. Raises StoreError, and CotangentOverflow if the run should begin anew."""
        for _ in self._passes():
            pass
        if self._first:  # all have met behind their last parts
            self.journal.close()
        self.pass_seconds = None if self.journal.taken else self._progress.pass_seconds

    def stream(self) -> Iterator[Piece]:
        """The boxes and crops of what is delivered in pieces, in row-major order: the output field, or the gradient of
        an image that is handed over. Raises as `run`.
        """
        threads = torch.get_num_threads()
        for piece in self._passes():
            within = torch.get_num_threads()
            torch.set_num_threads(threads)  # what is done with it is the caller's
            yield piece
            # Not if it ends here: of generators that are garbage, the outer one may be closed after the inner one.
            torch.set_num_threads(within)

    def _passes(self) -> Iterator[Piece]:
        for index, step in enumerate(self._prepared.plan.passes):
            stage = self._prepared.stages[step.stage]
            self._begin(index)
            if step.phase == "forward":
                yield from self._sweeps.forward(stage)
            elif step.phase == "one pass":
                yield from self._backward.one_pass(stage)
            else:
                yield from self._backward.sweep(stage)
            self._fields.end(index)
        if self._tape.backward:
            self._backward.finish()

    def _begin(self, index: int) -> None:
        for observer in self._observers:
            observer.pass_begins(index)
        self._fields.begin(index)
        self.journal.begin(index)

    # Results

    @property
    def output(self) -> torch.Tensor:
        """The value of a graph whose output has no spatial axes (the loss, a class score), off the tape."""
        return self._tape.values[self._graph.output].detach()

    @property
    def outputs(self) -> Any:
        """Everything the model returned, nested as it did."""
        values = [self._tape.values[i].detach() for i in self._graph.outputs]
        structure = self._graph.structure
        return values[0] if structure is None else tree_unflatten(values, structure)

    @property
    def values(self) -> Values:
        """The global values by node, as far as they are still there."""
        return self._tape.values

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """The finished gradients by parameter node."""
        return self._tape.gradients

    @property
    def input_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the images and labels that asked for one, by the name of the input."""
        return self._backward.input_gradients

    @property
    def rounding_errors(self) -> dict[str, float]:
        """What quantised storage is expected to have added to gradients: see `RoundingErrors.by_weight`."""
        rounding = self._prepared.rounding
        return self._sweeps.errors.by_weight(rounding.error_bound) if isinstance(rounding, Quantised) else {}

    @property
    def updates(self) -> dict[str, torch.Tensor]:
        """The new values of the buffers that the model writes."""
        return {name: self._tape.values[node].detach() for name, node in self._graph.updates.items()}


def _put_what_is_known(
    tape: Tape, prepared: Prepared, sources: dict[str, Source], stored: Callable[[str, str], torch.Tensor]
) -> None:
    """Parameters, buffers, constants, labels, and the images that whole-field operators read."""
    graph, device = prepared.graph, prepared.device.torch_device
    for node in graph.nodes:
        if node.is_source and not node.is_field:
            name = node.arguments["name"]
            source = sources.get(name)
            constant = graph.constants.get(name) if node.op == "constant" else None
            value = source.tensor if source is not None else constant
            value = stored(node.op, name) if value is None else value
            tape.put(node.id, value.to(device))
        elif node.op == GATHER and graph[node.operands[0]].is_source:
            image = graph[node.operands[0]]
            whole = Box.whole(image.size(0), image.size(1))
            tape.put(node.id, laid_out(sources[image.arguments["name"]].read(whole).to(device)))
    tape.compute()
