"""Export a trained network of whole slides: for ONNX Runtime, in 8 bits where asked, and as `torch.export` saves it.

The file takes images of any size. Where the network's output depends on, and by which steps an image may be moved, is
read off the captured graph (`models.exported` says what follows from it); a network that reads the whole image is
refused. Before anything is written, the file predicts a small image tile by tile, to be compared with the network.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.export import Dim, ExportedProgram

from gigagrad.boxes import Span, spread, tiles
from gigagrad.cohorts import Row, find_slides, is_table, read_rows
from gigagrad.cohorts.rows import split_files
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, GigagradError, ModelError, WriteError, extra
from gigagrad.events import Events, Listener
from gigagrad.files import replacing_folder, write_json
from gigagrad.graphs import Graph, InputSpec, capture
from gigagrad.images import InputView
from gigagrad.models import MultiStainNet, Normalise, load_model
from gigagrad.models.bag_names import is_bag_name
from gigagrad.models.exported import KIND, ExportedNetwork, Geometry, reason_of
from gigagrad.models.saved import CONFIG, ONNX
from gigagrad.plans.geometry import Steps, axis_geometry
from gigagrad.plans.segments import is_read

PT2: Final = "model.pt2"
_SIDE: Final = 1 << 17
"""Pixels a side of the image whose graph is read: so many that a field's size says its stride."""
_SLIDES, _PER_SIDE, _CROP = 16, 2, 512
"""Training slides at most that 8 bits are calibrated on, crops of each along y and x, and their side in pixels."""
_CLOSE: Final = 1e-4
"""The largest difference between file and network, in their largest output."""
_MEMORY: Final = 1.5
"""Memory of ONNX Runtime, in what PyTorch takes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Files of an exported network, and the bytes of the network in float32 and as it was written."""

    folder: Path
    float_bytes: int
    written_bytes: int


def export(
    run: str | Path,
    out: str | Path,
    *,
    int8: str | Path | None = None,
    trust: Collection[str] = (),
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
) -> Exported:
    """Write the network of a run, or of a model's file or folder, into the folder `out`; `predict` takes that as a run.

    Args:
        run: folder of a training run, or a saved model's file or folder.
        out: gets `model.onnx`, `config.json`, and in float32 `model.pt2`.
        int8: a cohort (CSV or folder). Weights and activations are then of 8 bits, these scaled to what its training
            slides make of them.
        trust: what the saved model may import, as in `load_model`.
        overwrite: replace a folder that is there.
        listeners: are told what is done.

    Raises `ModelError` for a network that reads the whole image at once, or that ONNX cannot express, `ConfigError`
    where ONNX is not installed, and `WriteError`.
    """
    with extra("export"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    out, events = Path(out), Events(tuple(listeners))
    if out.exists() and not overwrite:
        raise WriteError(f"cannot write {out}: it exists already; choose another --out or pass --overwrite")
    settings = PredictConfig(run=run, slides=(run,), out=out, trust=tuple(trust))
    spec, model = load_model(settings.model_path, trust)
    if settings.resolved_patches is not None or is_bag_name(spec):
        raise ModelError("models of bags are not exported; 'embed' and 'predict' run them")
    look = settings.resolved_input_view
    with events.preparing("capture the model"):
        channels = _channels(model, look)
        network = _network(spec, model, channels)
        program, beyond = _traced(model, channels, network.geometry)
    rows = () if int8 is None else _training_slides(Path(int8), settings.run_fold)
    with replacing_folder(out) as folder:
        path = folder / ONNX
        network = replace(network, path=path, int8=bool(rows))
        with events.preparing("write ONNX"):
            if not rows:
                _save(program, folder / PT2)
            _write_onnx(program, path)
            _check(network, model, beyond)
        float_bytes = path.stat().st_size
        if rows:
            with events.preparing("calibrate 8 bits"):
                _quantise(path, _crops(rows, settings, look, network.geometry))
        table = settings.resolved_table
        of_run = {
            "loss": settings.run_loss,
            "classes": list(table.entries) if table else [],
            "level": settings.resolved_level,
            "grey": look.grey,
            "bands": list(look.bands),
        }
        write_json(folder / CONFIG, {"format": KIND, "version": 1, "run": str(run), **network.described(), **of_run})
        written_bytes = path.stat().st_size
    return Exported(out, float_bytes, written_bytes)


def _channels(model: nn.Module, look: InputView) -> int:
    """Return how many channels a slide has for the network."""
    front = next(model.children(), None)
    if look.grey or look.bands:
        return 1 if look.grey else len(look.bands)
    if isinstance(model, MultiStainNet):
        return 3 * model.stains
    return front.factor.shape[1] if isinstance(front, Normalise) else 3


def _network(spec: str, model: nn.Module, channels: int) -> ExportedNetwork:
    """Describe the network: its geometry, and what it takes. Raises `ModelError` for one that reads all pixels."""
    graph = capture(model, None, InputSpec((1, channels, _SIDE, _SIDE), torch.uint8, True), None)
    output, cost = graph[graph.output], graph.whole.get(False)
    if len(graph.outputs) > 1 or output.axes != (-2, -1) or output.shape[2:] != (_SIDE, _SIDE):
        raise ModelError(f"the output of {spec} is no image of the slide's size; such models are not exported")
    for node in graph.nodes:
        if not node.is_field and any(graph[i].is_field for i in node.operands):
            where = f"{node.origin.module_path or 'the model'} ({node.operator})"
            raise ModelError(
                f"{spec} reads the whole image at once in {where}, so that no part of a slide has a prediction of its "
                "own; predict with the run, which does that exactly"
            )
    bytes_per_pixel = 0.0 if cost is None else _MEMORY * cost.peak_bytes / _SIDE**2
    geometry = _geometry(graph)
    return ExportedNetwork(Path(), spec, channels, output.shape[1], geometry, max(1.0, bytes_per_pixel), False)


def _geometry(graph: Graph) -> Geometry:
    """Read strides and margins off a graph of a large image, in its middle."""
    image = graph.source("image")
    assert image is not None  # capture refuses others
    steps, strides, margins = Steps.of(graph), [], []
    fields = [node.id for node in reversed(graph.nodes) if node.is_field and not is_read(graph, node.id)]
    for axis in (0, 1):
        stride = 1
        for node in graph.nodes:
            if node.is_field:
                stride = lcm(stride, max(1, round(_SIDE / node.size(axis))))
        start = _SIDE // 2 // stride * stride
        before = behind = 0
        for place in range(start, start + stride):
            read = axis_geometry(fields, steps[axis], {graph.output: Span(place, place + 1)}).spans.get(image.id)
            if read is not None:
                before, behind = max(before, place - read.start), max(behind, read.stop - place - 1)
        strides.append(stride)
        margins.append((before, behind))
    return Geometry((strides[0], strides[1]), (margins[0], margins[1]))


def _traced(model: nn.Module, channels: int, geometry: Geometry) -> tuple[ExportedProgram, int]:
    """Trace the network for images of any size; the second is 0 where it takes only whole strides of pixels.

    Raises `ModelError`.
    """
    error: Exception | None = None
    for beyond in (3, 0):
        height, width = (5 * max(stride, 16) + beyond for stride in geometry.stride)
        width += geometry.stride[1]  # of one size, both would be traced as the same number
        image = torch.zeros(1, channels, height, width, dtype=torch.uint8)
        try:
            with torch.no_grad(), _silent():
                program = torch.export.export(model, (image,), dynamic_shapes=({2: Dim.AUTO, 3: Dim.AUTO},))
        except Exception as refused:  # tracing runs anybody's code
            error = error or refused
            continue
        (given,) = (node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
        if all(isinstance(side, torch.SymInt) for side in given.meta["val"].shape[2:]):
            return program, beyond
        raise ModelError("the model takes images of one size only, or computes with it as a number; it is not exported")
    raise ModelError(f"torch.export refuses the model: {reason_of(error)}") from error


def _save(program: ExportedProgram, path: Path) -> None:
    with _silent():
        torch.export.save(program, path)


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write the program, which this changes, as ONNX. Raises `ModelError`."""
    _fix_output_padding(program)
    try:
        with torch.no_grad(), _silent():
            written = torch.onnx.export(program, dynamo=True, external_data=False, verbose=False)
            assert written is not None
            written.save(path)
    except OSError:
        raise
    except Exception as error:  # whatever its libraries make of an operator
        raise ModelError(f"ONNX cannot express the model: {reason_of(error)}") from error


def _fix_output_padding(program: ExportedProgram) -> None:
    """Have transposed convolutions make the most that they can, and cut that off where it is too much.

    ONNX has no room for an `output_padding` that depends on the image's size; padding only adds pixels at the end.
    """
    graph, aten = program.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.conv_transpose2d.input or len(node.args) < 6:
            continue
        given, weight, _, stride, padding, asked, *rest = node.args
        if all(isinstance(each, int) for each in asked):
            continue
        dilation = rest[1] if len(rest) > 1 else [1, 1]
        users, last = list(node.users), node
        node.update_arg(5, [each - 1 for each in stride])
        for axis in (0, 1):
            taps = dilation[axis] * (weight.meta["val"].shape[2 + axis] - 1)
            with graph.inserting_after(last):
                size = graph.call_function(aten.sym_size.int, (given, 2 + axis))
            for function, value in (
                (operator.mul, stride[axis]),
                (operator.add, taps + 1 - 2 * padding[axis] - stride[axis]),
                (operator.add, asked[axis]),
            ):
                with graph.inserting_after(size):
                    size = graph.call_function(function, (size, value))
            with graph.inserting_after(size):
                last = graph.call_function(aten.slice.Tensor, (last, 2 + axis, 0, size))
        for user in users:
            user.replace_input_with(node, last)
    program.graph_module.recompile()


def _check(network: ExportedNetwork, model: nn.Module, beyond: int) -> None:
    """Compare the file's prediction of small images, tile by tile, with the network's of the whole ones.

    Raises `ModelError` where they differ: by a resizing whose ratio is that of the whole image, for instance.
    """
    session, geometry = network.open(torch.get_num_threads()), network.geometry
    short = [3 * max(stride, 16) + beyond for stride in geometry.stride]
    for axis in (0, 1):
        sides = list(short)
        sides[axis] += -(-geometry.around(axis) // geometry.stride[axis]) * geometry.stride[axis]
        height, width = sides
        generator = torch.Generator().manual_seed(axis)
        image = torch.randint(0, 256, (1, network.channels, height, width), dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            expected = model(image).float().numpy()
        found = np.empty_like(expected)
        steps = [max(stride, side // 5 // stride * stride) for stride, side in zip(geometry.stride, sides, strict=True)]
        for box in tiles(height, width, *steps):
            crop = geometry.crop(box, height, width)
            output = session.run(image[:, :, crop.y0 : crop.y1, crop.x0 : crop.x1].numpy())
            own = box.shift(-crop.y0, -crop.x0)
            found[..., box.y0 : box.y1, box.x0 : box.x1] = output[..., own.y0 : own.y1, own.x0 : own.x1]
        error, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
        if not error <= _CLOSE * largest:
            raise ModelError(
                f"tiles of the exported network differ by {error:.2g} from {network.spec} on an image of {height} x "
                f"{width} px, whose largest output is {largest:.2g}: it depends on where in the image a pixel is; "
                "predict with the run"
            )


def _training_slides(cohort: Path, fold: int | None) -> tuple[Row, ...]:
    """Return training slides, spread over the cohort. Raises `ConfigError`."""
    is_listed = is_table(cohort) and cohort.is_file() and split_files(cohort, read_rows(cohort)[0])
    found = find_slides([cohort], "train" if is_listed else None, fold)
    # Of folds without one to validate nobody knows which slides the network has seen.
    rows = tuple(row for row in found if row.split == "train" or (row.split is None and row.fold is None))
    if not rows:
        raise ConfigError(f"{cohort} has no training slides; 8 bits are calibrated on those")
    return rows[:: -(-len(rows) // _SLIDES)]


def _crops(
    rows: tuple[Row, ...], settings: PredictConfig, look: InputView, geometry: Geometry
) -> Iterator[NDArray[np.uint8]]:
    """Yield crops `(1, C, h, w)` of slides, as the network sees them. Raises `ImageError`."""
    side = -(-_CROP // lcm(*geometry.stride)) * lcm(*geometry.stride)
    for row in rows:
        with row.open(settings.resolved_level) as slide:
            seen = look.of(slide)
            for box in spread(seen.height, seen.width, _PER_SIDE, side):
                yield np.ascontiguousarray(seen.read(box))[None]


def _quantise(path: Path, crops: Iterator[NDArray[np.uint8]]) -> None:
    """Replace an ONNX file by one of 8 bits: weights by channel, activations by the range that they have on crops.

    Raises `ModelError`.
    """
    from onnxruntime import InferenceSession, quantization

    name = InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()[0].name

    class Crops(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Mapping[str, NDArray[np.uint8]] | None:
            crop = next(crops, None)
            return None if crop is None else {name: crop}

    try:
        with TemporaryDirectory() as folder, _silent():
            prepared = str(Path(folder) / "prepared.onnx")
            quantization.quant_pre_process(str(path), prepared, skip_symbolic_shape=True)
            # Weights of 7 bits: processors without VNNI add pairs of products in 16, where 8 bits would overflow.
            quantization.quantize_static(
                prepared,
                str(path),
                Crops(),
                per_channel=True,
                reduce_range=True,
                weight_type=quantization.QuantType.QInt8,
            )
    except (GigagradError, OSError):
        raise
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot quantise the model: {reason_of(error)}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what tracers and converters say for developers off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
