"""The engine: what `gigagrad.compile` returns. It captures and plans on first sight of a size, and runs."""

from __future__ import annotations

import math
import operator
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import Events, Notice, StepMeasured, TileDone
from gigagrad.execution.captures import Captures
from gigagrad.execution.drawn import NotAtOnce
from gigagrad.execution.gradient_scale import MOST_OVERFLOWS, CotangentOverflow
from gigagrad.execution.model_state import check_independent, leave_state, leaving_again, stored_in
from gigagrad.execution.planner import EngineOptions, Planner
from gigagrad.execution.predictions import PredictedImage, Predictions, delivers_image
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.probes import whole_begun
from gigagrad.execution.recorded import RecordedRun, RecordedStep
from gigagrad.execution.rounding_error import average_in
from gigagrad.execution.run import Run
from gigagrad.execution.scalars import Values
from gigagrad.execution.seeds import drawing, draws_of, seed_values
from gigagrad.execution.sinks import Sink
from gigagrad.execution.sources import Source, Sources, opened_sources
from gigagrad.execution.tracebacks import lets_go, stream_lets_go
from gigagrad.execution.whole import WholeRun, filling, hooks_called
from gigagrad.graphs import Captured, Graph, LossModule
from gigagrad.plans import Plan, Problem
from gigagrad.units import format_bytes, format_seconds

Loss = Callable[[Any, Any], torch.Tensor]


class Engine:
    """Exact loss, gradients and predictions of one module on images of any size. Made by `compile`."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, options: EngineOptions, again: Callable[..., Engine]
    ) -> None:
        """Make an engine of checked options; `again` makes another one like it."""
        self._options, self._device, self._again = options, options.device, again
        self._composite = LossModule(model, loss, options.precision)
        self._runs = 0
        self.events = Events()
        self._captures = Captures(self._composite, self.events)
        self._planner = Planner(self._composite, self.events, options)
        self.ranks = options.ranks
        """Who computes the tiles together."""
        self._steps: WeakKeyDictionary[Prepared, RecordedStep] = WeakKeyDictionary()
        self._predicting: Engine | None = None
        """An engine of the same model without the loss, once it is asked for predictions."""
        self.last_run: StepMeasured | None = None
        self.leave_again: Callable[[], None] | None = None
        """Leaves buffers as the last `backward` did, from what they hold then, where it was computed in tiles."""
        self.overflows = 0
        """Number of times that cotangents in float16 have left its range; the next run begins with the scale that this
        asked for."""
        self._squared_errors: dict[str, float] = {}
        """Squares of what `gradient_errors` tells, by the name in the graph."""

    @property
    def model(self) -> nn.Module:
        return self._composite.model

    @property
    def loss(self) -> Loss | None:
        return self._composite.loss

    @property
    def in_tiles(self) -> bool:
        """Compute in tiles, too, what fits as it is: then bits do not depend on the number of ranks."""
        return self._planner.in_tiles

    @in_tiles.setter
    def in_tiles(self, asked: bool) -> None:
        self._planner.choose_tiles(only=asked)

    @property
    def records(self) -> bool:
        """Record steps and replay them, where the device does."""
        return self._planner.records

    @records.setter
    def records(self, asked: bool) -> None:
        self._planner.record_steps(asked)

    def __repr__(self) -> str:
        loss = "no loss" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__)
        budget = "no budget" if self._options.budget_bytes is None else format_bytes(self._options.budget_bytes)
        last = "" if self.last_run is None else f", last run {format_seconds(self.last_run.seconds)}"
        return f"<Engine of {type(self.model).__name__}, {loss}, on {self._device}, {budget}{last}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Compile copies and pickles alike; they adopt `state_dict`. What was captured, and listeners, stay here."""
        return operator.call, (self._again,), self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    @property
    def gradient_errors(self) -> dict[str, float]:
        """Errors that `storage="error E"` adds to gradients: the expected 2-norm, by the name of a parameter.

        Predicted from norms averaged over this engine's runs, the newest counting a tenth (docs/math.md), for the
        weights of convolutions that read quantised fields, directly or behind norms, ReLU, sums, joined channels,
        max pooling and upsampling. `last_run.gradient_error` sets the same beside the gradients of the last run.
        """
        prefix = "model."
        found = {name: square for name, square in self._squared_errors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): math.sqrt(square) for name, square in found.items()}

    @lets_go
    def plan(self, image: Any, target: Any = None, *, machine: Machine | None = None, backward: bool = True) -> Plan:
        """Return the plan for an image (and target) of this size: of a backward if the engine has a loss, unless that
        is not what is asked for, else of a `stream`.

        With a `machine`, what would be planned on that one, beside what this process holds: no tiles are timed, and
        runs here have plans of their own.

        Raises:
            BudgetError: it cannot fit; nothing has run.
            CaptureError, UnsupportedOperatorError: the model cannot be captured.
            ImageError, TargetError: an input cannot be used.
        """
        with self.ranks.error_scope(), opened_sources(self._composite, image, target) as sources:
            graph, backward = self._captures.get(sources).graph, backward and self.loss is not None
            if machine is None:
                return self._planner.prepare(graph, sources, None, backward=backward, content=False).plan
            return self._planner.make(self._planner.problem(graph, sources, None, backward=backward, machine=machine))

    def check_independent(self, image: Any, target: Any = None) -> None:
        """Raises ModelError where a run depends on what the run before it left in the model, beside parameters; else
        as `plan`.
        """
        with self.ranks.error_scope(), opened_sources(self._composite, image, target) as sources:
            check_independent(self._captures.get(sources))

    @lets_go
    def problem(self, image: Any, target: Any = None, *, machine: Machine | None = None) -> Problem:
        """Return what `plan` is a plan for, to ask for plans with other budgets (`gigagrad.plans.trade_off`)."""
        with self.ranks.error_scope(), opened_sources(self._composite, image, target) as sources:
            graph, backward = self._captures.get(sources).graph, self.loss is not None
            return self._planner.problem(graph, sources, None, backward=backward, machine=machine)

    @lets_go
    def backward(self, image: Any, target: Any) -> torch.Tensor:
        """Return the exact loss (0-d, detached); add the exact gradient to every parameter's `.grad`.

        `image` is anything `open_image` takes, or a tensor `(C, H, W)`; `target` likewise, or a small label tensor. A
        tuple of images is several arguments of the model, a tuple of targets comes to the loss as one. A float tensor
        that requires a gradient gets one, too, image or label. Gradients are added only after the whole image has been
        seen: an error leaves every `.grad` as it was. Hooks on parameters run as in PyTorch.

        Raises: as `plan`.
        """
        if self.loss is None:
            raise ConfigError("this engine has no loss; compile(model, loss) to train")
        with filling() as filled:
            with self.ranks.error_scope(), self._shown(), opened_sources(self._composite, image, target) as sources:
                run, graph = self._run("backward", sources, filled)
                given = {name: source.given for name, source in sources.items() if source.given is not None}
            if isinstance(run, WholeRun):
                with hooks_called(run.hooked):
                    _accumulate(run.gradients)
                return run.output
        parameters = {**self._composite.named_tensors(), **graph.closed}
        found: list[tuple[torch.Tensor, torch.Tensor]]
        found = [(parameters[graph[i].arguments["name"]], gradient) for i, gradient in run.gradients.items()]
        run.gradients.clear()
        found += [(given[name], gradient.reshape(given[name].shape)) for name, gradient in run.input_gradients.items()]
        _accumulate(found)
        return run.output

    @lets_go
    def image_gradient(self, image: Any, target: Any, *, out: str | Path | Sink | None = None) -> Any:
        """Return the exact gradient of the loss for the pixels of the (first) image, `(1, C, H, W)`; nobody's `.grad`
        changes.

        Integers count as the numbers they stand for: of a slide it is the change of the loss for each step of 256.
        With `out` it leaves in strips as it is finished, as in `forward`; a few rows are held of it, all of them where
        several segments of the plan read the image, as its parts before and behind a norm over the whole image.

        Raises: as `plan`; ModelError where no gradient reaches the image; WriteError if `out` cannot be written.
        """
        if self.loss is None:
            raise ConfigError("this engine has no loss; compile(model, loss) for the gradient of a number")
        self._one_process("image_gradient")
        if self._composite.precision is torch.float16:
            raise ConfigError("the gradient of an image needs a range that float16 has not; use bfloat16 or float32")
        with opened_sources(self._composite, image, target, asked=True) as sources:
            image_node = self._captures.get(sources).graph.source("image")
            if image_node is None:
                raise ModelError("the loss does not depend on the image, so there is no gradient")
            return self._predictions.taken(image_node, sources, out, "backward")

    @lets_go
    def forward(
        self, image: Any, target: Any = None, *, out: str | Path | Sink | None = None, within: Any = None
    ) -> Any:
        """Compute without gradients: the loss of a target; without one the prediction `(1, C, H, W)`, or whatever the
        model returns (a tuple or a dictionary of tensors, a class score).

        With `out="prediction.tif"` the prediction is written tile by tile as a float32 pyramidal TIFF (`.ome.tif`: an
        OME-TIFF, `.cog.tif`: a cloud-optimised GeoTIFF, `.ome.zarr`: an OME-Zarr) and the path is returned; one of the
        image's size has its place on earth, and NaN where that has no data. A `Sink` of `execution.sinks` does with it
        what it likes; otherwise the whole prediction is held in memory. What is held of the output is part of the
        plan.

        `within` is a mask `(rows, columns)` of the whole prediction at any resolution, of tissue for instance. Pixels
        where its nearest one is 0 are not computed beyond what others read of them: they are NaN, 0 of integers. Of the
        plan's tiles only the part around what is wanted is computed: from the same pixels, by the same operators, but
        kernels may add up in another order in a smaller crop. With `tile=`, tiles are computed whole, and wanted pixels
        have the bits that they would have without it.

        Raises: as `plan`; WriteError if `out` cannot be written.
        """
        if self.loss is not None and target is None:
            predicting = self._without_loss()
            with self._shown():
                found = predicting.forward(image, out=out, within=within)
            self.last_run = predicting.last_run
            return found
        if self.loss is not None and out is not None:
            raise ConfigError("out= is for a prediction: forward(image, out=...), without the target")
        if self.loss is not None and within is not None:
            raise ConfigError("within= is for a prediction: forward(image, within=...), without the target")
        with self.ranks.error_scope(), self._shown(), opened_sources(self._composite, image, target) as sources:
            if self.loss is not None:
                return self._run("forward", sources, [])[0].output
            graph = self._captures.get(sources).graph
            if delivers_image(graph):
                self._one_process("a prediction")
                return self._predictions.delivered(graph, sources, out, within)
            if out is not None or within is not None:
                raise ConfigError(f"{'within' if out is None else 'out'}= needs a model whose output is an image")
            return self._run("forward", sources, [])[0].outputs

    @stream_lets_go
    def stream(self, image: Any) -> Generator[tuple[Box, torch.Tensor], None, None]:
        """Yield the prediction as `(box, crop)`: disjoint boxes that cover it, in rows of equal height, left to right.

        The run ends when the last one has come, when it is closed, or when nobody holds it any more.

        Raises: as `plan`; ConfigError if the model's output is not an image.
        """
        if self.loss is not None:
            yield from self._without_loss().stream(image)
            return
        self._one_process("stream")
        with opened_sources(self._composite, image, None) as sources:
            yield from self._predictions.pieces(sources)

    @lets_go
    def at(self, image: Any, *, at_once: bool = False) -> PredictedImage:
        """Open the prediction of an image as an image `(C, H, W)`, whose boxes are computed when they are read.

        Each pixel has the bits that `forward` gives it. Of a plan with one segment a box costs the tiles that it meets;
        else the first box also costs what the plan computes before: sums over the image, fields that it keeps. With
        `at_once` the plan is another one that keeps no fields: then only sums over the image come first, and a pixel
        may be rounded otherwise than by `forward`. It is the model's prediction as that is now, and its buffers stay as
        they are. Close it: it holds threads, and what the plan keeps.

        Raises: as `plan`; ConfigError if the model's output is not an image.
        """
        if self.loss is not None:
            return self._without_loss().at(image, at_once=at_once)
        self._one_process("at")
        return self._predictions.at(image, at_once=at_once)

    def state_dict(self) -> dict[str, Any]:
        """Return tile shapes and memory layouts by size, which depend on the machine and on the memory at hand,
        `overflows`, the norms behind `gradient_errors`, and with a `seed` the number of runs.

        An engine that loads them goes on with this one's arithmetic bit for bit.
        """
        errors, runs = dict(self._squared_errors), {} if self._options.seed is None else {"runs": self._runs}
        return {**self._planner.state_dict(), "overflows": self.overflows, "gradient_errors": errors, **runs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the choices of another engine's `state_dict`, from the next run on."""
        self._planner.load_state_dict(state)
        self.overflows = state.get("overflows", 0)  # none in states of earlier versions
        self._squared_errors = dict(state.get("gradient_errors") or {})
        self._runs = state.get("runs", self._runs)

    @property
    def _predictions(self) -> Predictions:
        """Make it anew: an engine that it is part of would be garbage in a circle."""
        return Predictions(
            self._composite, self._captures, self._planner, self.events, self._device, self._measured, self._draws
        )

    def _without_loss(self) -> Engine:
        """Return the engine for predictions of one that has a loss; its events are this one's."""
        if self._predicting is None:
            self._predicting = self._again(loss=None)
            self._predicting.events.subscribe(self.events.emit)
        return self._predicting

    def _draws(self, prepared: Prepared) -> int:
        drawn = prepared.rounding is not None or bool(drawing(prepared.graph))
        self._runs += 1
        return draws_of(self._runs - 1, self._options.seed, self.ranks, drawn=drawn)

    def _one_process(self, what: str) -> None:
        if self.ranks.count > 1:
            raise ConfigError(f"{what} comes from one process: leave mesh= out, and give each rank slides of its own")

    def _shown(self) -> AbstractContextManager[None]:
        """Show bars to a person at a terminal or a notebook, where nobody listens."""
        seen = (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules
        if not (self._options.progress and seen) or self.events.has_listeners:
            return nullcontext()
        from gigagrad.terminal import while_it_lasts

        return while_it_lasts(self.events)

    def _run(
        self, phase: str, sources: dict[str, Source], filled: list[torch.Tensor]
    ) -> tuple[Run | RecordedRun | WholeRun, Graph]:
        """Return a finished run of a graph whose output is no image."""
        try:
            return self._run_as_planned(phase, sources, filled)
        except NotAtOnce as error:
            self.events.emit(Notice(f"{error}; it is computed in tiles", warning=True))
            self.in_tiles = True
            self._runs -= 1
            return self._run_as_planned(phase, sources, filled)

    def _run_as_planned(
        self, phase: str, sources: dict[str, Source], filled: list[torch.Tensor]
    ) -> tuple[Run | RecordedRun | WholeRun, Graph]:
        with self._measured(phase, sources) as (prepared, captured, more):
            draws = self._draws(prepared)
            if prepared.plan.whole:
                whole = WholeRun(prepared, sources, self._composite, self.events, filled, draws)
                self._run_whole(whole, prepared, captured)
                return whole, prepared.graph
            computed = self._replayed if prepared.may_be_recorded else self._in_tiles
            run = computed(prepared, draws, sources)
            self._planner.finished(prepared, run.pass_seconds)
            gradients = {prepared.graph[i].arguments["name"]: g for i, g in run.gradients.items()}
            more["gradient_error"] = average_in(self._squared_errors, run.rounding_errors, gradients)
        leave_state(self._composite, run.updates, captured)
        in_tiles = phase == "backward" and not prepared.plan.whole_pixels
        replayed = isinstance(run, RecordedRun)
        self.leave_again = None
        if in_tiles:
            self.leave_again = leaving_again(self._composite, captured, run.values, overwritten=replayed)
        return run, prepared.graph

    def _in_tiles(self, prepared: Prepared, draws: int, sources: Sources, seeds: Values | None = None) -> Run:
        for overflows in range(self.overflows, MOST_OVERFLOWS + 1):
            try:
                run = Run(
                    prepared,
                    sources,
                    stored_in(self._composite, prepared.graph),
                    self.events,
                    overflows=overflows,
                    draws=draws,
                    seeds=seeds,
                    ranks=self.ranks,
                    journal=self._options.journal if prepared.problem.backward else None,
                )
                with run, closing(run):
                    run.run()
                break
            except CotangentOverflow:
                told = "a gradient left the range of float16; the step begins anew, with smaller cotangents inside"
                self.events.emit(Notice(told))
        if run.journal.taken:
            told = f"the step went on behind {run.journal.taken} chunks that were finished before"
            self.events.emit(Notice(told))
        if overflows != self.overflows and all(g.isfinite().all() for g in run.gradients.values()):
            self.overflows = overflows
        return run

    def _replayed(self, prepared: Prepared, draws: int, sources: Sources) -> Run | RecordedRun:
        """Replay the step, or compute it as one that is going to be replayed."""
        step = self._steps.get(prepared)
        if step is None:
            step = RecordedStep(self._device, lambda text: self.events.emit(Notice(text, warning=True)))
            self._steps[prepared] = step
        composite, graph = self._composite, prepared.graph
        tensors = (*composite.named_tensors().values(), *graph.closed.values())
        compute = partial(self._in_tiles, prepared, draws)
        phase = "backward" if prepared.problem.backward else "forward"
        self.events.emit(whole_begun(prepared.plan, phase))
        run = step.run(graph, sources, seed_values(graph, draws), tensors, compute)
        if isinstance(run, RecordedRun):
            tiles = prepared.plan.tile_count
            self.events.emit(TileDone(phase, tiles, tiles, 0.0))
        return run

    def _run_whole(self, run: WholeRun, prepared: Prepared, captured: Captured) -> None:
        run.run()
        self._planner.finished(prepared, None)
        if captured.effects or captured.left_out:
            captured.guard.renew()  # the model itself ran: whatever that left is what the next one finds
        self.leave_again = None

    @contextmanager
    def _measured(
        self, phase: str, sources: dict[str, Source], sink: Sink | None = None
    ) -> Iterator[tuple[Prepared, Captured, dict[str, float]]]:
        """Yield the plan, what was captured, and a dictionary for what else the run is to report in `last_run`."""
        captured = self._captures.get(sources)
        prepared = self._planner.prepare(captured.graph, sources, sink, backward=phase == "backward")
        RecordedStep.drop_others(self._device, self._steps.get(prepared))
        earlier = self._device.peak_bytes()
        start = time.perf_counter()
        more: dict[str, float] = {}
        yield prepared, captured, more
        image = sources["image"].spec
        self.last_run = StepMeasured(
            phase=phase,
            pixels=image.shape[0] * image.shape[-2] * image.shape[-1],
            seconds=time.perf_counter() - start,
            peak_bytes=self._device.peak_bytes(),
            predicted_peak_bytes=prepared.plan.predicted_peak_bytes,
            budget_bytes=self._options.budget_bytes or 0,
            earlier_peak_bytes=earlier,
            patches=image.shape[0] if image.bag else 0,
            **more,
        )
        self.events.emit(self.last_run)


def _accumulate(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add gradients to `.grad` the way autograd does, hooks included. `found` is emptied: what nobody else holds
    becomes a new `.grad` as it is.
    """
    if found:
        tensors = [tensor for tensor, _ in found]
        gradients = [gradient.to(tensor.device, tensor.dtype) for tensor, gradient in found]
        found.clear()
        with torch.inference_mode(False), torch.enable_grad():
            _HandOver.apply(gradients, *tensors).backward()  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """Hand gradients that are known already over to autograd, one by one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        every = (None, *ctx.gradients)
        ctx.gradients.clear()
        return every
