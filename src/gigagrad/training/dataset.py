"""The slides of a run with their targets, opened one at a time, and the steps that an epoch makes of them.

Slides are turned, mirrored and in other colours, drawn anew for each slide in each epoch, as views that copy no slide.
A transform of the square's symmetry group D4 is applied to the box of a read and to the few pixels that come back, so
the slide and its mask turn exactly alike. Each patch of a bag is turned by itself. Colours differ from scanner to
scanner and stain to stain: every pixel is changed by itself, by numbers that are the slide's, so that it looks the same
whatever the tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.boxes import Box, tiles
from gigagrad.cohorts import Cohort, Row, cases_of
from gigagrad.cohorts.patches import Bags
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Events
from gigagrad.images import Image, InputView
from gigagrad.images.bag import Bag
from gigagrad.images.georeference import Georeference
from gigagrad.images.image import View
from gigagrad.images.pixels import Array, Pixels
from gigagrad.images.slide_bag import CaseBag
from gigagrad.images.tissue import write_label
from gigagrad.masks import IGNORED, ClassTable, ignoring_missing, open_mask
from gigagrad.models.networks import check_intensities
from gigagrad.training.folder import Progress
from gigagrad.training.frozen import FeatureBags
from gigagrad.training.learner import Learner
from gigagrad.training.state import seed_all
from gigagrad.training.targets import CheckedMask, TargetRule, sample_mask

D4_TRANSFORMS = 8

# Tags that keep the streams of random numbers apart. NumPy pads seeds with zeros, so none is 0.
_ORDER, _TRANSFORM, _COLOURS, _DRAWS, _PATCHES = 1, 2, 3, 4, 5

_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
"""Optical densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston, 2001)."""
_ROWS = 64
"""Converted at a time, so that few floats are held beside the pixels."""


class D4View(View):
    """`image` mirrored left to right if `transform >= 4`, then turned `transform % 4` quarters counter-clockwise
    (`np.rot90`).

    Transform 0 is the image as it is. Odd ones exchange height and width.
    """

    def __init__(self, image: Image, transform: int) -> None:
        if not 0 <= transform < D4_TRANSFORMS:
            raise ValueError(f"a transform is a number from 0 to {D4_TRANSFORMS - 1}, got {transform}")
        self._transform, self._quarters, self._mirrored = transform, transform % 4, transform >= 4
        if transform % 2:
            channels, height, width = image.shape
            levels = tuple(dataclasses.replace(level, shape=level.shape[::-1]) for level in image.levels)
            super().__init__(image, (channels, width, height), levels, georeference=self._place(image), bounds=None)
        else:
            super().__init__(image, georeference=self._place(image), bounds=None)

    def _place(self, image: Image) -> Georeference | None:
        place, (height, width) = image.georeference, image.shape[1:]
        if place is not None and self._mirrored:
            place = place.of_pixels((-1, 0, width, 0, 1, 0))
        for _ in range(self._quarters):
            # As in `source_box`, from the image towards this one.
            place = place and place.of_pixels((0, -1, width, 1, 0, 0))
            height, width = width, height
        return place

    def _read_inside(self, box: Box) -> Pixels:
        pixels = self._image.read(self.source_box(box))
        if not isinstance(pixels, np.ndarray):
            flipped = pixels.flip(-1) if self._mirrored else pixels
            return flipped.rot90(self._quarters, (-2, -1))
        if self._mirrored:
            pixels = pixels[..., ::-1]
        turned = np.rot90(pixels, self._quarters, axes=(-2, -1))
        # Torch takes no negative strides; order "K" keeps channels last where the reader gave them so.
        return turned.copy(order="K")

    def source_box(self, box: Box) -> Box:
        """Return the box of the underlying image that lands on `box` of this one."""
        return box.turned_back(self._transform, self.height, self.width)


def order_of(seed: int, epoch: int, count: int) -> list[int]:
    """Draw the order of `count` slides in an epoch: a permutation that depends on nothing but these numbers."""
    return [int(index) for index in np.random.default_rng((seed, epoch, _ORDER)).permutation(count)]


def transform_of(seed: int, epoch: int, index: int) -> int:
    """Draw which of the eight transforms slide `index` gets in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _TRANSFORM, index)).integers(D4_TRANSFORMS))


def transforms_of(seed: int, epoch: int, index: int, count: int) -> NDArray[np.int64]:
    """Draw the transform of each of the `count` patches of slide `index` in an epoch; depends on nothing but these."""
    return np.random.default_rng((seed, epoch, _PATCHES, index)).integers(D4_TRANSFORMS, size=count)


def draws_of(seed: int, epoch: int, index: int) -> int:
    """Draw the seed of random operators for slide `index` in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _DRAWS, index)).integers(2**63))


@dataclass(frozen=True, slots=True)
class Jitter:
    """The range in which colours vary. Both are 0 to 1.

    `stain`: each stain's density becomes `a * density + b`, `a` within 1 +- `stain` and `b` within +- `stain`
    (Tellez et al., 2018). `colour`: intensities, in 0..1, become `gain * (x - 1/2) + 1/2 + shift` in each channel,
    `gain` within 1 +- `colour` and `shift` within +- `colour` / 2.
    """

    stain: float = 0.0
    colour: float = 0.0

    def of(self, slide: Image, seed: int, epoch: int, index: int) -> Image:
        """Show `slide` in the colours of slide `index` in an epoch. Closing the result leaves `slide` open.

        Raises `ConfigError` for a slide whose colours are not known.
        """
        if not self.stain and not self.colour:
            return slide
        return Coloured(slide, self.colours(slide, slide.channels, (seed, epoch, _COLOURS, index)))

    def of_bag(self, bag: Bag, seed: int, epoch: int, index: int) -> list[Colours]:
        """Draw the colours of each slide of bag `index` in an epoch; none where none vary. Raises as `of`."""
        if not self.stain and not self.colour:
            return []
        slides = range(1, len(bag.bags) if isinstance(bag, CaseBag) else 1)
        first = seed, epoch, _COLOURS, index
        return [self.colours(bag, bag.shape[1], numbers) for numbers in (first, *((*first, each) for each in slides))]

    def colours(self, slide: Image | Bag, channels: int, numbers: tuple[int, ...]) -> Colours:
        """Draw the colours of a slide. Raises `ConfigError`."""
        if str(slide.dtype) != "uint8":
            raise ConfigError(f"colours can be varied of slides of uint8, and {slide.name} has {slide.dtype}")
        if self.stain and channels != 3:
            raise ConfigError(f"stain_jitter needs red, green and blue, and {slide.name} has {channels} channels")

        draw = np.random.default_rng(numbers)
        mixing, offset = np.eye(3), np.zeros(3)
        if self.stain:
            apart = np.linalg.inv(_STAINS)
            mixing = apart @ np.diag(draw.uniform(1 - self.stain, 1 + self.stain, 3)) @ _STAINS
            offset = draw.uniform(-self.stain, self.stain, 3) @ _STAINS
        gain = draw.uniform(1 - self.colour, 1 + self.colour, (channels, 1))
        shift = draw.uniform(-self.colour / 2, self.colour / 2, (channels, 1))
        levels = (np.arange(256) / 255 - 0.5) * gain + 0.5 + shift
        table = (255 * levels).round().clip(0, 255).astype(np.uint8)
        return Colours(table, mixing if self.stain else None, offset)


class Colours:
    """Other colours of bytes.

    Optical densities `d` become `d @ mixing + offset` where `mixing` is given; then every channel's bytes those in its
    row of `table_C256`.
    """

    def __init__(
        self, table_C256: NDArray[np.uint8], mixing: NDArray[np.float64] | None, offset: NDArray[np.float64]
    ) -> None:
        self._table, self._mixing, self._offset = table_C256, mixing, offset.astype(np.float32)
        self._density = (-np.log(np.maximum(np.arange(256), 1) / 255)).astype(np.float32)

    def apply(self, pixels: Array) -> Array:
        """Change pixels `(C, h, w)` in place, and return them."""
        if self._mixing is not None:
            for row in range(0, pixels.shape[1], _ROWS):
                rows = slice(row, row + _ROWS)
                pixels[:, rows] = self._restained(pixels[:, rows], self._mixing)
        for channel, levels in enumerate(self._table):
            pixels[channel] = levels[pixels[channel]]
        return pixels

    def _restained(self, pixels: Array, mixing: NDArray[np.float64]) -> Array:
        density = self._density[pixels]
        # Sums in a fixed order, pixel by pixel: a product of matrices would round by the shape of the tile.
        mixed = [
            sum((density[k] * np.float32(mixing[k, channel]) for k in range(3)), self._offset[channel])
            for channel in range(3)
        ]
        light: Array = (255 * np.exp(-np.stack(mixed))).round().clip(0, 255).astype(np.uint8)
        return light


class Coloured(View):
    """A slide of uint8 in other colours, which outside the slide are as before. Use `Jitter.of`."""

    def __init__(self, image: Image, colours: Colours) -> None:
        super().__init__(image)
        self._colours = colours

    def _read_inside(self, box: Box) -> Array:
        return self._colours.apply(np.asarray(self._image.read(box)))


class VariedBag(Bag):
    """A bag with each patch mirrored and turned as `D4View` does, by the transform of this patch, and in the colours of
    its slide, where there are any. Closing it leaves `bag` open.
    """

    def __init__(self, bag: Bag, transforms_N: NDArray[np.int64], colours: Sequence[Colours] = ()) -> None:
        super().__init__(
            shape=bag.shape,
            dtype=bag.dtype,
            name=bag.name,
            mpp=bag.mpp,
            cache_bytes=bag.cache_bytes,
            thread_bytes=bag.thread_bytes,
            decode_seconds=bag.decode_seconds,
        )
        self._bag, self._transforms, self._colours = bag, transforms_N, colours
        self._slides = bag.slide_of_patch if isinstance(bag, CaseBag) else np.zeros(len(bag), np.int64)

    def _read_inside(self, start: int, stop: int) -> Array:
        patches = np.asarray(self._bag.read(start, stop))
        varied = np.empty_like(patches)  # channels last, where the reader gave them so
        for place, (patch, transform) in enumerate(zip(patches, self._transforms[start:stop].tolist(), strict=True)):
            mirrored = patch[..., ::-1] if transform >= 4 else patch
            varied[place] = np.rot90(mirrored, transform % 4, axes=(-2, -1))
            if self._colours:
                self._colours[self._slides[start + place]].apply(varied[place])
        return varied


_BLOCK_PX = 2048
"""Side of the blocks in which masks are counted."""


def made_label(labels: Path, row: Row) -> Path:
    """Return where the tissue recipe's label of a row is."""
    return labels / f"{row.name}.tif"


class Dataset:
    """Slides as the network sees them, with their targets, at one pyramid level, or as `bags` of patches.

    Slides without a mask get one from the tissue recipe, written once to `labels` and read from there ever after. A
    network whose encoder is frozen may see `features` in the place of patches.
    """

    def __init__(
        self,
        rule: TargetRule,
        *,
        level: int,
        look: InputView,
        labels: Path,
        table: ClassTable | None,
        bags: Bags | None = None,
        features: FeatureBags | None = None,
        events: Events | None = None,
    ) -> None:
        """`events` are told which slide is opened."""
        self._events = events or Events()
        self._rule, self._level, self._look, self._labels, self._table = rule, level, look, labels, table
        self._bags, self._features = bags, features
        self._label_ids = dict(table.ids) if table is not None else {}
        self._passed: set[Row] = set()

    @property
    def ignores(self) -> bool:
        """Return whether pixels that hold `IGNORED` are left out."""
        return self._rule.ignores or self._rule.loss.class_ids

    def prepare(self, row: Row, model: nn.Module) -> set[int]:
        """Make the row's label if the recipe has to, and look at samples of its target and of what `model` will see.
        Returns the whole numbers among those of a mask.

        Raises `TargetError` and `ImageError`.
        """
        if self._bags is not None:
            with self._bags.open(row) as bag:
                check_intensities(model, bag)
            self.label(row)
            return set()
        with row.open(self._level) as slide:
            check_intensities(model, self._look.of(slide))
            if row.label is not None:
                self.label(row)
                return set()
            if not row.masks and not made_label(self._labels, row).exists():
                self._labels.mkdir(parents=True, exist_ok=True)
                write_label(slide, made_label(self._labels, row))
            with self._open_mask(row, slide) as mask:
                return sample_mask(mask, self._rule) - ({IGNORED} if mask.nodata == IGNORED else set())

    def check_seen(self, seen: set[int]) -> None:
        """Raise `TargetError` where every sample of every mask, as all of them were prepared, is 0 or ignored."""
        if self._table is None and self.ignores and IGNORED in seen and seen <= {0, IGNORED}:
            raise TargetError(
                f"the masks hold 0 and {IGNORED} only, and {IGNORED} is ignored by losses of class ids, by others for "
                f"no data; say --classes {IGNORED}=1 if it is the foreground, or {IGNORED}=ignore"
            )
        if self._table is None and self._rule.loss.binary and self.ignores and 0 not in seen:
            raise TargetError(
                "the masks hold nothing but foreground, and no data elsewhere, which is ignored; if that is the "
                f"background, say --classes {max(seen, default=IGNORED)}=1"
            )

    def counts(self, row: Row) -> NDArray[np.int64]:
        """Count how often each class occurs in the row's target, `(256,)`: pixels that are not ignored, of a binary
        mask all above 0 as class 1; a label counts once.
        """
        if row.label is not None:
            return np.bincount([int(self.label(row))], minlength=256)
        with row.open(self._level) as slide, self._open_mask(row, slide) as mask:
            mask = ignoring_missing(mask, self._look.of(slide)) if self.ignores else mask
            counts = np.zeros(256, np.int64)
            for box in tiles(mask.height, mask.width, _BLOCK_PX, _BLOCK_PX):
                pixels = np.asarray(mask.read(box)).reshape(-1)
                pixels = pixels[pixels != IGNORED] if self.ignores else pixels
                # Of class ids all have been looked at: they are below the number of outputs.
                ids = (pixels > 0) if self._rule.loss.binary else pixels.astype(np.uint8)
                counts += np.bincount(ids, minlength=256)
            return counts

    @contextmanager
    def open(self, row: Row, transform: int = 0) -> Iterator[tuple[Image | Bag, Image | Tensor]]:
        """Open the slide and its target, both turned by the same `transform`; a bag is as it is.

        Target pixels are checked as they are read (`TargetError`) until the row has `passed`.
        """
        with ExitStack() as stack:
            if (bags := self._features or self._bags) is not None:
                self._events.emit(row.begun())
                yield stack.enter_context(bags.open(row)), self.label(row)
                return
            slide = stack.enter_context(row.open(self._level))
            self._events.emit(row.begun(slide, transform))
            slide = self._look.of(slide)
            if row.label is not None:
                yield _transformed(slide, transform), self.label(row)
                return
            mask = stack.enter_context(self._open_mask(row, slide))
            mask = mask if row in self._passed else CheckedMask(mask, self._rule)
            mask = ignoring_missing(mask, slide) if self.ignores else mask
            yield _transformed(slide, transform), _transformed(mask, transform)

    def passed(self, row: Row) -> None:
        """Note that every pixel of the row's target has been read without complaint, so no check is needed again."""
        self._passed.add(row)

    def label(self, row: Row) -> Tensor:
        """Return the label of a row that has one, as the loss takes it. Raises `TargetError`."""
        assert row.label is not None
        if self._rule.loss.survival:
            return self._rule.survival(row.label, row.name)
        value = self._label_ids.get(row.label)
        if value is None and row.label.endswith("+"):
            raise TargetError(f"the label of {row.name} is {row.label}, a survival time; say --loss cox")
        return self._rule.label(float(row.label) if value is None else value, row.name)

    def _open_mask(self, row: Row, slide: Image) -> Image:
        return open_mask(row.masks or (made_label(self._labels, row),), slide, self._table, labels=self._rule.labels)


def _transformed(image: Image, transform: int) -> Image:
    return D4View(image, transform) if transform else image


Case = tuple[Row, ...]
"""The least that a step sees: the slides of a patient, or a single one."""


class Steps:
    """Steps over a cohort's training slides; `pixels` are by row."""

    def __init__(
        self,
        config: FitConfig,
        cohort: Cohort,
        pixels: Mapping[Row, int],
        dataset: Dataset,
        jitter: Jitter,
        learner: Learner,
    ) -> None:
        self._config, self._pixels = config, pixels
        self._dataset, self._jitter, self._learner = dataset, jitter, learner
        self.cases: tuple[Case, ...] = cases_of(cohort.of("train"))
        self._numbers = dict(zip(self.cases, accumulate(map(len, self.cases), initial=0), strict=False))
        """The number of each case's first slide."""

    def remaining(self, progress: Progress) -> Iterator[list[Case]]:
        """Yield the cases of each step that is left of an epoch."""
        order = order_of(self._config.seed, progress.epoch, len(self.cases))
        for first in range(progress.index, len(order), self._config.accumulate):
            yield [self.cases[i] for i in order[first : first + self._config.accumulate]]

    def made(self, progress: Progress) -> int:
        """Count the steps until then; `progress` counts the cases that they saw."""
        return progress.epoch * self._of(len(self.cases)) + self._of(progress.index)

    def _of(self, cases: int) -> int:
        return -(-cases // self._config.accumulate)

    def gradients(
        self, chosen: Sequence[Case], progress: Progress, tell: Callable[[int, float], None]
    ) -> list[dict[str, float]]:
        """Give the parameters the gradients of a step; `tell` as in `Learner.add`. Returns what there is to log of each
        slide, or of all cases. Raises `ConfigError` if a loss is no longer a number.
        """
        learner, epoch = self._learner, progress.epoch
        if learner.group is None:
            pairs = [partial(self._varied, case[0], self._numbers[case], epoch) for case in chosen]
            told = learner.add(pairs, [self._pixels[case[0]] for case in chosen], tell)
        else:
            opened = [
                [partial(self._varied, row, number, epoch) for number, row in enumerate(case, self._numbers[case])]
                for case in chosen
            ]
            told = [learner.add_cases(opened, [self._dataset.label(case[0]) for case in chosen])]
        for case, values in zip(chosen, told, strict=False):
            self._check_finite(values["loss"], progress, case[0])
        return told

    def _check_finite(self, loss: float, progress: Progress, row: Row) -> None:
        if not math.isfinite(loss):
            ignored = (
                " (or its mask holds nothing but ignored pixels)" if math.isnan(loss) and self._dataset.ignores else ""
            )
            raise ConfigError(
                f"the loss became {loss} at step {self.made(progress) + 1} (slide {row.name}); "
                f"lower learning_rate (it is {self._config.learning_rate:g}){ignored}"
            )

    @contextmanager
    def _varied(self, row: Row, number: int, epoch: int) -> Iterator[tuple[Image | Bag, Image | torch.Tensor]]:
        """Open training slide `number` and its target as this epoch turns and colours them; seed what is drawn."""
        config = self._config
        numbers = config.seed, epoch, number
        transform = transform_of(*numbers) if config.augment else 0
        with self._dataset.open(row, transform) as (slide, target):
            seed_all(draws_of(*numbers))
            yield varied(slide, self._jitter, *numbers, augment=config.augment), target
        self._dataset.passed(row)


def varied(slide: Image | Bag, jitter: Jitter, seed: int, epoch: int, index: int, *, augment: bool) -> Image | Bag:
    """Show slide `index`, turned already, in the colours of an epoch; of a bag turn the patches, too, to `augment`."""
    if isinstance(slide, Image):
        return jitter.of(slide, seed, epoch, index)
    colours = jitter.of_bag(slide, seed, epoch, index)
    if not augment and not colours:
        return slide
    count = len(slide)
    transforms = transforms_of(seed, epoch, index, count) if augment else np.zeros(count, np.int64)
    return VariedBag(slide, transforms, colours)
