"""The engine: what `gigagrad.compile` returns. It captures and plans on first sight of a size, and runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ModelError, TargetError
from gigagrad.events import Events, Notice, StepMeasured
from gigagrad.execution.allocator import settle_allocator
from gigagrad.execution.assemble import assemble
from gigagrad.execution.budgets import Budgets
from gigagrad.execution.captures import Captures
from gigagrad.execution.cotangent_unit import MOST_OVERFLOWS, CotangentOverflow
from gigagrad.execution.planner import Planner, Survey
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.process import peak_bytes
from gigagrad.execution.rounding_error import RunningErrors
from gigagrad.execution.run import Run
from gigagrad.execution.sources import Source, image_source, target_source
from gigagrad.execution.tracebacks import lets_go, stream_lets_go
from gigagrad.graphs import Captured, Composite, Graph
from gigagrad.plans import Plan
from gigagrad.stores import Quantised, Rounding, parse_storage

Loss = Callable[[Any, Any], torch.Tensor]

_PRECISIONS = {
    None: None,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compile(
    model: nn.Module,
    loss: Loss | None = None,
    *,
    memory: str | int | None = None,
    device: str | torch.device = "cpu",
    precision: str | None = None,
    scratch: str | Path | None = None,
    scratch_bytes: str | int | None = None,
    host_memory: str | int | None = None,
    storage: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    tile: tuple[int, int] | None = None,
    seed: int | None = None,
) -> Engine:
    """Make an engine for `model` and `loss`; nothing runs yet.

    Args:
        model: any module; takes `(1, C, H, W)` in the dtype the image holds (uint8 for a slide), several images as
            several arguments. Operators that have no tile rule run on whole fields; the plan names them.
        loss: `loss(output, target)` returns a scalar; `output` is whatever the model returns. Without a loss the engine
            predicts.
        memory: the budget, e.g. `"2 GiB"` or bytes: peak resident memory of the whole process on the CPU (interpreter
            and libraries included), device memory on a GPU. None: no bound, only speed decides.
        device: where tiles are computed. The model may stay where it is.
        precision: `"bfloat16"` or `"float16"` as autocast would, `"float32"` or `"float64"` as if the model and the
            image were cast; None: the model's own dtype. Sums over tiles are in float64 in any case, and gradients come
            in their parameters' dtypes. In float16 no loss needs scaling: what would be too small on its way back is
            scaled inside, by a power of two that is taken out again (docs/math.md).
        scratch: an existing folder, on a fast disk, for the fields that do not fit in `memory`: in a folder of this
            run's own, which goes when the run ends. Without it such fields are computed again.
        scratch_bytes: the most that these files may take; None: what is free.
        host_memory: the same for host memory beside a GPU; None: what is free.
        storage: how fields that a plan keeps are stored; `"exact"` (None): bit for bit. Lossy, so never by itself:
            `"bfloat16"`, `"float16"` (half the bytes of float32), or `"error 0.01"`: quantised, in files only, with
            errors of at most that. The run goes on from what was stored, and its gradient is exact for that
            (docs/math.md).
        optimizer: the one that will step these parameters: plans keep room for the state that its first step makes.
            None: room for Adam's, twice the trainable parameters.
        tile: `(height, width)` in pixels of the last field, to force the tile's shape (tests, experiments).
        seed: of random operators (dropout, stochastic depth), which otherwise draw from PyTorch's own generator. With
            one, the n-th run of an engine draws the same numbers as the n-th run of another.

    Raises:
        ConfigError: an argument cannot be used.
    """
    budgets = Budgets.parse(memory, host_memory, scratch, scratch_bytes)
    rounding = parse_storage(storage)
    if isinstance(rounding, Quantised) and scratch is None:
        raise ConfigError(f"storage={storage!r} makes fields in files smaller; name a folder for them with scratch=")
    return Engine(
        model,
        loss,
        budgets=budgets,
        device=device,
        precision=precision,
        rounding=rounding,
        optimizer=optimizer,
        tile=tile,
        seed=seed,
    )


class Engine:
    """Exact loss, gradients and predictions of one module on images of any size. Made by `compile`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        *,
        budgets: Budgets,
        device: str | torch.device,
        precision: str | None,
        rounding: Rounding | None,
        optimizer: torch.optim.Optimizer | None,
        tile: tuple[int, int] | None,
        seed: int | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss must be a callable loss(output, target), got {type(loss).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if tile is not None and (len(tile) != 2 or min(tile) < 1):
            raise ConfigError(f"tile must be (height, width) in pixels, both at least 1, got {tile!r}")
        if precision not in _PRECISIONS:
            raise ConfigError(f"unknown precision {precision!r}; use one of {', '.join(map(str, _PRECISIONS))}")
        self._budgets = budgets
        self._device = _usable_device(device)
        if self._device.type == "cpu":
            settle_allocator()
        self._composite = Composite(model, loss, _PRECISIONS[precision])
        self._seed = seed
        self._runs = 0
        self.events = Events()
        self._captures = Captures(self._composite, self.events)
        self._planner = Planner(
            self._composite,
            self.events,
            budgets=budgets,
            device=self._device,
            tile=tile,
            rounding=rounding,
            optimizer=optimizer,
        )
        self.last_run: StepMeasured | None = None
        self._overflows = 0
        """What runs in float16 have learned of the size of their cotangents."""
        self._errors = RunningErrors()

    @property
    def model(self) -> nn.Module:
        return self._composite.model

    @property
    def loss(self) -> Loss | None:
        return self._composite.loss

    @property
    def gradient_errors(self) -> dict[str, float]:
        """What `storage="error E"` adds to gradients: the expected 2-norm of the error, by the name of a parameter.

        Predicted from norms averaged over this engine's runs, the newest counting a tenth (docs/math.md), for the
        weights of convolutions that read quantised fields, directly or behind norms, ReLU, sums, joined channels,
        max pooling and upsampling. `last_run.gradient_error` sets the same beside the gradients of the last run.
        """
        prefix = "model."
        found = self._errors.errors()
        return {name.removeprefix(prefix): error for name, error in found.items() if name.startswith(prefix)}

    @lets_go
    def plan(self, image: Any, target: Any = None) -> Plan:
        """The plan for an image (and target) of this size: of a backward if the engine has a loss, else a forward.

        Raises:
            BudgetError: it cannot fit; nothing has run.
            CaptureError, UnsupportedOperatorError: the model cannot be captured.
            ImageError, TargetError: an input cannot be used.
        """
        with self._sources(image, target) as sources:
            graph = self._captures.get(sources).graph
            return self._planner.prepare(graph, sources, backward=self.loss is not None).plan

    @lets_go
    def survey(self, image: Any, target: Any = None) -> Survey:
        """The captured graph and a function from budgets to plans: what `gigagrad plan` draws its curve from."""
        with self._sources(image, target) as sources:
            return self._planner.survey(self._captures.get(sources).graph, sources, backward=self.loss is not None)

    @lets_go
    def backward(self, image: Any, target: Any) -> torch.Tensor:
        """The exact loss (0-d, detached); adds the exact gradient to every parameter's `.grad`.

        `image` is anything `open_image` takes, or a tensor `(C, H, W)`; `target` likewise, or a small label tensor. A
        tuple of images is several arguments of the model, a tuple of targets comes to the loss as one. A float tensor
        that requires a gradient gets one, too. Gradients are added only after the whole image has been seen: an error
        leaves every `.grad` as it was. Hooks on parameters run as in PyTorch.

        Raises: as `plan`.
        """
        if self.loss is None:
            raise ConfigError("this engine has no loss; compile(model, loss) to train")
        with self._sources(image, target) as sources:
            run, graph = self._run("backward", sources)
            given = {name: source.given for name, source in sources.items() if source.given is not None}
        parameters = {**dict(self._composite.named_parameters(remove_duplicate=False)), **graph.closed}
        found: list[tuple[torch.Tensor, torch.Tensor]]
        found = [(parameters[graph[i].arguments["name"]], gradient) for i, gradient in run.gradients.items()]
        found += [(given[name], gradient.reshape(given[name].shape)) for name, gradient in run.input_gradients.items()]
        _accumulate(found)
        return run.output

    @lets_go
    def forward(self, image: Any, target: Any = None, *, out: str | Path | None = None) -> Any:
        """Without gradients: the loss if the engine has one, else the prediction `(1, C, H, W)`, or whatever the model
        returns (a tuple or a dictionary of tensors, a class score).

        With `out="prediction.tif"` the prediction is written tile by tile as a float32 pyramidal TIFF and the path is
        returned; otherwise the whole prediction is held in memory.

        Raises: as `plan`; WriteError if `out` cannot be written.
        """
        if self.loss is not None:
            if out is not None:
                raise ConfigError("out= needs an engine without a loss: compile(model)")
            with self._sources(image, target) as sources:
                return self._run("forward", sources)[0].output
        with self._sources(image, None) as sources:
            graph = self._captures.get(sources).graph
            if not _delivers_image(graph):
                if out is not None:
                    raise ConfigError("out= needs a model whose output is an image")
                return self._run("forward", sources)[0].outputs
        if out is not None:
            return self._write(image, Path(out), graph)
        node = graph[graph.output]
        result = torch.empty(node.shape, dtype=node.dtype, device=self._device)
        for box, crop in self.stream(image):
            result[..., box.y0 : box.y1, box.x0 : box.x1] = crop
        return result if graph.structure is None else tree_unflatten([result], graph.structure)

    @stream_lets_go
    def stream(self, image: Any) -> Generator[tuple[Box, torch.Tensor], None, None]:
        """The prediction as `(box, crop)`: disjoint boxes that cover it, in rows of equal height, left to right.

        The run ends when the last one has come, when it is closed, or when nobody holds it any more.

        Raises: as `plan`; ConfigError if the engine has a loss or the model's output is not an image.
        """
        if self.loss is not None:
            raise ConfigError("stream needs an engine without a loss: compile(model)")
        with self._sources(image, None) as sources, self._measured("forward", sources) as (prepared, captured, _):
            if not _delivers_image(prepared.graph):
                raise ConfigError("stream needs a model whose output is an image")
            with self._random():
                run = Run(prepared, sources, self._stored(prepared.graph), self.events, backward=False)
            with run, closing(run):
                yield from run.stream()
        self._leave_state(run, captured)

    def state_dict(self) -> dict[str, Any]:
        """Tile shapes and memory layouts by size, which depend on the machine and on the memory at hand, and the norms
        behind `gradient_errors`.

        An engine that loads them repeats this one's arithmetic bit for bit.
        """
        return {**self._planner.state_dict(), "gradient_errors": self._errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the choices of another engine's `state_dict`, from the next run on."""
        self._planner.load_state_dict(state)
        self._errors = RunningErrors(state.get("gradient_errors"))

    def _write(self, image: Any, path: Path, graph: Graph) -> Path:
        from gigagrad.images.write import write_pyramid

        _, channels, height, width = graph[graph.output].shape
        opened = image_source(image)
        tiles = self.stream(opened.image)
        try:
            mpp = opened.image.mpp if opened.image is not None and opened.spec.shape[-2:] == (height, width) else None
            write_pyramid(
                path,
                assemble(_pixels(tiles), height, width),
                shape=(height, width, channels),
                dtype=np.dtype(np.float32),
                mpp=mpp,
                nearest=False,
            )
        finally:
            tiles.close()  # the traceback of an error may keep it
            opened.close()
        return path

    def _run(self, phase: str, sources: dict[str, Source]) -> tuple[Run, Graph]:
        """A finished run of a graph whose output is no image."""
        with self._measured(phase, sources) as (prepared, captured, more), self._random():
            for overflows in range(self._overflows, MOST_OVERFLOWS + 1):
                try:
                    run = self._attempt(prepared, sources, backward=phase == "backward", overflows=overflows)
                    break
                except CotangentOverflow:
                    told = "a gradient left the range of float16; the step begins anew, with smaller cotangents inside"
                    self.events.emit(Notice(told))
            if overflows != self._overflows and all(g.isfinite().all() for g in run.gradients.values()):
                self._overflows = overflows
            more["gradient_error"] = self._gradient_error(run, prepared.graph)
        self._leave_state(run, captured)
        return run, prepared.graph

    def _attempt(self, prepared: Prepared, sources: dict[str, Source], *, backward: bool, overflows: int) -> Run:
        """A finished run. Raises CotangentOverflow."""
        stored = self._stored(prepared.graph)
        with (
            Run(prepared, sources, stored, self.events, backward=backward, overflows=overflows) as run,
            closing(run),
        ):
            run.run()
        return run

    @contextmanager
    def _random(self) -> Iterator[None]:
        """PyTorch's generators, or with a seed this run's own: of the CPU, and of the GPU that it runs on."""
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus, enabled=self._seed is not None):
            if self._seed is not None:
                # Any two (seed, run) pairs start apart: the multiplier is odd and larger than any number of runs.
                seed = (self._seed * 1_000_003 + self._runs) % 2**63
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach every GPU there is
                for gpu in gpus:
                    with torch.cuda.device(gpu):
                        torch.cuda.manual_seed(seed)
                self._runs += 1
            yield

    def _stored(self, graph: Graph) -> Callable[[str, str], torch.Tensor]:
        """Looks up a parameter or buffer as it is now, by its kind and name in the graph."""
        composite = self._composite

        def look_up(kind: str, name: str) -> torch.Tensor:
            if name in graph.closed:
                return graph.closed[name].detach()
            tensor = composite.get_parameter(name) if kind == "parameter" else composite.get_buffer(name)
            return tensor.detach().to(composite.dtype_of(tensor.dtype))

        return look_up

    def _leave_state(self, run: Run, captured: Captured) -> None:
        """Running statistics and the like, counters too: once a run, as PyTorch would."""
        for name, value in run.updates.items():
            if name in captured.graph.closed:
                captured.graph.closed[name].copy_(value)
                continue
            path, _, own = name.rpartition(".")
            owner = self._composite.get_submodule(path)
            buffer = getattr(owner, own)
            if buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                setattr(owner, own, value.clone() if buffer is None else value.to(buffer, copy=True))
        captured.leave_effects()

    @contextmanager
    def _sources(self, image: Any, target: Any) -> Iterator[dict[str, Source]]:
        sources: dict[str, Source] = {}
        dtype_of = self._composite.dtype_of
        try:
            for index, one in enumerate(image if isinstance(image, tuple | list) else (image,)):
                sources[f"image{index or ''}"] = image_source(one, dtype_of)
            if self.loss is not None:
                if target is None:
                    raise TargetError("this engine has a loss, which needs a target: an image or a label tensor")
                for index, one in enumerate(target if isinstance(target, tuple) else (target,)):
                    sources[f"target{index or ''}"] = target_source(one, sources["image"], dtype_of)
            yield sources
        finally:
            for source in sources.values():
                source.close()

    def _gradient_error(self, run: Run, graph: Graph) -> float:
        """Take in what this run knows about rounding errors; what it is expected to have added, in all weights at once,
        relative to their gradients."""
        found = run.rounding_errors
        self._errors.refresh(found)
        expected = {name: error for name, error in self._errors.errors().items() if name in found}
        names = {i: graph[i].arguments["name"] for i in run.gradients}
        pairs = [(expected[names[i]], gradient) for i, gradient in run.gradients.items() if names[i] in expected]
        size = math.hypot(*(gradient.norm().item() for _, gradient in pairs))
        return math.hypot(*(error for error, _ in pairs)) / size if size else 0.0

    @contextmanager
    def _measured(
        self, phase: str, sources: dict[str, Source]
    ) -> Iterator[tuple[Prepared, Captured, dict[str, float]]]:
        """The plan, what was captured, and a place for what else the run is to tell in `last_run`."""
        captured = self._captures.get(sources)
        prepared = self._planner.prepare(captured.graph, sources, backward=phase == "backward")
        # The peak is the process's own since it started, whoever set it.
        predicted = max(prepared.plan.predicted_peak_bytes, peak_bytes(self._device))
        start = time.perf_counter()
        more: dict[str, float] = {}
        yield prepared, captured, more
        self._planner.finished(prepared)
        height, width = sources["image"].spec.shape[-2:]
        self.last_run = StepMeasured(
            phase=phase,
            pixels=height * width,
            seconds=time.perf_counter() - start,
            peak_bytes=peak_bytes(self._device),
            predicted_peak_bytes=predicted,
            budget_bytes=self._budgets.memory_bytes or 0,
            **more,
        )
        self.events.emit(self.last_run)


def _accumulate(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add gradients to `.grad` the way autograd does, hooks included."""
    if found:
        with torch.enable_grad():
            views = [tensor.view_as(tensor) for tensor, _ in found]
        torch.autograd.backward(views, [gradient.to(tensor.device, tensor.dtype) for tensor, gradient in found])


def _delivers_image(graph: Graph) -> bool:
    """Whether the model's output is an image `(1, C, H, W)`, else a value without spatial axes.

    Raises ModelError for a field with its axes anywhere else.
    """
    node = graph[graph.output]
    if node.is_field and (node.axes != (-2, -1) or len(node.shape) != 4):
        raise ModelError(f"an output that is an image must be laid out as (N, C, H, W), got shape {node.shape}")
    return node.is_field


def _pixels(stream: Iterator[tuple[Box, torch.Tensor]]) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    """Crops `(1, C, h, w)` as float32 arrays `(h, w, C)`."""
    for box, crop in stream:
        yield box, crop[0].permute(1, 2, 0).to("cpu", torch.float32).numpy()


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"unknown device {device!r}; use 'cpu' or 'cuda'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but PyTorch finds no CUDA device here")
    return chosen
