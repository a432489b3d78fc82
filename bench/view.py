"""How soon `gigagrad view` shows a slide in Chromium, and how long a tile takes while somebody pans and zooms; prints
one JSON line last.

python bench/view.py [--height 16000 --width 64000] [--slide PATH] [--mask PATH] [--model RUN] [--flat]

Without --slide a synthetic JPEG slide is made, with --flat one without a pyramid. `first_picture_seconds` is from the
navigation until the middle of the slide is drawn; tiles are timed by the browser from when it asks for them, behind at
most five others, until the last byte is there; `layer_screen_seconds` are from a key until all tiles are there that it
asks for. The page must be built (make page).

With --clients 64 so many also ask for tiles anywhere, each for one after the other, for --seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from gigagrad.boxes import tiles
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.synthetic import make_slide
from tests.view.browser import Browser

_BUFFER = "performance.setResourceTimingBufferSize(100000)"
_DRAWN = """(() => {
  const canvas = document.querySelector('#stage canvas');
  if (!canvas || !canvas.width) return false;
  const pixel = canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data;
  return pixel[3] === 255 && performance.now();
})()"""
_TILES = """performance.getEntriesByType('resource')
  .filter((each) => /\\/slides\\/\\d+\\/%s\\/\\d+\\/\\d+\\/\\d+/.test(each.name))
  .map((each) => [each.duration, each.responseEnd - each.requestStart, each.encodedBodySize, each.startTime])"""
_LIVE = "[...document.querySelectorAll('.layer h2 label')].find((each) => each.textContent === 'Prediction now')"
_ZOOMS = (
    *("+", "+", "ArrowRight", "ArrowDown", "+", "ArrowRight", "+", "ArrowDown", "ArrowLeft", "+", "+"),
    "+",
    "ArrowUp",
)
_WALK = (*_ZOOMS, "+", "ArrowLeft", "+", "ArrowRight", "ArrowDown", "-")
_LIVE_WALK = (*7 * ("+", "ArrowRight", "ArrowDown", "+", "ArrowLeft", "ArrowUp"), *3 * ("-", "ArrowLeft"))
"""From far out, where nothing is predicted, to single pixels: every zoom, and two neighbours of it."""
_WIDTH = "Number(new URLSearchParams(location.hash.slice(1)).get('width'))"


def flat_copy(slide: Path, path: Path) -> Path:
    """Write level 0 of a slide alone."""
    with open_image(slide) as image:
        _, height, width = image.shape
        rows = (np.asarray(image.read(box)).transpose(1, 2, 0) for box in tiles(height, width, 512, width))
        shape = (height, width, 3)
        options: dict[str, Any] = {"tile": 256, "compression": "jpeg", "levels": 1, "mpp": image.mpp}
        return write_pyramid(path, rows, shape=shape, dtype=np.uint8, nearest=False, **options)


def percentiles(found: list[list[float]], column: int) -> dict[str, float]:
    values = [each[column] / 1000 for each in found] or [float("nan")]
    return {f"p{share}": round(float(np.percentile(values, share)), 4) for share in (50, 95)}


def measure(words: list[str], *, live: bool, clients: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "gigagrad", "view", *words, "--no-browser"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "http://" in line)
            started = time.perf_counter() - start
            found = re.search(r"http://\S+", line)
            assert found is not None
            with Browser() as browser:
                browser.open(found.group())
                first = browser.wait(_DRAWN, 300) / 1000
                browser.evaluate(_BUFFER)
                browser.wait("new URLSearchParams(location.hash.slice(1)).get('width')")
                if live:
                    browser.wait(f"{_LIVE} !== undefined", 300)
                    browser.evaluate(f"{_LIVE}.control.click()")
                pressed, widths = list[float](), list[float]()
                for key in (*_LIVE_WALK, "0") if live else 2 * (*_WALK, "0"):
                    pressed.append(browser.evaluate("performance.now()"))
                    browser.key(key)
                    time.sleep(1.5 if live else 0.5)
                    widths.append(browser.evaluate(_WIDTH))
                slide, over = browser.evaluate(_TILES % "0"), browser.evaluate(_TILES % "[1-9]")
                problems = browser.problems
            crowded = crowd(found.group(), clients, seconds) if clients else None
            return {
                "server_starts_seconds": round(started, 2),
                "first_picture_seconds": round(first, 3),
                "tiles": len(slide),
                "tile_seconds": percentiles(slide, 0),
                "tile_server_seconds": percentiles(slide, 1),
                "tile_bytes": round(float(np.mean([each[2] for each in slide])) if slide else 0),
                "layer_tiles": len(over),
                "layer_tile_seconds": percentiles(over, 0) if over else None,
                "layer_screens": len(screens(over, pressed)),
                "layer_screen_seconds": percentiles([*screens(over, pressed).values()], 0) if over else None,
                "widest_screen_px": max((widths[key - 1] for key in screens(over, pressed)), default=None),
                "crowd": crowded,
                "server_peak_rss_bytes": peak_resident_bytes(server.pid),
                "problems": problems,
            }
        finally:
            server.terminate()


def screens(tiles: list[list[float]], pressed: list[float]) -> dict[int, list[float]]:
    """Return the milliseconds from each key to the last byte of the last tile that it asked for, by the key's number
    from 1; keys that asked for none are left out."""
    ends = dict[int, float]()
    for duration, *_, start in tiles:
        if key := bisect_right(pressed, start):
            ends[key] = max(ends.get(key, 0), start + duration - pressed[key - 1])
    return {key: [end] for key, end in ends.items()}


def crowd(address: str, clients: int, seconds: float) -> dict[str, Any]:
    """Ask for tiles of the slide and its first layer, at random, by so many clients at a time."""
    _, _, host, token, _ = address.split("/")
    codes, times = Counter[str](), list[float]()
    asking = http.client.HTTPConnection(host)
    asking.request("GET", f"/{token}/slides/0")
    told = json.loads(asking.getresponse().read())
    end = time.monotonic() + seconds

    def client(seed: int) -> None:
        draw, connection = random.Random(seed), http.client.HTTPConnection(host, timeout=60)
        while time.monotonic() < end:
            layer = draw.randrange(1 + min(1, len(told["layers"])))
            levels = told["layers"][0]["levels"] if layer else told["levels"]
            level = draw.randrange(len(levels))
            row, column = (draw.randrange(-(-side // told["tile"])) for side in levels[level])
            start = time.monotonic()
            try:
                connection.request("GET", f"/{token}/slides/0/{layer}/{level}/{column}/{row}")
                answer = connection.getresponse()
                answer.read()
                codes[str(answer.status)] += 1
                times.append(time.monotonic() - start)
            except OSError as error:
                codes[type(error).__name__] += 1
                connection.close()

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
    return {"clients": clients, "answers": dict(codes), "seconds": percentiles([[1000 * each] for each in times], 0)}


def peak_resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--slide", type=Path, help="instead of one that is made")
    parser.add_argument("--mask", type=Path)
    parser.add_argument("--model", type=Path, help="also predict what is in view")
    parser.add_argument("--flat", action="store_true", help="a slide without a pyramid")
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        slide, mask = args.slide, args.mask
        if slide is None:
            slide, mask = Path(folder) / "slide.tif", Path(folder) / "mask.tif"
            make_slide(slide, height=args.height, width=args.width, seed=0, mask_path=mask)
        if args.flat:
            slide = flat_copy(slide, Path(folder) / "flat.tif")
        words = [
            str(slide),
            *(["--mask", str(mask)] if mask else []),
            *(["--model", str(args.model)] if args.model else []),
        ]
        with open_image(slide) as image:
            shape = image.shape
        result = measure(words, live=args.model is not None, clients=args.clients, seconds=args.seconds)
    print(json.dumps({"slide": slide.name, "height": shape[1], "width": shape[2], "flat": args.flat, **result}))


if __name__ == "__main__":
    main()
