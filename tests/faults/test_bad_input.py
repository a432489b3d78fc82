"""What a user can get wrong: one clear line, exit code 2, no traceback, and nothing half-written.

Each row is something that only a whole command shows. What a message says about each variant of a mistake is tested
beside the function that finds it.
"""

import re
import resource
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import tifffile

from gigagrad.cli import main

pytestmark = pytest.mark.usefixtures("some_page")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def refused(capsys, out):
    """Run a command line that must fail, and return the one line it says. Nothing else may appear under `out`."""

    def run(*argv, leaves=()):
        before = sorted(out.rglob("*")) if out.exists() else []
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2
        _, err = capsys.readouterr()
        assert err.startswith("gigagrad: error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        left = [path for path in out.rglob("*") if path.is_file() and path not in before]
        assert sorted(path.name for path in left) == sorted(leaves)
        return err

    return run


def write_mask(path, values):
    tifffile.imwrite(path, values.astype(np.uint8), tile=(256, 256), photometric="minisblack", compression="deflate")
    return path


@pytest.fixture(scope="module")
def places(jpeg_slide, jpeg_label, run_dir, tmp_path_factory):
    """The files that command lines below name in braces, good ones and bad ones."""
    folder = tmp_path_factory.mktemp("places")
    corrupt = bytearray(jpeg_slide.read_bytes())
    with tifffile.TiffFile(jpeg_slide) as tiff:
        page = tiff.pages[0]
        middle = len(page.dataoffsets) // 2
        start, size = page.dataoffsets[middle], page.databytecounts[middle]
    corrupt[start : start + size] = bytes(255 - byte for byte in corrupt[start : start + size])
    (folder / "corrupt.tif").write_bytes(corrupt)
    (folder / "file").write_text("not a folder")
    (folder / "empty.csv").touch()
    narrow = write_mask(folder / "narrow.tif", np.zeros((700, 800)))
    three = write_mask(folder / "three.tif", np.arange(700)[:, None] // 250 + np.zeros((1, 900)))
    unscaled = folder / "unscaled.tif"
    tifffile.imwrite(unscaled, np.full((256, 256, 3), 200, np.uint8), tile=(128, 128), photometric="rgb", metadata=None)
    rows = {
        "good": ("mask", jpeg_slide, jpeg_label),
        "absent": ("mask", folder / "nowhere.svs", ""),
        "damaged": ("mask", folder / "corrupt.tif", jpeg_label),
        "mismatched": ("mask", jpeg_slide, narrow),
        "three": ("mask", jpeg_slide, three),
        "labelled": ("label", jpeg_slide, 2),
    }
    for name, (column, slide, truth) in rows.items():
        (folder / f"{name}.csv").write_text(f"slide,{column},split\n{slide},{truth},train\n")
    return {"at": folder, "slide": jpeg_slide, "run": run_dir}


@pytest.fixture
def words(places, out):
    """The words of a command line with its places filled in."""
    return lambda line: [word.format(**places, out=out) for word in line.split()]


RUN_FILES = ("config.yaml", "environment.json", "plan.json", "plan.txt", "checkpoint.pt", "metrics.jsonl")
FIT = "fit --epochs 1 --out {out} --slides {at}/"
PREDICT = "predict --run {run} --out {out} --slides "
EVALUATE = "evaluate --run {run} --split all --slides {at}/"


@pytest.mark.parametrize(
    ("line", "said", "leaves"),
    [
        ("label {at}/nowhere.svs --out {out}", r"there is no .*nowhere\.svs", ()),
        ("label {at}/corrupt.tif --out {out}", "the file is corrupt there", ()),
        ("label {slide} --out {at}/file/masks", "file", ()),
        ("plan --model paper-unt --size 320x320", "did you mean 'paper-unet'", ()),
        ("plan --model nosuchpackage:net --size 320x320", "cannot import", ()),
        (FIT + "nothing.csv", r"nothing\.csv", ()),
        (FIT + "absent.csv", r"line 2: .*nowhere\.svs does not exist", ()),
        # Truncation shows when a file is opened; what is wrong inside a tile shows when it is decoded.
        (FIT + "damaged.csv", "the file is corrupt there", RUN_FILES),
        (FIT + "three.csv", "a binary loss takes 0 and one other value", RUN_FILES),
        (FIT + "labelled.csv", "takes 0 or 1", ()),
        ("fit --config {at}/nothing.yaml --out {out}", r"nothing\.yaml", ()),
        ("fit --epochs 1 --slides {at}/good.csv --out {at}/file/run", "file", ()),
        ("predict --run {at}/norun --slides {slide} --out {out}", "norun", ()),
        (PREDICT + "{at}/nowhere.svs", r"nowhere\.svs", ()),
        (PREDICT + "{at}/corrupt.tif", "the file is corrupt there", ("corrupt.json", "predictions.json")),
        (PREDICT + "{at}/unscaled.tif --target-mpp 0.5", "--mpp", ("predictions.json", "unscaled.json")),
        (EVALUATE + "absent.csv", "line 2", ()),
        (EVALUATE + "empty.csv", r"empty\.csv", ()),
        (EVALUATE + "mismatched.csv", "700 x 800 px .* 700 x 900 px", ()),
        ("report --run {at}/norun --out {out}/report.html", "norun", ()),
        ("demo --quick --slides {at}/nowhere --out {out}", "there is no", ()),
        ("demo --quick --out {at}/file", "file", ()),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(refused, words, places, line, said, leaves):
    assert re.search(said, refused(*words(line), leaves=leaves))
    assert (places["at"] / "file").read_text() == "not a folder"


# What the line recommends works.


def test_mpp_where_the_slide_says_none(words, out):
    assert main(words(PREDICT + "{at}/unscaled.tif --target-mpp 0.5 --mpp 0.5")) == 0
    assert (out / "masks" / "unscaled.tif").exists()


@pytest.mark.parametrize(
    ("line", "leaves"),
    [
        ("plan --model paper-unet --size 16000x64000", ()),
        (PREDICT + "{slide}", ("predictions.json", "small.json")),
    ],
    ids=["plan", "predict"],
)
def test_a_budget_too_small_names_one_that_works(refused, words, line, leaves):
    command = [*words(line), "--memory"]
    said = refused(*command, "64MiB", leaves=leaves)
    assert "the budget is 64 MiB" in said
    smallest = re.search(r"smallest budget that works is ([\d.]+ [KMG]iB)", said)
    assert smallest, said
    assert main([*command, smallest.group(1)]) == 0


# A disk without room. A limit on the size of files fails at the same places, with EFBIG for ENOSPC.


@contextmanager
def room_for(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("line", "room", "said", "leaves"),
    [
        ("label {slide} --out {out}", 1000, r"small\.tif", ()),
        # The list of results is small enough to be written, and says what failed.
        (PREDICT + "{slide}", 1500, "small", ("predictions.json", "small.json")),
        (FIT + "good.csv", 5000, "cannot write", ()),
        ("report --run {run} --out {out}/report.html", 1000, r"report\.html", ()),
    ],
    ids=["label", "predict", "fit", "report"],
)
def test_disk_full(refused, words, line, room, said, leaves):
    with room_for(room):
        assert re.search(said, refused(*words(line), leaves=leaves))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a Linux device")
def test_standard_output_without_room():
    """In a process of its own, as it is the process's own output that fails."""
    with open("/dev/full", "w") as full:
        words = ["plan", "--model", "paper-unet", "--size", "320x320"]
        done = subprocess.run(
            [sys.executable, "-c", f"from gigagrad.cli import main; raise SystemExit(main({words}))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
