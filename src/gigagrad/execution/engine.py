"""The engine: what `gigagrad.compile` returns. It captures and plans on first sight of a size, and runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ModelError, TargetError
from gigagrad.events import Events, StepMeasured
from gigagrad.execution.assemble import assemble
from gigagrad.execution.process import held_bytes, peak_bytes, return_freed_memory, share_one_arena
from gigagrad.execution.run import Prepared, Run
from gigagrad.execution.sources import Source, image_source, target_source
from gigagrad.execution.trial import faster_layout
from gigagrad.graphs import Composite, Graph, capture
from gigagrad.plans import Limits, Machine, Plan, make_plan, split_stages
from gigagrad.units import parse_bytes

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_RUNTIME_BYTES = 144 * 2**20
"""What the first step adds beside its tensors: kernels, thread stacks, the reader's code (bench/tile_memory.py)."""
_WORTH_A_TRIAL = 32
"""Fewer tiles than this are over before a trial of memory layouts would pay."""
_PLAIN = (bool, int, float, str)


def compile(
    model: nn.Module,
    loss: Loss | None = None,
    *,
    memory: str | int | None = None,
    device: str | torch.device = "cpu",
    tile: tuple[int, int] | None = None,
) -> Engine:
    """Make an engine for `model` and `loss`; nothing runs yet.

    Args:
        model: any module; takes `(1, C, H, W)` in the dtype the image holds (uint8 for a slide).
        loss: `loss(output, target)` returns a scalar. Without one the engine predicts.
        memory: the budget, e.g. `"2 GiB"` or bytes: peak resident memory of the whole process on the CPU (interpreter
            and libraries included), device memory on a GPU. None: no bound, only speed decides.
        device: where tiles are computed. The model may stay where it is.
        tile: `(height, width)` in pixels of the last field, to force the tile's shape (tests, experiments).

    Raises:
        ConfigError: an argument cannot be used.
    """
    return Engine(model, loss, memory=memory, device=device, tile=tile)


@dataclass(frozen=True, slots=True)
class Choice:
    """What planning decided for one size: enough to make the same plan again."""

    memory_format: str
    workers: int
    tiles: tuple[tuple[int, int], ...]
    """Height and width in pixels, one for each stage."""

    def to_dict(self) -> dict[str, Any]:
        tiles = [list(tile) for tile in self.tiles]
        return {"memory_format": self.memory_format, "workers": self.workers, "tiles": tiles}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Choice:
        tiles = tuple((int(h), int(w)) for h, w in data["tiles"])
        return cls(data["memory_format"], int(data["workers"]), tiles)


class Engine:
    """Exact loss, gradients and predictions of one module on images of any size. Made by `compile`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        *,
        memory: str | int | None,
        device: str | torch.device,
        tile: tuple[int, int] | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss must be a callable loss(output, target), got {type(loss).__name__}")
        if tile is not None and (len(tile) != 2 or min(tile) < 1):
            raise ConfigError(f"tile must be (height, width) in pixels, both at least 1, got {tile!r}")
        try:
            self._budget_bytes = None if memory is None else parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._device = _usable_device(device)
        if self._device.type == "cpu":
            share_one_arena()
        self._tile = tile
        self._composite = Composite(model, loss)
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._choices: dict[str, Choice] = {}
        self._adopted: dict[str, Choice] = {}
        self.events = Events()
        self.last_run: StepMeasured | None = None

    @property
    def model(self) -> nn.Module:
        return self._composite.model

    @property
    def loss(self) -> Loss | None:
        return self._composite.loss

    def plan(self, image: Any, target: Any = None) -> Plan:
        """The plan for an image (and target) of this size: of a backward if the engine has a loss, else a forward.

        Raises:
            BudgetError: it cannot fit; nothing has run.
            CaptureError, UnsupportedOperatorError: the model cannot be captured.
            ImageError, TargetError: an input cannot be used.
        """
        with self._sources(image, target) as sources:
            return self._prepare(sources, backward=self.loss is not None).plan

    def backward(self, image: Any, target: Any) -> torch.Tensor:
        """The exact loss (0-d, detached); adds the exact gradient to every parameter's `.grad`.

        `image` is anything `open_image` takes, or a tensor `(C, H, W)`; `target` likewise, or a small label tensor.
        Gradients are added only after the whole image has been seen: an error leaves every `.grad` as it was.

        Raises: as `plan`.
        """
        if self.loss is None:
            raise ConfigError("this engine has no loss; compile(model, loss) to train")
        with self._sources(image, target) as sources, self._measured("backward", sources) as prepared:
            run = Run(prepared, sources, self._stored, self.events, backward=True)
            run.run()
        parameters = dict(self._composite.named_parameters(remove_duplicate=False))
        for node_id, gradient in run.gradients.items():
            parameter = parameters[prepared.graph[node_id].arguments["name"]]
            gradient = gradient.to(parameter.device, parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return run.output

    def forward(self, image: Any, target: Any = None, *, out: str | Path | None = None) -> torch.Tensor | Path:
        """Without gradients: the loss if the engine has one, else the prediction `(1, C, H, W)`.

        With `out="prediction.tif"` the prediction is written tile by tile as a float32 pyramidal TIFF and the path is
        returned; otherwise the whole prediction is held in memory.

        Raises: as `plan`; WriteError if `out` cannot be written.
        """
        if self.loss is not None:
            if out is not None:
                raise ConfigError("out= needs an engine without a loss: compile(model)")
            with self._sources(image, target) as sources, self._measured("forward", sources) as prepared:
                run = Run(prepared, sources, self._stored, self.events, backward=False)
                run.run()
            return run.output
        with self._sources(image, None) as sources:
            graph = self._prepare(sources, backward=False).graph
            if not _delivers_image(graph):
                if out is not None:
                    raise ConfigError("out= needs a model whose output is an image")
                with self._measured("forward", sources) as prepared:
                    run = Run(prepared, sources, self._stored, self.events, backward=False)
                    run.run()
                return run.output
        if out is not None:
            return self._write(image, Path(out), graph)
        node = graph[graph.output]
        result = torch.empty(node.shape, dtype=node.dtype, device=self._device)
        for box, crop in self.stream(image):
            result[..., box.y0 : box.y1, box.x0 : box.x1] = crop
        return result

    def stream(self, image: Any) -> Iterator[tuple[Box, torch.Tensor]]:
        """The prediction as `(box, crop)`: disjoint boxes that cover it, in rows of equal height, left to right.

        Raises: as `plan`; ConfigError if the engine has a loss or the model's output is not an image.
        """
        if self.loss is not None:
            raise ConfigError("stream needs an engine without a loss: compile(model)")
        with self._sources(image, None) as sources, self._measured("forward", sources) as prepared:
            if not _delivers_image(prepared.graph):
                raise ConfigError("stream needs a model whose output is an image")
            yield from Run(prepared, sources, self._stored, self.events, backward=False).stream()

    def state_dict(self) -> dict[str, Any]:
        """Tile shapes and memory layouts by size, which depend on the machine and on the memory at hand.

        An engine that loads them before its first run repeats this one's arithmetic bit for bit.
        """
        choices = self._adopted | self._choices
        return {"choices": {name: choice.to_dict() for name, choice in choices.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the choices of another engine's `state_dict`."""
        self._adopted.update({name: Choice.from_dict(choice) for name, choice in state["choices"].items()})

    def _write(self, image: Any, path: Path, graph: Graph) -> Path:
        from gigagrad.images.write import write_pyramid

        _, channels, height, width = graph[graph.output].shape
        opened = image_source(image)
        try:
            mpp = opened.image.mpp if opened.image is not None and opened.spec.shape[-2:] == (height, width) else None
            write_pyramid(
                path,
                assemble(_pixels(self.stream(opened.image)), height, width),
                shape=(height, width, channels),
                dtype=np.dtype(np.float32),
                mpp=mpp,
                nearest=False,
            )
        finally:
            opened.close()
        return path

    def _stored(self, kind: str, name: str) -> torch.Tensor:
        """A parameter or buffer as it is now."""
        return self._composite.get_parameter(name) if kind == "parameter" else self._composite.get_buffer(name)

    @contextmanager
    def _sources(self, image: Any, target: Any) -> Iterator[dict[str, Source]]:
        sources = {"image": image_source(image)}
        try:
            if self.loss is not None:
                if target is None:
                    raise TargetError("this engine has a loss, which needs a target: an image or a label tensor")
                sources["target"] = target_source(target, sources["image"])
            yield sources
        finally:
            for source in sources.values():
                source.close()

    @contextmanager
    def _measured(self, phase: str, sources: dict[str, Source]) -> Iterator[Prepared]:
        prepared = self._prepare(sources, backward=phase == "backward")
        start = time.perf_counter()
        yield prepared
        height, width = sources["image"].spec.shape[-2:]
        self.last_run = StepMeasured(
            phase=phase,
            pixels=height * width,
            seconds=time.perf_counter() - start,
            peak_bytes=peak_bytes(self._device),
            predicted_peak_bytes=prepared.plan.predicted_peak_bytes,
            budget_bytes=self._budget_bytes or 0,
        )
        self.events.emit(self.last_run)

    def _prepare(self, sources: dict[str, Source], *, backward: bool) -> Prepared:
        """Capture and plan, or find what an earlier image of the same size and an unchanged model left."""
        key = (backward, _fingerprint(self._composite), *((name, s.spec) for name, s in sources.items()))
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._make(sources, backward=backward)
        return found

    def _make(self, sources: dict[str, Source], *, backward: bool) -> Prepared:
        image, target = sources["image"], sources.get("target")
        graph = capture(self.model, self.loss, image.spec, target.spec if target else None)
        limits = Limits(
            budget_bytes=self._budget_bytes,
            base_bytes=held_bytes(self._device),
            peak_bytes=peak_bytes(self._device),
            reader_cache_bytes=sum(source.cache_bytes for source in sources.values()),
            runtime_bytes=_RUNTIME_BYTES,
        )
        name = f"{'backward' if backward else 'forward'} {'x'.join(map(str, image.spec.shape))}"
        adopted = self._adopted.pop(name, None)  # a changed model is planned anew
        threads = torch.get_num_threads() if self._device.type == "cpu" else 1
        workers = adopted.workers if adopted else threads
        plan = make_plan(
            graph,
            limits,
            Machine.detect(workers),
            image_shape=image.spec.shape,
            backward=backward,
            device=str(self._device),
            memory_format=adopted.memory_format if adopted else _usual_layout(graph),
            tiles=adopted.tiles if adopted else (self._tile,) if self._tile else None,
        )
        prepared = Prepared(graph, plan, split_stages(graph), self._device)
        if adopted is None and plan.tile_count >= _WORTH_A_TRIAL and plan.memory_format == "channels_last":
            layout, seconds = faster_layout(prepared)
            return_freed_memory()  # what the slower layout left behind would lie under the run's own peak
            plan = dataclasses.replace(plan, memory_format=layout, predicted_seconds=seconds)
            prepared = dataclasses.replace(prepared, plan=plan)
        self._choices[name] = Choice(plan.memory_format, plan.workers, tuple(stage.tile for stage in plan.stages))
        return prepared


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


def _usual_layout(graph: Graph) -> str:
    """Double precision runs on kernels that know only the contiguous layout."""
    convolutions = [node for node in graph.nodes if "conv" in node.op]
    return "contiguous" if any(n.dtype == torch.float64 for n in convolutions) else "channels_last"


def _fingerprint(module: nn.Module) -> int:
    """Changes whenever capture could: module types, modes and settings; shapes, dtypes, ties and `requires_grad`."""
    modules = tuple((name, type(m), _settings(m)) for name, m in module.named_modules())
    number: dict[int, int] = {}  # tied tensors have one number
    parameters = tuple(
        (name, number.setdefault(id(p), len(number)), tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    )
    buffers = tuple(
        (name, number.setdefault(id(b), len(number)), tuple(b.shape), b.dtype)
        for name, b in module.named_buffers(remove_duplicate=False)
    )
    return hash((modules, parameters, buffers))


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What a forward may read of its module besides tensors: plain values (`training` among them) and functions."""
    settings: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if value is None or isinstance(value, _PLAIN):
            settings.append((name, value))
        elif isinstance(value, tuple | list) and all(isinstance(item, _PLAIN) for item in value):
            settings.append((name, tuple(value)))
        elif callable(value):
            settings.append((name, id(value)))
    return tuple(settings)


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
