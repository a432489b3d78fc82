"""Settings of a prediction, and of features: everything that each depends on, as frozen data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from gigagrad.cohorts import SPLITS
from gigagrad.cohorts.patches import TISSUE, Patches
from gigagrad.config import Settings, read_yaml
from gigagrad.errors import ConfigError
from gigagrad.images import InputView
from gigagrad.masks import ClassTable
from gigagrad.shares import Share

AUTO: Final = "auto"
"""Setting `only_tissue` to it finds tissue by our own recipe."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Settings):
    """Settings of `predict`: the slides, the model, and where to write.

    Attributes:
        run: folder of a training run (its `best.pt` is used), a saved model's file or folder, or what `export` wrote.
        slides: files, folders of slides, and CSV files with a column `slide` (optional: `mask`, `mpp`, `split`).
        out: output folder; gets a folder for each of `outputs` and `predictions.json`, or, of a model that gives
            scores of whole slides, `slides.csv` and `predictions.json`.
        outputs: what to write of each slide: mask (always), probabilities, geojson (of QuPath), overlay, instances (a
            CSV of regions), graph (regions and their neighbours, for graph networks), tiatoolbox (its annotation
            store), labelmap (nnU-Net's ids of regions); of a model of bags attention (of each patch: a pyramid,
            QuPath's GeoJSON, pictures).
        format: of masks and probabilities: tiff, ome-tiff, cog (of GDAL) or ome-zarr.
        memory: peak memory the process may use, e.g. "1 GiB"; None leaves the choice to the engine.
        scratch: an existing folder for what does not fit in `memory`; None: it is computed again.
        threshold: probability above which a one-channel model's pixel is foreground, between 0 and 1; of a model with
            one score of a slide, that above which the slide is of class 1.
        classes: names of the foreground classes, or `NAME=ID` as `masks.ClassTable.parse` takes them; empty for those
            of the training run, else "Foreground" or "Class 1", "Class 2", ...
        mpp: micrometres per pixel of all slides, over what their files say.
        level: pyramid level of slides and true masks to predict at; none given: that of the training run.
        grey: read slides in grey, as `Image.grey` does; None does as the training run did.
        bands: channels of slides to read, by name or number, as in training; empty for those of the training run.
        patch_size: pixels a side of the patches that a slide is read as; this and the next ones are by default the
            training run's.
        patch_mpp: micrometres per pixel of the patches.
        overlap: of patches beside each other, in their pixels.
        tissue: `auto` takes patches on tissue, by our own recipe; `mask` those on the mask in a CSV's column of
            this name; `all` takes every patch.
        least_tissue: share of a patch that has to be tissue.
        coords: a folder with the corners of the patches of each slide, in files of TRIDENT, CLAM or CSV, called by the
            slide; then `overlap` and `tissue` are theirs.
        only_tissue: compute whole slides on tissue only: `auto` finds it by our own recipe, or a folder holds a mask or
            annotations of it for each slide, called by the slide. The rest is background, and probabilities are 0
            there, whatever the model would say; on tissue nothing changes.
        target_mpp: instead of one level for all, predict each slide at the level nearest to this resolution; every
            slide must then have a known one.
        device: "cpu" or "cuda".
        split: of the rows of a CSV file, only those with this split; None takes all.
        trust: what the saved model may import beside the project's and the libraries' networks, as in `load_model`.
        share: of the slides, as "2/4" the second of four shares that processes predict side by side into `out`.
        overwrite: predict again what is there already, and replace files that some other program wrote.
    """

    run: str | Path
    slides: tuple[str | Path, ...]
    out: str | Path
    outputs: tuple[str, ...] = ("mask", "geojson", "overlay")
    format: str = "tiff"
    memory: str | int | None = None
    scratch: str | Path | None = None
    threshold: float = 0.5
    classes: tuple[str, ...] = ()
    mpp: float | None = None
    level: int | None = None
    grey: bool | None = None
    bands: tuple[int | str, ...] = ()
    patch_size: int | None = None
    patch_mpp: float | None = None
    overlap: int | None = None
    tissue: str | None = None
    least_tissue: float | None = None
    coords: str | Path | None = None
    only_tissue: str | Path | None = None
    target_mpp: float | None = None
    device: str = "cpu"
    split: str | None = None
    trust: tuple[str, ...] = ()
    share: str = "1/1"
    overwrite: bool = False

    PATHS: ClassVar = "run", "slides", "out", "scratch", "coords", "only_tissue"
    LIMITS: ClassVar = {
        "level": (0, math.inf),
        "patch_size": (1, math.inf),
        "overlap": (0, math.inf),
        "least_tissue": (0, 1),
    }
    CHOICES: ClassVar = {
        "outputs": (
            *("mask", "probabilities", "geojson", "overlay", "instances", "graph", "tiatoolbox", "labelmap"),
            "attention",
        ),
        "tissue": (None, *TISSUE),
        "format": ("tiff", "ome-tiff", "cog", "ome-zarr"),
        "split": (None, *SPLITS),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slides:
            raise ConfigError("no slides to predict; name files, a folder or a CSV file")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"the threshold is a probability between 0 and 1 (both excluded), got {self.threshold}")
        for name in ("mpp", "target_mpp"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number of micrometres per pixel, got {value}")
        if self.target_mpp is not None and self.level is not None:
            raise ConfigError("level and target_mpp both choose the level of a slide; give one of them")
        Share.parse(self.share)

    def relative_to(self, folder: Path) -> Self:
        found = super().relative_to(folder)
        return replace(found, only_tissue=AUTO) if str(self.only_tissue) == AUTO else found

    @property
    def resolved_level(self) -> int:
        """Return `level`, or what the run's `config.yaml` says, or 0. Raises `ConfigError` if that file is damaged."""
        return int(self._of_run("level", 0)) if self.level is None else self.level

    @property
    def resolved_input_view(self) -> InputView:
        """Return `grey` and `bands`, or what the run's `config.yaml` says. Raises `ConfigError` if it is damaged."""
        grey = bool(self._of_run("grey", False)) if self.grey is None else self.grey
        bands = self.bands or tuple(self._of_run("bands", ()))
        if not all(type(number) in (int, str) for number in bands):
            raise ConfigError(f"cannot read the bands of the run {self.run}; give them as --bands")
        return InputView(grey, bands)

    @property
    def resolved_patches(self) -> Patches | None:
        """Return which patches are read of slides: those of the settings, else of the run's `config.yaml`; None where
        slides are read whole. Raises `ConfigError` if that is damaged.
        """
        of_run = int(self._of_run("patch_size", 0))
        size = self.patch_size or of_run
        chosen = self.overlap, self.tissue, self.least_tissue
        if not size:
            if any(value is not None for value in (*chosen, self.patch_mpp, self.coords)):
                raise ConfigError(f"the model {self.run} reads whole slides; give --patch-size to read patches of them")
            return None
        usual = Patches(size)
        mpp = self.patch_mpp or self._of_run("patch_mpp", None if of_run else usual.mpp, (float, int))
        names = "overlap", "tissue", "least_tissue"
        defaults: list[Any] = [getattr(usual, name) for name in names]
        found: list[Any] = [
            self._of_run(name, default, (type(default), int)) if given is None else given
            for given, name, default in zip(chosen, names, defaults, strict=True)
        ]
        overlap, tissue, least = found
        # Who says where there is tissue wants no corners of the training slides'.
        none_chosen = all(each is None for each in chosen)
        coords = self.coords or (self._of_run("coords", None, str) if none_chosen else None)
        if coords is None and none_chosen and self._of_run("corners_given", False):
            raise ConfigError(
                f"{self.run} was trained on patches whose corners were given; give --coords of these slides, or say "
                "--tissue auto"
            )
        return Patches(size, mpp, overlap, tissue, least, None if coords is None else Path(coords))

    @property
    def resolved_table(self) -> ClassTable | None:
        """Return the table of `classes`, or the run's; None where neither names any. Raises `ConfigError` as above."""
        entries = self.classes or tuple(map(str, self._of_run("classes", ())))
        return ClassTable.parse(entries) if entries else None

    @property
    def run_loss(self) -> str:
        """Return the loss of the training run, "" where nothing says so. Raises `ConfigError` as above."""
        return str(self._of_run("loss", ""))

    @property
    def run_fold(self) -> int | None:
        """Return the fold that the training run validated, None for none. Raises `ConfigError` as above."""
        fold = self._of_run("fold", None)
        return None if fold is None else int(fold)

    def _of_run(self, name: str, default: Any, kind: Any = None) -> Any:
        from gigagrad.models.saved import CONFIG, ONNX, SAFETENSORS

        path = self.model_path.with_name("config.yaml")
        if self.model_path.suffix in (Path(SAFETENSORS).suffix, Path(ONNX).suffix):
            path = self.model_path.with_name(CONFIG)  # of the same names; and JSON is YAML
        if not path.is_file():
            return default
        try:
            value = read_yaml(path).get(name)
            if value is None:  # nothing is said, or the run is older than the setting
                return default
            if not isinstance(value, kind or {(): list, "": str}.get(default, int)):
                raise TypeError(f"got a {type(value).__name__}")
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            remedy = (
                f"give it as --{name.replace('_', '-')}" if hasattr(self, name) else "restore the file that 'fit' wrote"
            )
            raise ConfigError(f"cannot read the {name} from {path}; {remedy}") from error
        return value

    @property
    def model_path(self) -> Path:
        """Return the saved model: `run` itself if it is a file, else the weights in that folder."""
        from gigagrad.models.saved import model_file

        return model_file(Path(self.run))


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(Settings):
    """Settings of `embed`: the slides, which patches of them, the encoder, and where to write.

    Attributes:
        slides: files, folders of slides, and CSV files with a column `slide` (optional: `mpp`, `split`).
        encoder: what makes a vector of each patch, as `timm:resnet18?pretrained=true`; of a library's network, without
            its classifier.
        out: output folder, in TRIDENT's layout: `20x_224px_0px_overlap/features_NAME/SLIDE.h5`.
        weights: what the encoder begins with instead: `.pt`, `.pth`, `.safetensors`, or a folder of Hugging Face.
        name: of the encoder in names of folders; none given: its own, as `resnet18`.
        patch_size: side of a patch, in pixels that the encoder sees.
        patch_mpp: micrometres per pixel of the patches.
        overlap: of patches beside each other, in pixels that the encoder sees.
        tissue: `auto` takes patches on tissue, by our own recipe; `mask` those on the mask in a CSV's column of
            this name; `all` takes every patch.
        least_tissue: share of a patch that has to be tissue.
        coords: a folder with the corners of the patches of each slide instead of those on tissue, in files of TRIDENT,
            CLAM or CSV, called by the slide; `patch_size` and `patch_mpp` have to be theirs.
        mpp: micrometres per pixel of level 0 of all slides, over what their files say.
        memory: peak memory the process may use, e.g. "1 GiB"; None takes what is free.
        device: "cpu" or "cuda".
        precision: `bfloat16` or `float16`, as autocast would; none given: the encoder's own.
        split: of the rows of a CSV file, only those with this split; None takes all.
        share: of the slides, as "2/4" the second of four shares that processes embed side by side into `out`.
        overwrite: compute again what is there already, and replace files of other encoders or programs.
    """

    slides: tuple[str | Path, ...]
    encoder: str
    out: str | Path
    weights: str | None = None
    name: str | None = None
    patch_size: int = 224
    patch_mpp: float = 0.5
    overlap: int = 0
    tissue: str = "auto"
    least_tissue: float = 0.1
    coords: str | Path | None = None
    mpp: float | None = None
    memory: str | int | None = None
    device: str = "cpu"
    precision: str | None = None
    split: str | None = None
    share: str = "1/1"
    overwrite: bool = False

    PATHS: ClassVar = "slides", "out", "weights", "coords"
    LIMITS: ClassVar = {"patch_size": (1, math.inf), "overlap": (0, math.inf), "least_tissue": (0, 1)}
    CHOICES: ClassVar = {
        "tissue": TISSUE,
        "precision": (None, "bfloat16", "float16"),
        "split": (None, *SPLITS),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slides:
            raise ConfigError("no slides to embed; name files, a folder or a CSV file")
        if self.mpp is not None and not 0 < self.mpp < math.inf:
            raise ConfigError(f"mpp must be a positive number of micrometres per pixel, got {self.mpp}")
        self.patches  # noqa: B018 - which checks
        if not re.fullmatch(r"[\w.+-]+", self.encoder_name):
            raise ConfigError(
                f"the encoder's name is to be part of a folder's name, got {self.encoder_name!r}; give a "
                "--name of letters, digits, '.', '_', '+' and '-'"
            )
        Share.parse(self.share)

    @property
    def patches(self) -> Patches:
        """Return which patches are read of slides. Raises `ConfigError`."""
        coords = None if self.coords is None else Path(self.coords)
        return Patches(self.patch_size, self.patch_mpp, self.overlap, self.tissue, self.least_tissue, coords)

    @property
    def encoder_name(self) -> str:
        """Return `name`, or what the encoder is called in its library."""
        return self.name or self.encoder.partition("?")[0].rpartition(":")[2]

    @property
    def folder(self) -> Path:
        """Return where the features of these patches by this encoder are."""
        return (
            Path(self.out)
            / f"{self.resolution}_{self.patch_size}px_{self.overlap}px_overlap"
            / f"features_{self.encoder_name}"
        )

    @property
    def resolution(self) -> str:
        """Write the magnification as TRIDENT does (0.5 um/px is 20x), or the mpp where that is no whole number."""
        magnification = 10 / self.patch_mpp
        return f"{magnification:g}x" if abs(magnification - round(magnification)) < 1e-6 else f"{self.patch_mpp:g}mpp"
