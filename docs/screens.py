"""Take the pictures of docs/view.md: `python docs/screens.py SLIDE LABEL RUN COHORT` writes them into docs/images.

RUN is a run of `gigagrad fit` whose network predicts what is in view. One of a U-Net on COHORT is begun for the tiles
at work, and stopped. It needs Chromium, and the built page (make page).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from tests.view.browser import Browser

IMAGES = Path(__file__).parent / "images"


@contextmanager
def page(*words: str, width: int, height: int, place: str = "") -> Iterator[Browser]:
    """Serve what the words name, and open it at a place."""
    command = [sys.executable, "-m", "gigagrad", "view", *words, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = next(match for line in server.stdout if (match := re.search(r"http://\S+", line)))
            with Browser(width, height) as browser:
                browser.open(found.group() + place)
                yield browser
        finally:
            server.terminate()


def save(browser: Browser, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "screen.png"
        browser.screenshot(path)
        Image.open(io.BytesIO(path.read_bytes())).convert("RGB").save(IMAGES / name, quality=88, optimize=True)


def prediction(slide: str, label: str, run: str) -> None:
    """Labels, and what a network predicts of the part in view."""
    place = "#slide=0&x=1110&y=1050&width=1500"
    with page(slide, "--mask", label, "--model", run, width=1240, height=720, place=place) as browser:
        name = "[...document.querySelectorAll('.layer h2 label')].find((each) => each.textContent === 'Prediction now')"
        browser.wait(f"{name} !== undefined", 300)
        browser.evaluate(f"{name}.control.click()")
        tiles = "performance.getEntriesByType('resource').filter((each) => /slides.0.2.\\d/.test(each.name)).length"
        browser.wait(f"{tiles} >= 4", 60)
        browser.wait("new Promise((done) => setTimeout(() => done(true), 2000))")
        save(browser, "view.jpg")


def at_work(cohort: str) -> None:
    """A run at work: the tiles of the segment, and the one that is computed now."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "first"
        words = ["--slides", cohort, "--out", str(run), "--memory", "1500MiB"]
        command = [sys.executable, "-m", "gigagrad", "fit", "--model", "smp:Unet?encoder_name=resnet18", *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            try:
                while not (run / "plan.json").exists():
                    if job.poll() is not None:
                        raise SystemExit("the run has ended")
                with page(str(run), width=1400, height=860) as browser:
                    browser.wait("document.querySelector('.now')?.textContent.includes('segment')", 300)
                    browser.evaluate("document.getElementById('grid').click()")
                    browser.wait("new Promise((done) => setTimeout(() => done(true), 3000))")
                    save(browser, "view-now.jpg")
            finally:
                job.kill()


if __name__ == "__main__":
    prediction(*sys.argv[1:4])
    at_work(sys.argv[4])
