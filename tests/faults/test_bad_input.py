"""What a user can get wrong: one clear line, exit code 2, no traceback, and nothing half-written."""

import re
import resource
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import tifffile
import torch

from gigagrad.cli import main
from gigagrad.images import open_image, write_label
from gigagrad.models import resolve, save_model


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def refused(capsys, out):
    """Run a command line that must fail, and return the one line it says. Nothing may appear under `out`."""

    def run(*argv, leaves=()):
        before = sorted(out.rglob("*")) if out.exists() else []
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2
        _, err = capsys.readouterr()
        assert err.startswith("gigagrad: error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        left = [path for path in out.rglob("*") if path.is_file() and path not in before]
        left = [path for path in left if path.parent.name != "tensorboard"]
        assert sorted(path.name for path in left) == sorted(leaves)
        return err

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "best.pt", "paper-unet", resolve("paper-unet"))
    return folder


@pytest.fixture(scope="module")
def label(jpeg_slide, tmp_path_factory):
    with open_image(jpeg_slide) as slide:
        return write_label(slide, tmp_path_factory.mktemp("labels") / "small.tif")


def damaged(jpeg_slide, folder, damage):
    path = folder / "damaged.tif"
    content = bytearray(jpeg_slide.read_bytes())
    with tifffile.TiffFile(jpeg_slide) as tiff:
        page = tiff.pages[0]
        middle = len(page.dataoffsets) // 2
        start, size = page.dataoffsets[middle], page.databytecounts[middle]
    if damage == "truncated":
        del content[start + size // 2 :]
    else:
        content[start : start + size] = bytes(255 - byte for byte in content[start : start + size])
    path.write_bytes(content)
    return path


def cohort(folder, *rows, header="slide,mask,split"):
    path = folder / "cohort.csv"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def write_mask(path, values):
    tifffile.imwrite(path, values.astype(np.uint8), tile=(256, 256), photometric="minisblack", compression="deflate")
    return path


def fit(table, out, *more):
    return ("fit", "--slides", table, "--out", out, "--epochs", 1, *more)


# A file that is not there.


def test_missing_slide(refused, run_dir, out, tmp_path):
    missing = tmp_path / "nowhere.svs"
    table = cohort(tmp_path, (missing, "", "train"))
    assert str(missing) in refused("label", missing, "--out", out)
    assert str(missing) in refused("predict", "--run", run_dir, "--slides", missing, "--out", out)
    assert re.search(r"line 2: .*nowhere\.svs does not exist", refused(*fit(table, out)))
    assert "line 2" in refused("evaluate", "--run", run_dir, "--slides", table, "--split", "all")


def test_missing_cohort_run_and_config(refused, jpeg_slide, out, tmp_path):
    assert "nothing.csv" in refused(*fit(tmp_path / "nothing.csv", out))
    assert "nothing.yaml" in refused("fit", "--config", tmp_path / "nothing.yaml", "--out", out)
    assert "norun" in refused("predict", "--run", tmp_path / "norun", "--slides", jpeg_slide, "--out", out)
    assert "norun" in refused("report", "--run", tmp_path / "norun", "--out", out / "report.html")


# A file that is broken.


@pytest.mark.parametrize("damage", ["truncated", "corrupt tile"])
def test_damaged_slide(refused, run_dir, jpeg_slide, label, out, tmp_path, damage):
    slide = damaged(jpeg_slide, tmp_path, damage)
    assert "damaged" in refused("label", slide, "--out", out)
    said = refused("predict", "--run", run_dir, "--slides", slide, "--out", out / "p", leaves=["predictions.json"])
    assert "damaged" in said
    table = cohort(tmp_path, (slide, label, "train"))
    # Truncation shows when the file is opened; what is wrong inside a tile shows when it is decoded.
    told = list(_fit_started) if damage == "corrupt tile" else ()
    assert "damaged" in refused(*fit(table, out / "run"), leaves=told)


_fit_started = ("config.yaml", "environment.json", "plan.json", "plan.txt", "checkpoint.pt", "metrics.jsonl")


def test_damaged_model_and_checkpoint(refused, jpeg_slide, label, run_dir, out, tmp_path):
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "best.pt").write_bytes((run_dir / "best.pt").read_bytes()[:1000])
    assert "best.pt" in refused("predict", "--run", broken, "--slides", jpeg_slide, "--out", out)
    table = cohort(tmp_path, (jpeg_slide, label, "train"))
    (broken / "checkpoint.pt").write_bytes(b"no checkpoint")
    assert "--overwrite" in refused(*fit(table, broken))


# A slide that does not say how large its pixels are, where that decides something.


def test_no_mpp_where_it_is_needed(refused, run_dir, out, tmp_path, capsys):
    slide = tmp_path / "unscaled.tif"
    tifffile.imwrite(slide, np.full((256, 256, 3), 200, np.uint8), tile=(128, 128), photometric="rgb", metadata=None)
    command = ("predict", "--run", run_dir, "--slides", slide, "--out", out, "--target-mpp", "0.5")
    assert "--mpp" in refused(*command, leaves=["predictions.json"])
    assert main([*map(str, command), "--mpp", "0.5"]) == 0
    assert (out / "masks" / "unscaled.tif").exists()


# A cohort that cannot be meant.


def test_mask_of_another_size(refused, jpeg_slide, run_dir, out, tmp_path):
    mask = write_mask(tmp_path / "mask.tif", np.zeros((700, 800)))
    table = cohort(tmp_path, (jpeg_slide, mask, "train"))
    for said in (refused(*fit(table, out)), refused("evaluate", "--run", run_dir, "--slides", table, "--split", "all")):
        assert "700 x 800" in said
        assert "700 x 900" in said


@pytest.mark.parametrize("text", ["", "slide,mask,split\n", "\n\n"])
def test_empty_cohort(refused, run_dir, out, tmp_path, text):
    table = tmp_path / "cohort.csv"
    table.write_text(text)
    assert "cohort.csv" in refused(*fit(table, out))
    assert "cohort.csv" in refused("predict", "--run", run_dir, "--slides", table, "--out", out)
    assert "cohort.csv" in refused("evaluate", "--run", run_dir, "--slides", table, "--split", "all")


def test_folder_without_slides(refused, run_dir, out, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no slides" in refused("predict", "--run", run_dir, "--slides", tmp_path / "empty", "--out", out)


# Targets that the loss cannot take.


def test_three_values_for_a_binary_loss(refused, jpeg_slide, out, tmp_path):
    mask = write_mask(tmp_path / "mask.tif", np.arange(700)[:, None] // 250 + np.zeros((1, 900)))
    table = cohort(tmp_path, (jpeg_slide, mask, "train"))
    assert "bce takes 0 and one other value" in refused(*fit(table, out), leaves=_fit_started)


def test_class_beyond_the_model(refused, jpeg_slide, out, tmp_path):
    mask = write_mask(tmp_path / "mask.tif", np.full((700, 900), 3))
    table = cohort(tmp_path, (jpeg_slide, mask, "train"))
    assert "class 3" in refused(*fit(table, out, "--loss", "ce"), leaves=_fit_started)


def test_label_beyond_the_loss(refused, jpeg_slide, out, tmp_path):
    table = cohort(tmp_path, (jpeg_slide, 2, "train"), header="slide,label,split")
    assert "takes 0 or 1" in refused(*fit(table, out))


# Names that nothing has.


def test_unknown_names(refused, jpeg_slide, label, out, tmp_path):
    table = cohort(tmp_path, (jpeg_slide, label, "train"))
    assert "did you mean 'paper-unet'" in refused("plan", "--model", "paper-unt", "--size", "320x320")
    assert "did you mean 'paper-unet'" in refused(*fit(table, out, "--model", "paper-unt"))
    assert "cannot import" in refused("plan", "--model", "nosuchpackage:net", "--size", "320x320")
    assert "unknown loss 'dise'" in refused(*fit(table, out, "--loss", "dise"))


# A budget nothing fits in.


def smallest(line):
    found = re.search(r"smallest budget that works is ([\d.]+ [KMG]iB)", line)
    assert found, line
    return found.group(1)


def test_budget_too_small_names_one_that_works(refused, jpeg_slide, label, out, tmp_path, capsys):
    plan = ("plan", "--model", "paper-unet", "--size", "16000x64000", "--memory")
    said = refused(*plan, "64MiB")
    assert "the budget is 64 MiB" in said
    assert main([*plan, smallest(said)]) == 0
    table = cohort(tmp_path, (jpeg_slide, label, "train"))
    assert "the budget is 64 MiB" in refused(*fit(table, out, "--memory", "64MiB"))


def test_budget_too_small_for_prediction(refused, jpeg_slide, run_dir, out):
    command = ("predict", "--run", run_dir, "--slides", jpeg_slide, "--out", out, "--memory")
    said = refused(*command, "64MiB", leaves=["predictions.json"])
    assert main([*map(str, command), smallest(said)]) == 0


# A disk without room. A limit on the size of files fails at the same places, with EFBIG for ENOSPC.


@contextmanager
def room_for(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_while_labelling(refused, jpeg_slide, out):
    with room_for(1000):
        assert "small.tif" in refused("label", jpeg_slide, "--out", out)


def test_disk_full_while_predicting(refused, jpeg_slide, run_dir, out):
    """The list of results is small enough to be written, and says what failed."""
    with room_for(1500):
        said = refused("predict", "--run", run_dir, "--slides", jpeg_slide, "--out", out, leaves=["predictions.json"])
    assert "small" in said


def test_disk_full_while_training(refused, jpeg_slide, label, out, tmp_path):
    table = cohort(tmp_path, (jpeg_slide, label, "train"))
    with room_for(5000):
        assert "cannot write" in refused(*fit(table, out))


def test_disk_full_while_reporting(refused, run_dir, out):
    out.mkdir()
    with room_for(1000):
        assert "report.html" in refused("report", "--run", run_dir, "--out", out / "report.html")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a Linux device")
def test_standard_output_without_room():
    """In a process of its own, as it is the process's own output that fails."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from gigagrad.cli import main; raise SystemExit(main(['doctor']))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_out_that_cannot_be_a_folder(refused, jpeg_slide, label, run_dir, out, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    table = cohort(tmp_path, (jpeg_slide, label, "train"))
    assert "file" in refused("label", jpeg_slide, "--out", blocked / "masks")
    assert "file" in refused("predict", "--run", run_dir, "--slides", jpeg_slide, "--out", blocked / "p")
    assert "file" in refused(*fit(table, blocked / "run"))
    assert "file" in refused("demo", "--quick", "--out", blocked)
    assert blocked.read_text() == "not a folder"


def test_demo_with_a_folder_of_no_slides(refused, out, tmp_path):
    assert "there is no" in refused("demo", "--quick", "--slides", tmp_path / "nowhere", "--out", out)
    (tmp_path / "empty").mkdir()
    assert "holds no slides" in refused("demo", "--quick", "--slides", tmp_path / "empty", "--out", out)
