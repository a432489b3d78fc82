"""A cohort small enough to train in seconds: dark blobs on white, with the blobs as masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile


def write_slide(folder: Path, name: str, *, seed: int, height: int, width: int) -> tuple[Path, Path]:
    """A slide and its exact mask as tiled TIFF; returns both paths."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    mask = np.zeros((height, width), bool)
    for _ in range(3):
        cy, cx, radius = rng.integers(height), rng.integers(width), rng.integers(30, 60)
        mask |= (y - cy) ** 2 + (x - cx) ** 2 < radius**2
    rgb = np.where(mask[..., None], (150, 80, 140), (245, 245, 245)) + rng.integers(-10, 10, (height, width, 3))
    slide_path, mask_path = folder / f"{name}.tif", folder / f"{name}.mask.tif"
    tifffile.imwrite(slide_path, rgb.clip(0, 255).astype(np.uint8), tile=(64, 64), photometric="rgb")
    tifffile.imwrite(mask_path, mask.astype(np.uint8), tile=(64, 64), photometric="minisblack", compression="deflate")
    return slide_path, mask_path


def write_cohort(folder: Path, shapes: list[tuple[int, int]]) -> Path:
    """Training slides of these `(height, width)`, then one validation and two test slides of the first one's."""
    lines = ["slide,mask,split"]
    splits = ["train"] * len(shapes) + ["val", "test", "test"]
    for index, (split, shape) in enumerate(zip(splits, [*shapes, *shapes[:1] * 3], strict=True)):
        slide, mask = write_slide(folder, f"slide{index}", seed=index, height=shape[0], width=shape[1])
        lines.append(f"{slide.name},{mask.name},{split}")
    path = folder / "cohort.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def cohort_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training slides, one validation slide and two test slides; all square, so that a turn needs no new plan."""
    return write_cohort(tmp_path_factory.mktemp("cohort"), [(176, 176)] * 3)


@pytest.fixture
def mixed_csv(tmp_path: Path) -> Path:
    """Training slides of two sizes, none of them square."""
    return write_cohort(tmp_path, [(176, 208), (189, 163)])
