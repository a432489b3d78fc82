"""Damaged and hostile images: each gives right pixels or one `ImageError`, never a hang, a crash or anything else.

    python bench/attack_images.py [--count 50000] [--seed 0] [--workers 2] [--slides DIR] [--only NUMBER]

From the seed, every case takes a small image of one reader, codec and layout (or a slide of DIR), damages it, opens it,
and reads boxes and a thumbnail of its levels. Files are damaged blindly (bits, bytes, cuts, blocks removed, doubled,
zeroed, joined) and knowingly (fields of TIFF directories, descriptions that declare 10**8 planes, JSON of other types,
JPEG and PNG that end before their pixels). Workers have limits of time (10 s a case) and memory (300 MiB more than
before the case); one that dies or does not answer is replaced. Of what opens, the pixels must be those of the library
that reads the same file whole (tifffile, Pillow, zarr), and of every undamaged file those that were written.
Progress on stderr; one JSON line last. `--only` repeats one case in this process and shows what it raised.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import PIL.Image
import tifffile
import zarr

from bench.attack_image_bases import Base, Files, make_bases
from bench.attack_image_damage import damaged
from bench.attack_worker import Judge, Verdict, Worker, campaign, options, report
from gigagrad.boxes import Box
from gigagrad.errors import GigagradError
from gigagrad.images import Image, open_image, thumbnail

SECONDS = 10.0
MORE_BYTES = 300 * 2**20
ADDRESS_BYTES = 6 * 2**30
"""Room for what is reserved and not used; a worker shall not take the machine with it."""
LARGEST_PX = 2**21
"""Larger images are read in part only: their size is a claim that a sparse file may make."""


def look(path: Path, rng: random.Random) -> str:
    """Open, read, compare. Returns fine or wrong; raises what the readers raise."""
    with open_image(path) as image:
        for level in range(min(3, len(image.levels))):
            with image.at_level(level) if level else open_image(path) as one:
                said = look_at(one, path, level, rng)
                if said != "fine":
                    return said
    return "fine"


def look_at(image: Image, path: Path, level: int, rng: random.Random) -> str:
    height, width = image.height, image.width
    y, x = rng.randrange(height), rng.randrange(width)
    corners = ((0, 0), (max(0, height - 40), max(0, width - 40)), (y, x), (-5, -5))
    boxes = [Box(top, left, top + 48, left + 48) for top, left in corners]
    for box in boxes:
        part = np.asarray(image.read(box))
        if part.shape != (image.channels, 48, 48) or part.dtype != image.dtype:
            return f"wrong: {box} has shape {part.shape} and dtype {part.dtype}"
    if height * width * image.channels > LARGEST_PX:
        return "fine"
    small = thumbnail(image, 32)
    if max(small.shape[:2]) > 32:
        return f"wrong: a thumbnail of {small.shape}"
    whole = np.asarray(image.read(Box.whole(height, width)))
    for box in boxes[:3]:
        inside = box.clamp(height, width)
        same = whole[:, inside.y0 : inside.y1, inside.x0 : inside.x1]
        if not np.array_equal(np.asarray(image.read(inside)), same, equal_nan=True):
            return f"wrong: {box} differs from the whole"
    reference = None if "openslide" in type(image).__name__.lower() else whole_by_library(path, level)
    if reference is not None and reference.shape == whole.shape and not alike(reference, whole):
        return "wrong: the pixels differ from the library's"
    return "fine"


def alike(one: np.ndarray, two: np.ndarray) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def whole_by_library(path: Path, level: int) -> np.ndarray | None:
    """`(C, H, W)` by the library that owns the format; None where it refuses the file or sees another layout."""
    try:
        if path.is_dir():
            node = zarr.open(path, mode="r")
            array = node if isinstance(node, zarr.Array) else None
            return None if array is None or array.ndim != 3 or level else np.asarray(array[...])
        if path.read_bytes()[:2] not in (b"II", b"MM"):
            with PIL.Image.open(path) as picture:
                plain = picture.mode in ("L", "RGB") and not picture.has_transparency_data
                stored = np.asarray(picture) if plain else None
            return None if stored is None else np.atleast_3d(stored).transpose(2, 0, 1)
        with tifffile.TiffFile(path, _multifile=False) as tif:
            series = tif.series[0].levels[level]
            sparse = any(0 in page.databytecounts for page in series.pages if page is not None)
            if sparse or series.axes not in ("YX", "YXS", "CYX", "SYX", "QYX") or tif.pages[0].software == "MedScan":
                return None
            array = series.asarray()
            array = array[None] if array.ndim == 2 else array
            return array.transpose(2, 0, 1) if series.axes == "YXS" else array
    except Exception:
        return None


def run_case(index: int, seed: int, bases: list[Base], folder: Path) -> Verdict:
    """One case in this process: how it ended, and what was said."""
    rng = random.Random(f"{seed}/{index}")
    base = rng.choice(bases)
    path = folder / f"image{base.suffix}"
    put(path, damaged(base, rng), base)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    open_files = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, said = verdict(path, rng)
    if (more := memory("VmHWM") - before) > MORE_BYTES:
        kind, said = "crashed", f"{more >> 20} MiB more ({kind}: {said})"
    if kind != "foreign" and still_more_files_than(open_files):
        kind, said = "leaked", f"an open file ({kind}: {said})"
    return kind, f"{base.name}: {said}"


def still_more_files_than(before: int) -> bool:
    """After what waits for the collector, and threads that were reading when another failed, are done."""
    for _ in range(20):
        if len(os.listdir("/proc/self/fd")) <= before:
            return False
        gc.collect()
        time.sleep(0.02)
    return True


def verdict(path: Path, rng: random.Random) -> Verdict:
    try:
        said = look(path, rng)
    except GigagradError as error:
        said = str(error)
        return ("refused", said) if said and "\n" not in said else ("foreign", f"not one line: {said!r}")
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return said.partition(":")[0], said


def put(path: Path, files: Files, base: Base) -> None:
    """Write the files of a case, in place of those of the case before."""
    if "" in base.files:
        path.write_bytes(files[""])
        return
    shutil.rmtree(path, ignore_errors=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def memory(field: str) -> int:
    """Bytes of this process, by a field of its status."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) * 1024


def check_bases(bases: list[Base], folder: Path) -> list[str]:
    """What is wrong with undamaged images; those that are refused by name are no fault."""
    faults = []
    for base in bases:
        path = folder / f"image{base.suffix}"
        put(path, base.files, base)
        try:
            with warnings.catch_warnings(), open_image(path) as image:
                warnings.simplefilter("ignore")
                said = look(path, random.Random(0))
                whole = np.asarray(image.read(Box.whole(image.height, image.width))) if base.truth is not None else None
            if said != "fine" or (whole is not None and not alike(np.asarray(base.truth), whole)):
                faults.append(f"{base.name}: undamaged, {said} and the pixels that were written do not come back")
        except GigagradError as error:
            print(f"{base.name} is refused: {error}", file=sys.stderr)
    return faults


def set_up(seed: int, bases: list[Base], folder: Path, number: int) -> Judge:
    """In a worker: limits, and whatever libraries open and keep with the first image (an event loop, codecs)."""
    own = folder / f"worker{number}"
    own.mkdir(exist_ok=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    room = memory("VmSize") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    check_bases(bases, own)
    return partial(run_case, seed=seed, bases=bases, folder=own)


def prepared(folder: Path, slides: Path | None) -> tuple[list[Base], list[str]]:
    """Bases and what is wrong with them, made in a process of its own: this one stays without threads, to be forked."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def make() -> None:
        bases = make_bases(folder, slides)
        there.send((bases, check_bases(bases, folder)))

    process = context.Process(target=make)
    process.start()
    there.close()
    made: tuple[list[Base], list[str]] = here.recv()
    process.join()
    return made


def main() -> int:
    parser = options(__doc__, 50_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slides", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases, faults = prepared(folder, chosen.slides)
        if faults:
            sys.exit("\n".join(faults))
        if chosen.only is not None:
            print(*run_case(chosen.only, chosen.seed, bases, folder))
            return 0
        ready = partial(set_up, chosen.seed, bases, folder)
        crew = [Worker(ready, SECONDS, number=number, start="fork") for number in range(chosen.workers)]
        return report("images", chosen, campaign(chosen, crew))


if __name__ == "__main__":
    sys.exit(main())
