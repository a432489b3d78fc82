"""Read and write where the patches of a slide are: files of TRIDENT, files of CLAM, and CSV.

TRIDENT (`mahmoodlab/TRIDENT`, `trident/IO.py`: `coords_to_h5`, `read_coords`) writes `NAME_patches.h5`: a dataset
`coords` `(N, 2)` of int64, x and y of each patch's top left pixel in level 0, with the attributes `patch_size` (pixels
of a patch as the encoder sees it), `patch_size_level0`, `level0_magnification`, `target_magnification`, `overlap`
(pixels of a patch), `name`, `savetodir`, `level0_width` and `level0_height`. Its reader takes the pixels of level 0
from `patch_size * level0_magnification / target_magnification`. Files of features hold the same dataset.

CLAM (`mahmoodlab/CLAM`, `wsi_core/WholeSlideImage.py`: `process_contour`; `dataset_modules/dataset_h5.py`:
`Whole_Slide_Bag_FP`) writes `NAME.h5`: `coords` in level 0 as well, with `patch_size` (pixels of the level that is
read), `patch_level`, `downsample` (of that level), `downsampled_level_dim`, `level_dim` (width, height of the level),
`name` and `save_path`. Forks of it add `custom_downsample`: patches are made smaller by that after they are read.

A CSV (commas, semicolons or tabs) has the columns `x` and `y`, in level 0; others are left aside.

Files come from strangers: what they declare is checked before it is read, and nothing leads to other files.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ImageError, extra
from gigagrad.files import check_destination, replacing
from gigagrad.images.image import Image
from gigagrad.images.pixels import Array, in_our_words
from gigagrad.units import format_bytes

if TYPE_CHECKING:
    from gigagrad.images.slide_bag import SlideBag


Corners = NDArray[np.int64]

MOST_PATCHES: Final = 10**7
_LONGEST_AXIS: Final = 2**31 - 1
_LARGEST_CSV_BYTES: Final = 2**30
_LARGEST_NUMBER: Final = 2**31
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
_CHUNK_ROWS: Final = 4096
_MAGNIFICATIONS: Final = ((0.16, 80), (0.2, 60), (0.3, 40), (0.6, 20), (1.2, 10), (2.4, 5))
"""TRIDENT's magnification of level 0, by the micrometres per pixel below which it counts."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Corners of patches that somebody else has chosen.

    Attributes:
        corners: `(N, 2)`, x and y of the top left pixel in level 0.
        size: pixels a side of a patch as an encoder sees it, None where nothing says so.
        side: what that is in pixels of level 0, None where nothing says so.
        name: for messages.
    """

    corners: Corners
    size: int | None = None
    side: float | None = None
    name: str = "coords"

    def check_inside(self, slide: Image, side: float) -> None:
        """Raise `ImageError` where a patch of `side` px of level 0 shows nothing of a slide."""
        height, width = slide.levels[0].shape
        x, y = self.corners.T
        outside = (x >= width) | (y >= height) | (x + side <= 0) | (y + side <= 0)
        if outside.any():
            raise ImageError(
                f"{self.name} has {int(outside.sum())} of {len(x)} patches outside {slide.name} of {width} x {height} "
                f"px, the first at {tuple(self.corners[outside][0].tolist())}; give coordinates of this slide, in "
                "pixels of level 0, x before y"
            )


def read_coordinates(source: str | Path | Array, slide: Image) -> Coordinates:
    """Read the corners of patches of a slide, open at any level, from a file or an array `(N, 2)`.

    Raises `ImageError` for a file that is damaged, of no known kind, empty, or of another slide.
    """
    if not isinstance(source, str | Path):
        found = Coordinates(_corners(np.asarray(source), "coords"))
    else:
        path = Path(source)
        if not path.is_file():
            raise ImageError(f"{path} is no file of coordinates; check the path")
        with in_our_words(f"cannot read {path}"), path.open("rb") as file:
            head = file.read(len(_HDF5))
        if head == _HDF5:
            with extra("bags"):
                import h5py  # noqa: F401
        with in_our_words(f"cannot read {path}"):
            found = _read_h5(path, slide) if head == _HDF5 else _read_csv(path)
    return found


def _corners(given: Array, name: str) -> Corners:
    """Return corners as int64. Raises `ImageError` for what are none."""
    if not given.size:
        raise ImageError(f"{name} has no patches; choose some, or leave it out and take those with tissue")
    if given.ndim != 2 or given.shape[1] != 2 or given.dtype.kind not in "iuf" or len(given) > MOST_PATCHES:
        raise ImageError(
            f"{name} has the shape {given.shape} of {given.dtype}; expected x and y of up to {MOST_PATCHES} patches, "
            "(N, 2) whole numbers"
        )
    if not (np.abs(given.astype(np.float64)) < _LARGEST_NUMBER).all() or (
        given.dtype.kind == "f" and (given % 1).any()
    ):
        raise ImageError(f"{name} has corners that are no pixels; expected whole numbers, in pixels of level 0")
    return given.astype(np.int64)


def _read_csv(path: Path) -> Coordinates:
    if (size := path.stat().st_size) > _LARGEST_CSV_BYTES:
        raise ImageError(
            f"{path} has {format_bytes(size)}; expected coordinates, {format_bytes(_LARGEST_CSV_BYTES)} at most"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            delimiter = max(",;\t", key=first.count)
            table = csv.reader(itertools.chain([first], file), delimiter=delimiter)
            header = [name.strip().lower() for name in next(table, [])]
            if header.count("x") != 1 or header.count("y") != 1:
                raise ImageError(
                    f"{path} has the columns {', '.join(header[:20]) or 'none'}; expected x and y, in pixels of "
                    "level 0, or an .h5 of TRIDENT or CLAM"
                )
            columns = header.index("x"), header.index("y")
            numbers = [[float(row[column]) for column in columns] for row in table if row]
    except (ValueError, IndexError, UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(
            f"{path} is no table of coordinates ({error}); expected numbers in the columns x and y"
        ) from error
    return Coordinates(_corners(np.array(numbers, np.float64).reshape(-1, 2), str(path)), name=str(path))


def _read_h5(path: Path, slide: Image) -> Coordinates:
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        dataset = _dataset(file, path)
        said = {name: _numbers(dataset.attrs, name) for name in _NUMBERS}
        corners = _corners(dataset[()], str(path))
    size, level = _one(said, "patch_size"), _one(said, "patch_level")
    if level is not None:
        return _of_clam(corners, said, size, int(level), slide, path)
    width, height = _one(said, "level0_width"), _one(said, "level0_height")
    _check_slide(path, slide, 0, width, height)
    side = _one(said, "patch_size_level0")
    powers = _one(said, "level0_magnification"), _one(said, "target_magnification")
    if side is None and size is not None and powers[0] and powers[1]:
        side = float(round(size * powers[0] / powers[1]))
    return Coordinates(corners, None if size is None else int(size), side, str(path))


_NUMBERS: Final = (
    *("patch_size", "patch_size_level0", "level0_magnification", "target_magnification"),
    *("level0_width", "level0_height", "patch_level", "downsample", "level_dim", "custom_downsample"),
)


def _dataset(file: Any, path: Path) -> Any:
    """Return the dataset `coords`. Raises `ImageError` where it leads elsewhere or is larger than it may be."""
    if "imgs" in file:
        raise ImageError(
            f"{path} holds pixels, and coordinates of their level; make coordinates alone, by CLAM's "
            "create_patches_fp.py"
        )
    dataset = own_dataset(file, "coords")
    if dataset.dtype.kind not in "iuf" or dataset.size > 2 * MOST_PATCHES:
        raise ImageError(
            f"{path} has coords of the shape {dataset.shape} of {dataset.dtype}; expected x and y of up to "
            f"{MOST_PATCHES} patches, (N, 2) whole numbers"
        )
    return dataset


def _numbers(attributes: Any, name: str) -> tuple[float, ...]:
    """Return an attribute of one or two numbers, () where it is missing or something else."""
    if name not in attributes:
        return ()
    described = attributes.get_id(name)
    if described.dtype.kind not in "iuf" or math.prod(described.shape) > 2:
        return ()
    numbers = tuple(float(number) for number in np.ravel(attributes[name]))
    return numbers if all(0 <= number <= _LONGEST_AXIS for number in numbers) else ()


def _one(said: dict[str, tuple[float, ...]], name: str) -> float | None:
    return said[name][0] if len(said[name]) == 1 else None


def _of_clam(
    corners: Corners, said: dict[str, tuple[float, ...]], size: float | None, level: int, slide: Image, path: Path
) -> Coordinates:
    if level >= len(slide.levels):
        raise ImageError(
            f"{path} has patches of level {level}, and {slide.name} has {len(slide.levels)} levels; give the "
            "coordinates of this slide"
        )
    if len(said["level_dim"]) == 2:
        _check_slide(path, slide, level, *said["level_dim"])
    if not size:
        return Coordinates(corners, name=str(path))
    smaller = _one(said, "custom_downsample") or 1
    return Coordinates(corners, int(size / max(1, smaller)), size * slide.levels[level].downsample, str(path))


def _check_slide(path: Path, slide: Image, level: int, width: float | None, height: float | None) -> None:
    """Raise `ImageError` where a level has another size than the file says, if it does."""
    own = slide.levels[level].shape
    if width is not None and height is not None and (height, width) != own:
        raise ImageError(
            f"{path} is of a slide of {width:g} x {height:g} px at level {level}, and {slide.name} has "
            f"{own[1]} x {own[0]} px there; give the coordinates of this slide"
        )


def magnification(mpp: float) -> int:
    """Return the magnification that TRIDENT makes of micrometres per pixel. Raises `ImageError` beyond 5x."""
    for below, power in _MAGNIFICATIONS:
        if mpp < below:
            return power
    raise ImageError(f"{mpp:g} um/px is coarser than the 5x that TRIDENT knows; it cannot say what these patches are")


def trident_attributes(bag: SlideBag, folder: Path) -> dict[str, int | float | str]:
    """Return what TRIDENT says of the patches of a slide, beside their corners, whose job writes into `folder`.

    Its reader computes the pixels of level 0 from magnifications, so that of the patches is a float where it has to be.
    Raises `ImageError` for a bag whose resolution is unknown.
    """
    if bag.level0_mpp is None:
        raise ImageError(
            f"{bag.name} has no micrometres per pixel (mpp), of which TRIDENT makes magnifications; give them with "
            "open_image(slide, mpp=...)"
        )
    size, power = bag.shape[3], magnification(bag.level0_mpp)
    target = power * size / bag.patch_size_level0
    height, width = bag.level0_shape
    return {
        "patch_size": size,
        "patch_size_level0": bag.patch_size_level0,
        "level0_magnification": power,
        "target_magnification": int(target) if target.is_integer() else target,
        "overlap": bag.overlap,
        "name": bag.name,
        "savetodir": str(folder),
        "level0_width": width,
        "level0_height": height,
    }


def write_coordinates(path: str | Path, bag: SlideBag, *, overwrite: bool = False) -> Path:
    """Write where the patches of a slide are as TRIDENT does, and return the path.

    TRIDENT looks for `JOB/patches/NAME_patches.h5`. Raises `WriteError`, and `ImageError` for a bag whose resolution is
    unknown.
    """
    with extra("bags"):
        import h5py
    path = Path(path)
    job = path.parent.parent if path.parent.name == "patches" else path.parent
    attributes = trident_attributes(bag, job)
    check_destination(path, overwrite=overwrite, expected_bytes=bag.coords.nbytes)
    written = io.BytesIO()
    with h5py.File(written, "w") as file:
        chunks = (min(len(bag), _CHUNK_ROWS), 2)
        dataset = file.create_dataset("coords", data=bag.coords, maxshape=(None, 2), chunks=chunks)
        for name, value in attributes.items():
            dataset.attrs[name] = value
    with replacing(path) as target:
        target.write(written.getbuffer())
    return path


_BUILT_IN: Final = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
"""Filters of HDF5 by number that need no plugin."""
_LARGEST_CHUNK_BYTES: Final = 2**26


def own_dataset(file: Any, name: str) -> Any:
    """Return a data set of an open `h5py.File` that lies in the file itself. Raises `ImageError` for any other:
    a file may name other files, and filters that HDF5 would load as plugins.

    How much it claims to hold is for the caller to check.
    """
    import h5py

    path = file.filename
    if name not in file.keys():  # noqa: SIM118 - of a link that leads nowhere, `in file` says no
        there = ", ".join(map(repr, list(file)[:5])) or "nothing"
        raise ImageError(f"{path} has no {name}, but {there}; give a file of TRIDENT or CLAM that holds them")
    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or file.get(name, getclass=True) is not h5py.Dataset:
        raise ImageError(f"{path} leads elsewhere for its {name}; give the file that holds them")
    found = file[name]
    if found.is_virtual or found.external:
        raise ImageError(f"{path} keeps its {name} in other files; give the file that holds them")
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    if unknown := [number for number in filters if number not in _BUILT_IN]:
        raise ImageError(
            f"{path} has {name} packed by the filter {unknown[0]}; expected {', '.join(_BUILT_IN.values())}, or none"
        )
    chunk_bytes = math.prod(found.chunks or ()) * found.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise ImageError(
            f"{path} has {name} of which {format_bytes(chunk_bytes)} are read at a time; expected chunks of at most "
            f"{format_bytes(_LARGEST_CHUNK_BYTES)}"
        )
    return found
