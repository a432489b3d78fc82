"""Random files through us and through the library whose word counts for them: equal pixels, or refused in a sentence.

    python bench/readers.py [--cases 2000] [--seed 0] [--only NUMBER]

Every case is a small file by `readers_files.py`: any layout, dtype, codec, colour, byte order, levels as pages or below
the first, blocks that are left out or cut, values of no data, masks, alpha. Whose word counts: GDAL's for files with
GeoTIFF's or GDAL's tags or a mask inside, OpenSlide's for the colour slides in tiles that it opens (what it leaves
transparent is white), zarr's for Zarr, tifffile's for all others. Compared are every level's pixels, where there is no
data, and names and value of it. Two things are ours by intent, and allowed for: the alpha channel of a colour image is
no channel, and where a mask says that there is no data, samples are 0.
Progress on stderr; one JSON line last: how many were equal, refused (by reason), different, and ended the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import openslide
import rasterio
import tifffile
import zarr
from rasterio.enums import MaskFlags

from bench.attack_worker import Judge, Verdict, Worker
from bench.readers_files import geotiff, of_tifffile, tiff, zarr_array
from gigagrad.boxes import Box
from gigagrad.errors import GigagradError
from gigagrad.images import Image, open_image

SECONDS = 60.0
_GEO_TAGS = (33550, 33922, 34264, 34735, 42112, 42113)
_RGB, _YCBCR = 2, 6
_MASK = 4
_JPEG = 7
JPEG_ROUNDS = 16
"""GDAL's libjpeg interpolates colours that are stored at half the size in its own way."""
KINDS = [(tiff, ".tif")] * 6 + [(geotiff, ".tif")] * 3 + [(of_tifffile, ".tif")] * 2 + [(zarr_array, ".zarr")]


class Seen(NamedTuple):
    """A level as a library has it: pixels `(C, H, W)` and where it has no data `(H, W)`, None if it does not tell."""

    pixels: np.ndarray
    missing: np.ndarray | None


def judge(index: int, seed: int, folder: Path) -> Verdict:
    """One case: equal, refused, different or foreign, and what there is to say about it."""
    rng = random.Random(f"{seed}/{index}")
    make, suffix = rng.choice(KINDS)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / f"image{suffix}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = make(path, rng)
        try:
            with open_image(path) as image:
                whose, found = differences(image, path)
        except GigagradError as error:
            reason = str(error)
            return ("refused", reason) if "\n" not in reason else ("foreign", f"{reason!r}: {said}")
        except Exception as error:
            return "foreign", f"{type(error).__name__}: {error}: {said}"
    return ("different", f"{whose}: {found}: {said}") if found else ("equal", whose)


def differences(image: Image, path: Path) -> tuple[str, str]:
    """Whose word counts, and what differs from it, "" where nothing does."""
    whole = np.asarray(image.read(Box.whole(image.height, image.width)))
    whose, levels = reference(path, image)
    if isinstance(levels, str):
        return whose, f"read with shape {whole.shape}, though the reference says: {levels}"
    known = {seen.pixels.shape[1:]: seen for seen in reversed(levels)}
    shapes = [level.shape for level in image.levels]
    if shapes != [seen.pixels.shape[1:] for seen in levels]:
        return whose, f"levels {image.levels}, theirs {[seen.pixels.shape for seen in levels]}"
    for number, level in enumerate(image.levels):
        with image.at_level(number) if number else open_image(path) as one:
            box, theirs = Box.whole(*level.shape), known[level.shape]
            ours = np.asarray(one.read(box))
            if ours.dtype == np.float16:  # GDAL has floats of four bytes and more
                ours = ours.astype(theirs.pixels.dtype)
            if ours.dtype == bool:  # and of tifffile GDAL has bytes
                ours = ours.astype(theirs.pixels.dtype)
            if ours.shape != theirs.pixels.shape or ours.dtype != theirs.pixels.dtype:
                return whose, f"{ours.shape} {ours.dtype}, theirs {theirs.pixels.shape} {theirs.pixels.dtype}"
            if wrong := int((~alike(ours, theirs.pixels, whose == "GDAL" and lossy(path))).any(axis=0).sum()):
                return whose, f"{wrong} of {level.shape[0] * level.shape[1]} px of level {number}"
            missing = np.zeros(level.shape, bool) if (found := one.missing(box)) is None else found
            if theirs.missing is not None and (wrong := int((missing != theirs.missing).sum())):
                return whose, f"{wrong} px of level {number} wrongly (un)missing"
            part = Box(level.shape[0] // 3, level.shape[1] // 3, *level.shape)
            if not alike(np.asarray(one.read(part)), ours[:, part.y0 :, part.x0 :]).all():
                return whose, f"{part} differs from the whole"
    return whose, ""


def alike(one: np.ndarray, two: np.ndarray, rounded: bool = False) -> np.ndarray:
    if rounded:
        return np.abs(one.astype(int) - two) <= JPEG_ROUNDS
    same: np.ndarray = one == two
    return same | ((one != one) & (two != two))


def lossy(path: Path) -> bool:
    with tifffile.TiffFile(path) as tif:
        return int(tif.pages.first.compression) == _JPEG


def reference(path: Path, image: Image) -> tuple[str, list[Seen] | str]:
    """The levels of a file by the library whose word counts, or what it says instead."""
    if path.is_dir():
        array = zarr.open_array(path, mode="r")[...]
        pixels = np.atleast_3d(np.asarray(array)) if array.ndim == 3 else np.asarray(array)[None]
        return "zarr", [Seen(pixels, np.zeros(pixels.shape[1:], bool))]
    with tifffile.TiffFile(path) as tif:
        page = tif.pages.first
        masked = any(int(entry.subfiletype) & _MASK for entry in tif.pages)
        masked = masked or path.with_name(f"{path.name}.msk").is_file()
        of_gdal = masked or any(tag in page.tags for tag in _GEO_TAGS)
        colour = int(page.photometric) in (_RGB, _YCBCR)
        alpha = page.samplesperpixel in (2, 4) and bool(page.extrasamples) and int(page.extrasamples[-1]) in (1, 2)
        role = re.search(r'sample="3" role="colorinterp">(\w*)', str(page.tags.valueof(42112)))
        kept = 3 if colour and alpha and (role is None or role[1] == "Alpha") else None
        seen = alpha and page.dtype in ("u1", "u2")
        slide = colour and page.is_tiled and not of_gdal and (270 in page.tags or 282 in page.tags)
        slide = slide and page.dtype in ("u1", "u2") and (page.samplesperpixel == 3 or kept)
        try:
            if of_gdal:
                with suppress(rasterio.errors.RasterioIOError):  # it refuses to read
                    return "GDAL", list(by_gdal(path, kept))
            slide = slide and opens(path)
            levels = list(by_tifffile(tif, kept, seen, white=bool(slide)))
            if of_gdal:
                levels = [seen_level._replace(missing=None) for seen_level in levels]
        except Exception as error:
            return "tifffile", f"{type(error).__name__}: {error}"
    if slide and (found := by_openslide(path, levels)) is not None:
        return "OpenSlide", found
    return "tifffile", levels


def by_gdal(path: Path, kept: int | None) -> Iterator[Seen]:
    with rasterio.open(path) as file:
        overviews = len(file.overviews(1))
    for level in range(overviews + 1):
        with rasterio.open(path, **({"overview_level": level - 1} if level else {})) as file:
            pixels, missing = file.read(), file.dataset_mask() == 0
            if kept is None and file.count == 4 and MaskFlags.nodata in file.mask_flag_enums[0]:
                missing = (file.read_masks() == 0).all(axis=0)  # of red and three more rasterio asks the last alone
            if file.mask_flag_enums[0] == [MaskFlags.per_dataset]:
                pixels[:, missing] = 0
        yield Seen(pixels[:kept], missing)


def by_tifffile(tif: tifffile.TiffFile, kept: int | None, alpha: bool, white: bool) -> Iterator[Seen]:
    for level in tif.series[0].levels:
        if white:
            level.keyframe.nodata = int(np.iinfo(level.dtype).max)
        # It reads the header where a strip is left out that would be all of the pixels.
        pixels, axes = np.zeros(level.shape, level.dtype) if level.dataoffset == 0 else level.asarray(), level.axes
        pixels = pixels[None] if axes == "YX" else pixels.transpose(2, 0, 1) if axes == "YXS" else pixels
        missing = pixels[-1] == 0 if alpha else np.zeros(pixels.shape[1:], bool)
        yield Seen(pixels[:kept].astype(level.dtype.newbyteorder("="), copy=False), missing)


def opens(path: Path) -> bool:
    try:
        openslide.OpenSlide(path).close()
    except openslide.OpenSlideError:
        return False
    return True


def by_openslide(path: Path, levels: list[Seen]) -> list[Seen] | None:
    """The levels as OpenSlide opens them, and others of a TIFF of no vendor's, of which it sees pages alone; None where
    it cannot read it. It knows bytes only: of others it says what it leaves transparent."""
    known = {seen.pixels.shape[1:]: seen for seen in levels}
    found: list[Seen] = []
    with openslide.OpenSlide(path) as slide:
        for number, (width, height) in enumerate(slide.level_dimensions):
            try:
                rgba = np.asarray(slide.read_region((0, 0), number, (width, height)))
            except openslide.OpenSlideError:
                return None
            pixels, left_out = rgba[..., :3].transpose(2, 0, 1), rgba[..., 3] == 0
            stored, missing = known.get((height, width), (pixels, None))
            if missing is not None:
                left_out &= ~missing
                pixels = stored if stored.dtype == np.uint16 else np.where(missing, stored, pixels)
            white = pixels.dtype.type(np.iinfo(pixels.dtype).max)
            found.append(Seen(np.where(left_out, white, pixels), missing))
        if slide.properties["openslide.vendor"] == "generic-tiff":
            seen = {level.pixels.shape: level for level in found}
            found = [seen.get(level.pixels.shape, level) for level in levels]
    return found


def reason_of(said: str) -> str:
    """A refusal without what belongs to the one file."""
    said = re.sub(r"\S*\bimage(\.tif|\.zarr)?(?=[ :])", "FILE", said).partition(";")[0]
    return re.sub(r"\[?-?\d[\d, x:]*[])]*", "N ", said)[:90]


def set_up(seed: int, folder: Path, _: int) -> Judge:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return partial(judge, seed=seed, folder=folder / "case")


def run(cases: int, seed: int) -> dict[str, object]:
    counts: Counter[str] = Counter()
    by_reference: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    examples: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        worker = Worker(partial(set_up, seed, Path(name)), SECONDS, start="fork")
        for case in range(cases):
            worker.give(case)
            while (verdict := worker.answer()) is None:
                wait([worker.pipe], timeout=1)
            kind, said = verdict
            counts[kind] += 1
            if kind == "equal":
                by_reference[said] += 1
            elif kind == "refused":
                refused[reason_of(said)] += 1
            else:
                examples.append(f"--seed {seed} --only {case}: {kind}: {said[:500]}")
                print(examples[-1], file=sys.stderr)
            if (case + 1) % 100 == 0:
                print(f"{case + 1} of {cases}: {dict(counts)}", file=sys.stderr)
        worker.close()
    return {
        "seed": seed,
        "cases": cases,
        **{kind: counts[kind] for kind in ("equal", "refused", "different", "foreign", "crashed", "hung")},
        "equal_to": dict(by_reference.most_common()),
        "refused_as": dict(refused.most_common()),
        "examples": examples[:10],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone, in this process")
    chosen = parser.parse_args()
    if chosen.only is not None:
        with tempfile.TemporaryDirectory() as name:
            print(*judge(chosen.only, chosen.seed, Path(name) / "case"))
        return 0
    found = run(chosen.cases, chosen.seed)
    print(json.dumps(found))
    return int(any(found[kind] for kind in ("different", "foreign", "crashed", "hung")))


if __name__ == "__main__":
    sys.exit(main())
