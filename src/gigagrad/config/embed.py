"""Settings of features: everything that they depend on, as frozen data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gigagrad.cohorts import SPLITS
from gigagrad.cohorts.patches import TISSUE, Patches
from gigagrad.config import Settings
from gigagrad.errors import ConfigError
from gigagrad.shares import Share


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
