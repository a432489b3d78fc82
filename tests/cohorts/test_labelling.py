"""Many slides, one mask each: what is refused before anything is written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image as Pillow

from gigagrad.cohorts.slides import label_slides
from gigagrad.errors import ConfigError, ImageError, WriteError
from gigagrad.events import Notice


def test_masks_that_cannot_be_meant_are_refused_at_once(jpeg_slide: Path, tmp_path: Path) -> None:
    masks, twin = tmp_path / "masks", tmp_path / "small.tiff"
    twin.write_bytes(jpeg_slide.read_bytes())
    before = jpeg_slide.read_bytes()
    with pytest.raises(ConfigError, match="rename one"):
        label_slides([jpeg_slide, twin], masks)
    with pytest.raises(ConfigError, match="replace the slide"):
        label_slides([jpeg_slide], jpeg_slide.parent, overwrite=True)
    with pytest.raises(ConfigError, match=r"nowhere\.svs does not exist"):
        label_slides([jpeg_slide, tmp_path / "nowhere.svs"], masks)
    with pytest.raises(ConfigError, match="no slides to label"):
        label_slides([], masks)
    assert not masks.exists()
    assert jpeg_slide.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named(jpeg_slide: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"cannot make the folder .*masks"):
        label_slides([jpeg_slide], tmp_path / "file" / "masks")


def test_a_slide_that_cannot_be_read_does_not_stop_the_others(jpeg_slide: Path, tmp_path: Path) -> None:
    broken = tmp_path / "aaa.svs"
    broken.write_bytes(b"II*\x00 no more")
    said: list[str] = []
    with pytest.raises(ImageError, match=r"aaa.*1 of 2 slides failed"):
        label_slides(
            [broken, jpeg_slide],
            tmp_path / "masks",
            listeners=[lambda event: said.append(event.text) if isinstance(event, Notice) else None],
        )
    assert (tmp_path / "masks" / f"{jpeg_slide.stem}.tif").exists()
    assert any("aaa" in text for text in said)


def test_a_mask_of_another_slide_of_this_name_is_not_taken_for_its_own(jpeg_slide: Path, tmp_path: Path) -> None:
    other = tmp_path / f"{jpeg_slide.stem}.png"
    Pillow.new("RGB", (300, 90)).save(other)
    label_slides([other], tmp_path / "masks")
    with pytest.raises(ImageError, match=r"is 90 x 300 px and the slide 700 x 900 px, so it is of another; choose"):
        label_slides([jpeg_slide], tmp_path / "masks")
    label_slides([jpeg_slide], tmp_path / "masks", overwrite=True)
    assert label_slides([jpeg_slide], tmp_path / "masks")


def test_a_share_that_was_killed_goes_on_and_the_masks_are_those_of_one_process(
    jpeg_slide: Path, tmp_path: Path
) -> None:
    slides = [tmp_path / f"{name}.tif" for name in "abcd"]
    for slide in slides:
        slide.write_bytes(jpeg_slide.read_bytes())
    alone = label_slides(slides, tmp_path / "alone")
    # Killed when its second mask is whole under its hidden name.
    program = (
        "import os, signal, sys; from gigagrad.cohorts.slides import label_slides\n"
        "def kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def step(event, counted=[]):\n"
        "    if getattr(event, 'done', 0) == 1: os.replace = kill\n"
        "label_slides(sys.argv[2:], sys.argv[1], share='1/2', listeners=[step])\n"
    )
    out = tmp_path / "apart"
    killed = subprocess.run([sys.executable, "-c", program, out, *slides], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["a.tif"]
    assert label_slides(slides, out, share="2/2") == (out / "b.tif", out / "c.tif")
    assert label_slides(slides, out, share="1/2") == (out / "a.tif", out / "d.tif")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {path.name: path.read_bytes() for path in alone}
