"""Make up H&E slides of any size with exact tissue masks, and whole cohorts of them, without patients' data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from gigagrad.errors import ConfigError, WriteError, extra
from gigagrad.files import write_csv, write_error
from gigagrad.images.write import write_pyramid

if TYPE_CHECKING:
    from gigagrad.images.synthetic.textures import Textures

_SMALLEST_SIDE: Final = 64


def make_slide(
    path: str | Path,
    *,
    height: int,
    width: int,
    seed: int,
    mask_path: str | Path | None = None,
    mpp: float = 0.5,
    tile: int = 256,
    quality: int = 80,
    overwrite: bool = False,
    textures: Textures | None = None,
) -> Path:
    """Write a made-up H&E slide of `height x width` pixels as a pyramidal JPEG BigTIFF and return its path.

    `mask_path` names a second file for the exact tissue mask (uint8 pyramid, 0 background, 1 tissue). The pixels depend
    on `height`, `width`, `seed` and `mpp` (micrometres per pixel) only. `textures` saves half a second per slide where
    several are made at one resolution.

    Raises `ConfigError` without OpenCV, for a side below 64 px or an mpp outside 0.2..2, and `WriteError` as
    `write_pyramid` does.
    """
    with extra("demo"):  # only where a slide is made
        import cv2  # noqa: F401

        from gigagrad.images.synthetic.painting import Painter
        from gigagrad.images.synthetic.textures import make_textures

    if min(height, width) < _SMALLEST_SIDE:
        raise ConfigError(f"got a slide of {height} x {width} px, expected at least {_SMALLEST_SIDE} px on each side")
    if not 0.2 <= mpp <= 2:
        raise ConfigError(f"got mpp {mpp:g}, expected 0.2 to 2 micrometres per pixel for a synthetic slide")
    assert textures is None or textures.mpp == mpp, (textures, mpp)
    painter = Painter(height, width, seed, textures or make_textures(mpp))
    write = partial(write_pyramid, dtype=np.uint8, mpp=mpp, overwrite=overwrite)
    if mask_path is not None:
        write(
            mask_path,
            painter.mask_rows(),
            shape=(height, width, 1),
            nearest=True,
            description=f"gigagrad exact tissue mask of a synthetic slide, seed {seed}: 0 background, 1 tissue",
        )
    return write(
        path,
        painter.rows(),
        shape=(height, width, 3),
        nearest=False,
        tile=tile,
        compression="jpeg",
        quality=quality,
        description=f"gigagrad synthetic H&E slide, seed {seed}",
        expected_bytes=height * width // 5,  # measured: about 0.15 bytes per pixel with all levels
    )


def make_cohort(
    folder: str | Path,
    count: int,
    *,
    height: int,
    width: int,
    seed: int = 0,
    mpp: float = 0.5,
    overwrite: bool = False,
) -> Path:
    """Write `count` slides, their exact masks and `cohort.csv`, and return the path of the last.

    The table has the columns `slide`, `mask` (relative to the folder) and `split`. Of three slides or more, at least
    one each is for `val` and `test`; of larger cohorts, one in five.

    Raises `ConfigError` for fewer than one slide, and what `make_slide` raises.
    """
    if count < 1:
        raise ConfigError(f"got a cohort of {count} slides, expected at least 1")
    folder = Path(folder)
    table = folder / "cohort.csv"
    if table.exists() and not overwrite:
        raise WriteError(f"cannot write {table}: it exists already; choose another folder or allow overwriting")
    try:
        for name in ("slides", "masks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    with extra("demo"):
        import cv2  # noqa: F401

        from gigagrad.images.synthetic.textures import make_textures

    textures = make_textures(mpp)
    rows = [("slide", "mask", "split")]
    held_out = 0 if count < 3 else max(1, count // 5)
    splits = ["train"] * (count - 2 * held_out) + ["val"] * held_out + ["test"] * held_out
    for index, split in enumerate(splits):
        slide, mask = f"slides/synthetic-{index:03d}.tif", f"masks/synthetic-{index:03d}.tif"
        make_slide(
            folder / slide,
            height=height,
            width=width,
            seed=seed * 100_003 + index,
            mask_path=folder / mask,
            mpp=mpp,
            overwrite=overwrite,
            textures=textures,
        )
        rows.append((slide, mask, split))
    write_csv(table, rows)
    return table
