"""Maps of where a slide's score comes from: the exact gradient of the score for every pixel, or the output of a
module inside the network that is a map, such as attention.

Saliency (Simonyan et al., 2014) is the absolute gradient of a class's score, before softmax or sigmoid, for the pixels.
It is added up over channels and small blocks: what is finer follows the strides of the first layers and not the tissue,
and at full resolution a map takes more disk than its slide (docs/decisions/0032-attribution.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.boxes import Box
from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, GigagradError, ModelError, WriteError, did_you_mean
from gigagrad.events import Events, Listener
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.sinks import OutputField, Pieces, Sink, assemble
from gigagrad.files import content_digest
from gigagrad.images import Image, open_image, thumbnail
from gigagrad.models import load_model
from gigagrad.models.bag_names import is_bag_name
from gigagrad.models.networks import check_intensities
from gigagrad.prediction.classes import image_shape
from gigagrad.prediction.outlines import write_overlay
from gigagrad.prediction.outputs import made_with, open_slide
from gigagrad.prediction.slide_scores import Reading, output_of, weighted_sum
from gigagrad.shares import Share

_MADE: Final = "gigagrad attribution: "
_GIVEN: Final = "classes", "grey", "bands", "threshold"
"""Settings by which a map is another one than the run's own."""
_OF_SLIDES: Final = "content", "mpp"
"""Facts of a slide that may change, after which its map is made anew."""
_USUAL: Final = {field.name: field.default for field in dataclasses.fields(PredictConfig)}


def attribute(
    run: str | Path,
    slides: Sequence[str | Path],
    out: str | Path,
    *,
    of: str | None = None,
    module: str | None = None,
    block: int = 8,
    listeners: Iterable[Listener] = (),
    **settings: Any,
) -> tuple[Path, ...]:
    """Write `out/NAME.tif`, a map of every slide as a pyramid of float32, and `out/NAME.png`, it over the slide.

    The map is the absolute gradient of the score of the class (or column) `of`, by default of the class that is
    predicted, summed over channels and blocks of `block x block` pixels; or the output of the `module` of this name
    inside the model, the mean of its channels. `settings` are those of `PredictConfig`, as far as maps have any.
    Maps that were made before with the same settings are left alone, unless `overwrite`.

    Returns the pictures, those that were there included. A slide that fails is told (`Notice`) and left out; the others
    go on. Emits the job `attribute`, counted in slides, and the engine's events.

    Raises `ConfigError`, `ModelError` and `WriteError` for what concerns all slides, and `ImageError` at the end where
    some failed.
    """
    config = PredictConfig.from_dict({"run": run, "slides": slides, "out": out, **settings})
    share, job = Share.parse(config.share), _Job(config, Events(tuple(listeners)), of, module, block)
    rows = rows_of(share, find_slides(config.slides, config.split, config.run_fold))
    done, failures = set(filter(job.is_made, rows)), (GigagradError, OSError)
    return tuple(run_job("attribute", rows, share, Path(out), job.events, job.make, done, failures=failures))


class _Job:
    """The models, engines and settings that all slides share."""

    def __init__(self, config: PredictConfig, events: Events, of: str | None, module: str | None, block: int) -> None:
        if of is not None and module is not None:
            raise ConfigError("a map is of the score of a class or of the output of a module; give one of them")
        if block < 1:
            raise ConfigError(f"block is a number of pixels, at least 1, got {block}")
        self.events, self._config, self._out, self._overwrite = events, config, Path(config.out), config.overwrite
        self._of, self._module, self._block = of, module, 1 if module is not None else block
        spec, self._model = load_model(config.model_path, config.trust)
        if config.resolved_patches is not None or is_bag_name(spec):
            raise ConfigError(
                "maps are of models that read whole slides, and this one takes patches; 'gigagrad predict --outputs "
                "attention' shows which of them count"
            )
        self._digest = made_with(config, spec).model_sha256
        self._model.requires_grad_(False)  # of the pixels alone
        self._table, self._look = config.resolved_table, config.resolved_input_view
        tapped = self._model if module is None else Tapped(self._model, module).eval()
        settings: dict[str, Any] = {"memory": config.memory, "scratch": config.scratch, "device": config.device}
        self._engine = compile_engine(tapped, **settings)
        self._score = compile_engine(self._model, weighted_sum, **settings)
        for engine in (self._engine, self._score):
            engine.events.subscribe(events.emit)

    def _paths(self, row: Row) -> tuple[Path, Path]:
        """Return the map of a slide, and its picture."""
        return self._out / f"{row.name}.tif", self._out / f"{row.name}.png"

    def is_made(self, row: Row) -> bool:
        """Return whether there is a map and a picture, of whatever settings."""
        return all(path.exists() for path in self._paths(row)) and not self._overwrite

    def make(self, row: Row) -> tuple[Path, str]:
        """Write both files of a slide, unless they are there. Returns the picture, and in a few words what was done."""
        path, picture = self._paths(row)
        with open_slide(self._config, row) as slide:
            settings: dict[str, Any] = {
                "of": self._of or "what is predicted",
                "module": self._module,
                "block": self._block,
                "model": self._digest,
                "slide": [row.slide.name, *slide.shape],
                "content": [content_digest(file) for file in row.slides],
                "mpp": slide.mpp,
            }
            if given := {name: value for name in _GIVEN if (value := getattr(self._config, name)) != _USUAL[name]}:
                settings["given"] = given
            if path.exists() and not self._overwrite and _holds(path, settings) and picture.exists():
                return picture, "done before"
            picture.unlink(missing_ok=True)  # of another map; whoever ends in between leaves none beside the new one
            title = self._write(path, slide, _MADE + json.dumps(settings))
            with open_image(path) as heat:
                write_overlay(picture, draw_heat(slide, heat, title))
        return picture, title

    def _write(self, path: Path, slide: Image, description: str) -> str:
        """Write the map. Returns what it shows."""
        seen = self._look.of(slide)
        check_intensities(self._model, seen)
        options = {"overwrite": True, "description": description}
        if self._module is not None:
            shape = image_shape(self._engine, seen)
            if shape is None:
                raise ModelError(f"the output of {self._module} is no map (N, C, H, W); name another module")
            mpp = None if slide.mpp is None else slide.mpp * slide.width / shape[-1]
            self._engine.forward(seen, out=Blocks(path, 1, lambda crop: crop[0].mean(0), mpp=mpp, **options))
            return f"output of {self._module}"
        if image_shape(self._engine, seen) is not None:
            raise ModelError("the model gives an image; maps are of scores of whole slides, or of a --module's output")
        output_NC = output_of(self._engine, seen)
        reading = Reading.of(output_NC.shape[1], self._config.run_loss, self._table)
        scores = reading.scores(output_NC)
        name, weights_C = score_of(reading, scores, self._of, self._config.threshold)
        mpp = None if slide.mpp is None else slide.mpp * self._block
        sink = Blocks(path, self._block, lambda crop: crop[0].abs().sum(0), mpp=mpp, **options)
        self._score.image_gradient(seen, torch.tensor(weights_C, dtype=output_NC.dtype), out=sink)
        said = ", ".join(f"{column.removeprefix('probability_')} {value:.4g}" for column, value in scores.items())
        return f"absolute gradient of the score of {name} ({said})"


def score_of(
    reading: Reading, scores: dict[str, float], of: str | None, threshold: float
) -> tuple[str, tuple[float, ...]]:
    """Return the class or column whose score is meant, and the weights of the model's outputs that make it up.

    None is the predicted class, or the only number. Raises `ConfigError` for what there is not.
    """
    known = reading.names or reading.columns
    if of is None and not reading.names and len(known) > 1:
        raise ConfigError(f"the model gives {len(known)} numbers of a slide; say --of {' or '.join(known)}")
    name = of if of is not None else reading.predicted(scores, threshold) if reading.names else known[0]
    if name not in known:
        raise ConfigError(f"there is no score of {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    number = known.index(name)
    if reading.names and len(reading.columns) == 1:  # one logit, of the second class
        return name, (1.0 if number else -1.0,)
    return name, tuple(float(place == number) for place in range(len(known)))


class Tapped(nn.Module):
    """A model that returns the last output of a module inside it. Raises `ConfigError` where there is none."""

    def __init__(self, model: nn.Module, module: str) -> None:
        super().__init__()
        known = [name for name, _ in model.named_modules() if name]
        if module not in known:
            leaves = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise ConfigError(f"the model has no module {module!r}{did_you_mean(module, known)}; it has {leaves}")
        self.model, self.module = model, module

    def forward(self, *images: Tensor) -> Tensor:
        outputs: list[Any] = []

        def keep(_: nn.Module, __: Any, out: Any) -> None:
            # What comes behind may write into it, as ReLU(inplace=True) and sums of residuals do.
            outputs.append(out.clone() if isinstance(out, Tensor) else out)

        hook = self.model.get_submodule(self.module).register_forward_hook(keep)
        try:
            self.model(*images)
        finally:
            hook.remove()
        found: Tensor = outputs[-1]
        return found


def _holds(path: Path, settings: dict[str, Any]) -> bool:
    """Return whether a file is the map of these settings, False of a slide that has been replaced since, or whose
    resolution is given otherwise.

    Raises `WriteError` for a map of others, or of somebody else.
    """
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            known = json.loads(str(file.pages.first.description).removeprefix(_MADE))
        before = [known.pop(name, settings[name]) for name in _OF_SLIDES]  # earlier versions said less
    except Exception:  # anybody's file
        known, before = None, []
    now = json.loads(json.dumps(settings))
    is_replaced = before != [now.pop(name) for name in _OF_SLIDES]
    if is_replaced and known is not None:
        known["slide"][1:] = now["slide"][1:]
    if known != now:
        raise WriteError(f"{path} is another map, or none; choose another --out or pass --overwrite")
    return not is_replaced


_LOW, _HIGH = 50, 99.5
"""The percentiles of a map's pixels between which colours differ: most of a slide matters little, and few pixels are
far above the rest."""
_CELLS = 200
"""Along the longer side of a picture, the map's means that are shown: single blocks are noise to the eye."""
_COLOURS = (
    *((0, 0, 4), (33, 12, 74), (87, 16, 110), (138, 34, 106), (188, 55, 84)),
    *((228, 90, 49), (249, 142, 9), (249, 203, 53), (252, 255, 164)),
)
"""Inferno (Smith and van der Walt, 2015) at nine places; lightness grows steadily, also for the colour-blind."""
FADED = 0.55
"""The share of white in the slide, so that colours mean the map and nothing else."""
_INK = (20, 20, 24)
Picture = NDArray[np.uint8]


class Blocks(Sink):
    """A pyramidal TIFF of float32 whose pixels are sums over blocks of `side x side` pixels, what is left of them at
    the far borders. `values` makes `(h, w)` of a crop `(1, C, h, w)`; `options` are `write_pyramid`'s.

    Raises WriteError.
    """

    def __init__(self, path: Path, side: int, values: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
        self._path, self._side, self._values, self._options = path, side, values, options
        self.kind = f"sums over blocks of {side} px"

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        from gigagrad.images.write import pyramid_bytes

        (height, width), dtype = shape[-2:], np.dtype(np.float32)
        # What `values` makes of a strip, and one that is assembled while the one before it is summed up.
        strips = (shape[1] + 3) * min(tile_height, height) * width * dtype.itemsize
        return strips + pyramid_bytes(self._path, (*_blocks((height, width), self._side), 1), dtype)

    def take(self, pieces: Pieces, field: OutputField) -> Path:
        from gigagrad.images.write import write_pyramid

        height, width = field.shape[-2:]
        values = ((box, self._values(crop).to("cpu", torch.float32).numpy()) for box, crop in pieces)
        rows = block_rows(assemble(values, height, width), height, self._side)
        shape = (*_blocks((height, width), self._side), 1)
        return write_pyramid(self._path, rows, shape=shape, dtype=np.float32, nearest=False, **self._options)


def _blocks(size: tuple[int, ...], side: int) -> tuple[int, int]:
    return -(-size[0] // side), -(-size[1] // side)


def block_rows(strips: Iterable[NDArray[Any]], height: int, side: int) -> Iterator[NDArray[np.float32]]:
    """Yield sums over blocks as rows `(n, columns)`, of strips `(h, W)` that are `height` px high together."""
    begun: NDArray[np.float64] | None = None
    y = 0
    for strip in strips:
        across = np.add.reduceat(strip, np.arange(0, strip.shape[1], side), axis=1, dtype=np.float64)
        starts = [0, *range(side - y % side, len(strip), side)]
        sums = np.add.reduceat(across, starts, axis=0)
        if begun is not None:
            sums[0] += begun
        y += len(strip)
        whole = y % side == 0 or y == height
        begun = None if whole else sums[-1]
        if whole or len(sums) > 1:
            yield (sums if whole else sums[:-1]).astype(np.float32)


def draw_heat(slide: Image, heat: Image, title: str) -> Picture:
    """Draw, as `(h, w, 3)` uint8, the slide in pale grey at most 2000 px long, the upper half of the map's values
    over it in colours that grow stronger with them, and a legend with `title` below. Both are read piece by piece; the
    map is averaged to 200 cells along its longer side.
    """
    grey = thumbnail(slide, 2000).mean(2, keepdims=True)
    values = _averaged(heat)
    low, high = np.percentile(values, (_LOW, _HIGH))
    share = np.clip((values - low) / ((high - low) or (values.max() - low) or 1), 0, 1)
    height, width = grey.shape[:2]
    share = np.clip(_resized(share, (width, height), smooth=True), 0, 1)
    picture = blended(grey + (255 - grey) * FADED, share)
    return np.concatenate([picture, legend(title, width, "median", f"{_HIGH:g}th percentile")])


def blended(grey: NDArray[np.float64], share: NDArray[Any], most: float = 1) -> Picture:
    """Blend colours of shares `(h, w)` over a picture `(h, w, 1)`; the smaller the share, the less of them, of the
    largest as much as `most` says.
    """
    strength = most * np.sqrt(share)[..., None]  # so that half the value is well seen
    stops = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack([np.interp(share, stops, channel) for channel in zip(*_COLOURS, strict=True)], -1)
    blended: Picture = np.rint(grey * (1 - strength) + colours * strength).astype(np.uint8)
    return blended


def _averaged(heat: Image) -> NDArray[np.float32]:
    """Read a map at most `_CELLS` px high and wide, `(h, w)`, from its smallest level that is as large."""
    enough = [index for index, level in enumerate(heat.levels) if max(level.shape) >= _CELLS]
    with heat.at_level(enough[-1] if enough else 0) as level:
        values = np.asarray(level.read(Box.whole(level.height, level.width)))[0].astype(np.float32)
    scale = min(1.0, _CELLS / max(values.shape))
    height, width = (max(1, round(side * scale)) for side in values.shape)
    return _resized(values, (width, height), smooth=False)


def _resized(values: NDArray[np.float32], size: tuple[int, int], *, smooth: bool) -> NDArray[np.float32]:
    """Resize values by linear interpolation, or by averaging areas."""
    from PIL import Image as Pillow

    how = Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.BOX
    return np.asarray(Pillow.fromarray(values.astype(np.float32)).resize(size, how))


def legend(title: str, width: int, first: str, last: str, most: float = 1) -> Picture:
    """Draw a white band with the colours between what they are called, and the title in as many lines as it takes."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    size = 10 + math.ceil(min(width, 2000) / 200)
    font, line = ImageFont.load_default(size), round(size * 2.2)
    letters = max(8, int((width - 2 * size) / (font.getlength(title) / max(1, len(title)))))
    texts = [first, last, *textwrap.wrap(title, letters)]
    begin = size + math.ceil(font.getlength(texts[0])) + size // 2
    bar = max(size, min(size * 12, width - begin - 2 * size - math.ceil(font.getlength(texts[1]))))
    band = Pillow.new("RGB", (width, line * (len(texts) - 1)), "white")
    shown = blended(np.full((size, bar, 1), 255.0), np.linspace(0, 1, bar)[None], most)
    band.paste(Pillow.fromarray(shown), (begin, (line - size) // 2))
    pen = ImageDraw.Draw(band)
    places = [(size, line / 2), (begin + bar + size // 2, line / 2)]
    places += [(size, line * (number + 0.4)) for number in range(1, len(texts) - 1)]
    for place, text in zip(places, texts, strict=True):
        pen.text(place, text, fill=_INK, font=font, anchor="lm")
    return np.asarray(band)
