"""The built page in a real browser, served by the real server: what a person sees and does."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tifffile
import uvicorn
from PIL import Image as Pillow

from gigagrad.at_work import WorkFile
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.events import JobStarted, SlideBegun, TileBegun, TilePlace
from gigagrad.view import page as built
from gigagrad.view.catalog import find
from gigagrad.view.live import Live
from gigagrad.view.page import read_page
from gigagrad.view.server import application, new_token
from gigagrad.view.slides import Opened, Slides
from tests.view.browser import AXE, PROGRAM, Browser
from tests.view.test_patches import tile

try:
    PAGE: dict[str, bytes] | None = read_page()
except ConfigError:
    PAGE = None
needs_page = pytest.mark.skipif(PAGE is None, reason="the page is not built; make page")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core; make page")


def test_without_a_built_page_one_line_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(built, "_NAMES", ("missing.html",))
    with pytest.raises(ConfigError, match=r"run 'make page', which needs Node\.js"):
        read_page()


@needs_page
def test_the_page_loads_nothing_from_elsewhere_and_is_light():
    assert PAGE is not None
    assert len(PAGE["page.js"]) < 600_000
    assert b"http" not in PAGE["index.html"]
    assert b"url(" not in PAGE["page.css"].replace(b"url(#", b"")
    for name in (b"OpenSeadragon", b"uPlot", b"Redistributions in binary form", b"MIT"):
        assert name in PAGE["licences.txt"]


@contextmanager
def serving(
    sources: Sequence[Path], masks: Sequence[Path], predictions: Path | None = None, networks: Sequence[Live] = ()
) -> Iterator[str]:
    """Give the address of a server in this process."""
    catalog = find(sources, masks, predictions)
    slides, token = Slides(catalog.items, networks), new_token()
    assert PAGE is not None
    app = application(catalog, slides, PAGE, token=token)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    server.should_exit = True
    thread.join(120)
    slides.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def served(predicted, jpeg_slide, jpeg_label, network_dir, run_dir) -> Iterator[str]:
    """Serve a slide with everything, a second one, and a run whose plan has tiles at half the size."""
    folder = run_dir
    (folder / "cohort.csv").write_text(f"slide\n{jpeg_slide}\n")
    (folder / "config.yaml").write_text(f"slides: {folder / 'cohort.csv'}\n")
    segment = {"tile": [70, 90], "shape": [350, 450], "crop": [80, 100], "read_shape": [350, 450]}
    (folder / "plan.json").write_text(json.dumps({"image_shape": [1, 3, 700, 900], "segments": [segment]}))
    (folder / "metrics.jsonl").write_text(
        '{"event": "metrics", "split": "train", "epoch": 0, "step": 1, "values": {"loss": 0.5}}\n'
    )
    other = folder / "other.tif"
    tifffile.imwrite(other, tifffile.imread(predicted / "masks" / "small.tif"), tile=(256, 256))
    with serving([predicted, other, folder], [jpeg_label.parent], networks=[Live(network_dir)]) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def browser(chromium, served) -> Iterator[Browser]:
    """Open the page anew, so that any process may run any of its tests: what another test left is gone."""
    chromium.open(served)
    chromium.wait("document.querySelector('#layers h1')?.textContent === 'small'")
    chromium.wait("document.querySelectorAll('.layer').length === 7")  # those of the network come last
    yield chromium
    assert not chromium.problems


DRAWN = """(() => {
  const canvas = document.querySelector('#stage canvas'), context = canvas.getContext('2d');
  return [...context.getImageData(%s, %s, 1, 1).data];
})()"""


def drawn_at(browser, x, y):
    """The colour on the screen, of pixels relative to the slide's canvas."""
    return browser.evaluate(DRAWN % (x, y))


@pytest.mark.slow
@needs_page
@needs_browser
def test_a_view_that_takes_long_is_predicted_when_it_is_asked_for(network_dir, jpeg_slide, monkeypatch):
    told = Opened.describe_live

    def slow(self):
        found = told(self)
        return {**found, "plans": [{**plan, "seconds": 20.0} for plan in found["plans"]]}

    monkeypatch.setattr(Opened, "describe_live", slow)
    with serving([jpeg_slide], [], networks=[Live(network_dir)]) as address, Browser() as opened:
        opened.open(address)
        opened.wait("document.querySelectorAll('.layer').length >= 2")
        opened.evaluate("document.getElementById('layer-0').click()")
        opened.wait("document.querySelector('.layer:not(.off) .far p').textContent.includes('about 20 s')")
        assert opened.evaluate("getComputedStyle(document.querySelector('.far')).display") == "block"
        assert not [each for each in opened.answers if "/slides/0/1/" in each["url"]]
        opened.evaluate("document.querySelector('.layer:not(.off) .far button').click()")
        opened.wait("getComputedStyle(document.querySelector('.far')).display === 'none'")
        opened.wait("performance.getEntriesByType('resource').some((each) => each.name.includes('/slides/0/1/'))")
        assert not opened.problems


_NAMELESS = """[...document.querySelectorAll('button, input, select, [role]')].filter((each) =>
  !each.getAttribute('aria-label') && !each.textContent.trim() && !(each.labels && each.labels.length)
  && each.getAttribute('role') !== 'status').map((each) => each.outerHTML.slice(0, 200))"""


@pytest.mark.slow
@needs_page
@needs_browser
class TestPage:
    def test_a_slide_is_drawn_with_its_layers_and_told(self, browser):
        browser.wait(f"{DRAWN % (460, 400)}[3] === 255")
        names = browser.evaluate("[...document.querySelectorAll('.layer h2 label')].map((each) => each.textContent)")
        assert names == [
            *("Label", "Prediction", "Probabilities", "Errors"),
            *("Prediction now", "Probabilities now", "Tiles of the plan"),
        ]
        browser.move(230 + 460, 400)
        told = browser.wait("document.getElementById('values').textContent")
        assert told.startswith("red ")
        assert "Label: " in told
        assert " px · " in browser.evaluate("document.getElementById('place').textContent")
        assert browser.evaluate("document.querySelector('#scale span').textContent").endswith("µm")

    def test_keys_move_zoom_and_hide(self, browser):
        width = "Number(new URLSearchParams(location.hash.slice(1)).get('width'))"
        before = browser.wait(width)
        browser.key("+")
        browser.wait(f"{width} < {before} * 0.8")
        left = browser.wait("Number(new URLSearchParams(location.hash.slice(1)).get('x'))")
        browser.key("ArrowRight")
        browser.wait(f"Number(new URLSearchParams(location.hash.slice(1)).get('x')) > {left} + 10")
        browser.key("0")
        browser.wait(f"Math.abs({width} / {before} - 1) < 0.05")
        shown = "document.getElementById('layer-1').checked"
        assert browser.evaluate(shown)
        browser.key("2")
        assert not browser.evaluate(shown)
        browser.key("h", ("keyDown",))
        assert not browser.evaluate("[...document.querySelectorAll('.layer h2 input')].some((each) => each.checked)")
        browser.key("h", ("keyUp",))
        browser.key("2")
        assert browser.evaluate(shown)
        browser.key("e")
        assert browser.evaluate("document.getElementById('layer-3').checked")
        assert not browser.evaluate(shown), "the prediction makes room for its errors"
        browser.key("e")
        browser.key("?")
        assert browser.evaluate("document.getElementById('help').open")
        assert browser.evaluate("document.activeElement.textContent") == "Close"
        browser.key("Escape")
        browser.wait("!document.getElementById('help').open")

    def test_the_network_predicts_what_is_in_view(self, browser):
        browser.evaluate("performance.clearResourceTimings()")
        browser.key("6")
        entries = "performance.getEntriesByType('resource')"
        asked = f"{entries}.filter((each) => /\\/6\\/\\d+\\/\\d+\\/\\d+/.test(each.name)).length"
        browser.wait(asked)
        browser.key("6")

    def test_the_tiles_of_the_plan_are_drawn_over_the_slide(self, browser):
        lines = "document.getElementById('grid-lines')"
        assert browser.evaluate(f"{lines}.hidden")
        browser.key("t")
        browser.wait(f"!{lines}.hidden")
        inked = f"{lines}.getContext('2d').getImageData(0, 0, {lines}.width, {lines}.height).data.some((each) => each)"
        assert browser.evaluate(inked)
        told = browser.evaluate("document.getElementById('tiles').textContent")
        assert [int(found) for found in re.findall(r"\d+", told.partition("/")[2].partition(": ")[2])] == [
            *(140, 180, 160, 200),
        ]
        browser.key("t")
        browser.wait(f"{lines}.hidden")

    def test_slides_and_runs_are_chosen_from_the_list(self, browser):
        browser.key("n")
        browser.wait("document.querySelector('#layers h1').textContent === 'other'")
        assert browser.evaluate("document.querySelectorAll('[aria-current]').length") == 1
        browser.evaluate("document.querySelector('button.run').click()")
        browser.wait("document.querySelector('#curves .uplot canvas') !== null")
        assert "1 slides seen" in browser.wait("document.getElementById('curves-state').textContent")
        browser.evaluate("document.querySelector('button.slide').click()")
        browser.wait(
            "document.getElementById('curves').hidden && document.querySelector('#layers h1').textContent === 'small'"
        )

    def test_every_control_has_a_name_and_is_reached_by_tab(self, browser):
        browser.wait("document.querySelectorAll('.layer').length === 7")  # the panel is made anew for the last ones
        assert browser.evaluate(_NAMELESS) == []
        browser.evaluate("document.body.tabIndex = -1, document.body.focus()")  # from the beginning
        order = []
        for _ in range(12):
            browser.key("Tab")
            order.append(browser.evaluate("document.activeElement.closest('nav, main, aside')?.id ?? ''"))
        assert [each for each, before in zip(order, ["", *order], strict=False) if each != before] == [
            "list",
            "main",
            "layers",
        ]

    def test_the_focus_is_seen_on_the_slide_and_arrows_scroll_what_is_no_slide(self, browser, tmp_path):
        browser.evaluate("document.getElementById('layers').querySelector('input').focus()")
        for _ in range(20):
            browser.ask("Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9, modifiers=8)
            if browser.evaluate("document.activeElement.closest('#stage') !== null"):
                break
        browser.screenshot(tmp_path / "screen.png")
        with Pillow.open(tmp_path / "screen.png") as screen:
            left, top = browser.evaluate("[stage.getBoundingClientRect().x, stage.clientHeight / 2]")
            assert screen.convert("RGB").getpixel((left + 1, top)) == (0, 89, 168)
        browser.evaluate("document.querySelector('button.run').click()")
        browser.wait("document.querySelector('#curves .uplot canvas') !== null")
        browser.ask("Emulation.setDeviceMetricsOverride", width=1400, height=200, deviceScaleFactor=1, mobile=False)
        browser.evaluate("document.getElementById('curves').focus()")
        browser.key("ArrowDown")
        browser.wait("document.getElementById('curves').scrollTop > 0")
        browser.ask("Emulation.setDeviceMetricsOverride", width=1400, height=860, deviceScaleFactor=1, mobile=False)
        browser.evaluate("document.querySelector('button.slide').click()")
        browser.wait("document.getElementById('curves').hidden")
        browser.wait("document.querySelectorAll('.layer').length === 7")

    @needs_axe
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_slide_its_keys_and_the_curves_keep_the_rules_of_accessibility(self, browser, scheme):
        assert browser.faults(scheme) == []
        browser.key("?")
        assert browser.faults(scheme) == []
        browser.key("Escape")
        browser.evaluate("document.querySelector('button.run').click()")
        browser.wait("document.querySelector('#curves .uplot canvas') !== null")
        assert browser.faults(scheme) == []
        browser.evaluate("document.querySelector('button.slide').click()")
        browser.wait("document.getElementById('curves').hidden && !document.getElementById('layers').hidden")
        browser.wait("document.querySelectorAll('.layer').length === 7")

    def test_the_tile_that_a_run_computes_is_marked_while_it_does(self, browser, run_dir, jpeg_slide):
        lines, work = "document.getElementById('grid-lines')", "document.getElementById('work')"
        browser.evaluate("document.querySelector('button.slide').click()")
        browser.wait("document.querySelector('#layers h1')?.textContent === 'small'")
        assert browser.evaluate(f"{work}.hidden && {lines}.hidden")
        with WorkFile(run_dir) as told:
            told(JobStarted("train", 12, "a model"))
            told(SlideBegun(jpeg_slide, (700, 900), (700, 900), 4))
            told(TileBegun("backward", 1, 3, 4, 9, lambda: TilePlace(Box(0, 0, 70, 90), Box(0, 0, 80, 95), (70, 90))))
            said = browser.wait(f"!{work}.hidden && {work}.querySelector('.now').innerText")
            assert said.split("\n") == [
                "train: 0 of 12 slides done (a model)",
                "small.tif",
                "backward, segment 2 of 3",
                "tile 5 of the step's 9",
            ]
            browser.wait(f"!{lines}.hidden")
            assert browser.evaluate("document.querySelector('button.run small').textContent") == "train: small.tif"
            assert browser.evaluate("document.querySelector('button.slide .at-work').textContent") == "computed now"
            assert browser.evaluate(_NAMELESS) == []
            browser.key("w")
            place = "['x', 'y'].map((name) => Number(new URLSearchParams(location.hash.slice(1)).get(name)))"
            browser.wait(f"{place}[0] > 700 && {place}[1] < 200")  # mirrored: its first tile is at the right
            shown = f"{lines}.getContext('2d').getImageData({lines}.width / 2, {lines}.height / 2, 1, 1).data.join()"
            assert browser.evaluate(shown).split(",")[3] != "0"
        browser.wait(f"{work}.hidden && {lines}.hidden")
        browser.key("0")

    def test_nothing_of_it_came_from_elsewhere(self, browser, served):
        assert browser.answers
        assert all(answer["url"].startswith(served) for answer in browser.answers)
        assert all(answer["status"] == 200 for answer in browser.answers)

    def test_a_file_that_cannot_be_read_says_so_in_the_list_and_keys_are_read_from_their_top(self, tmp_path):
        tifffile.imwrite(tmp_path / "a.tif", np.full((300, 300, 3), 200, np.uint8), tile=(256, 256))
        (tmp_path / "b.tif").touch()
        with serving([tmp_path], []) as address, Browser(390, 500) as page:
            page.open(address)
            page.wait("document.querySelector('#list .no-picture')?.textContent === 'cannot be read'")
            assert page.evaluate("document.querySelectorAll('#list img').length") == 1
            page.key("?")
            assert page.wait("document.querySelector('dialog[open]')?.scrollHeight") > 500
            assert page.evaluate("document.querySelector('dialog[open]').scrollTop") == 0

    def test_all_of_a_tall_slide_is_seen_in_a_narrow_window(self, tmp_path):
        tifffile.imwrite(tmp_path / "tall.tif", np.full((3000, 900, 3), 200, np.uint8), tile=(256, 256))
        with serving([tmp_path], []) as address, Browser(700, 900) as narrow:
            narrow.open(address)
            width = narrow.wait("Number(new URLSearchParams(location.hash.slice(1)).get('width'))")
            shape = narrow.evaluate("[stage.clientHeight, stage.clientWidth]")
            assert width * shape[0] / shape[1] >= 2999
            assert not narrow.problems

    def test_classes_are_filled_outlined_and_hidden_and_probabilities_drawn_by_their_size(self, tmp_path):
        ids = np.zeros((400, 600), np.uint8)
        ids[100:300, 100:300], ids[100:300, 300:500], ids[190:200, 400:410] = 1, 2, 255
        shares = np.zeros((400, 600), np.uint8)
        shares[:] = np.clip(2 * (np.arange(600) - 172), 0, 255)
        slide, mask, folder = tmp_path / "slide.tif", tmp_path / "slide_mask.tif", tmp_path / "probabilities"
        folder.mkdir()
        tifffile.imwrite(slide, np.full((400, 600, 3), 255, np.uint8), tile=(256, 256))
        tifffile.imwrite(mask, ids, tile=(256, 256))
        tifffile.imwrite(folder / "slide.tif", shares, tile=(256, 256))
        with serving([slide], [mask], folder / "slide.tif") as address, Browser() as page:

            def colour(x: int, y: int) -> list[int]:
                """Return what is drawn of a pixel of the slide, which is four of the screen wide."""
                place = f"stage.clientWidth / 2 + {4 * (x - 300) + 2}, stage.clientHeight / 2 + {4 * (y - 200) + 2}"
                script = f"((x, y) => {DRAWN % ('x', 'y')})({place})"
                found: list[int] = page.evaluate(script)[:3]
                return found

            def until(place: tuple[int, int], wanted: list[int]) -> None:
                end = time.monotonic() + 60
                while colour(*place) != wanted:
                    assert time.monotonic() < end, (place, colour(*place), page.problems)

            page.open(address)
            page.wait("document.querySelectorAll('.layer').length === 2")
            page.open(f"{address}#slide=0&x=300&y=200&width={page.evaluate('stage.clientWidth / 4')}")
            page.wait(
                "document.querySelectorAll('.layer').length === 2 && document.querySelector('#stage canvas') !== null"
            )
            white, dark = [255] * 3, [20, 20, 24]
            told = page.evaluate("fetch('slides/0').then((each) => each.json())")["layers"][0]["classes"]
            one, two = ([*each["color"]] for each in told)
            until((250, 101), one)
            until((301, 200), two)
            assert colour(300, 200) == two
            assert colour(297, 200) == one
            assert colour(296, 200) == dark
            assert colour(295, 200) == colour(304, 200) == colour(250, 99) == colour(405, 195) == white
            page.key("o")
            until((290, 200), one)
            assert colour(300, 200) == colour(399, 195) == two
            assert colour(405, 195) == white, "ignored"
            asked = [-1, 0]
            while asked[-1] != asked[-2]:  # other colours need no other pixels
                page.evaluate("document.querySelectorAll('.legend input')[1].click()")
                until((350, 200), white if len(asked) % 2 == 0 else two)
                until((290, 200), one)
                tiles = "performance.getEntriesByType('resource').filter((each) => each.name.includes('/slides/0/1/'))"
                asked.append(page.evaluate(f"{tiles}.length"))
                assert len(asked) < 9, asked
            page.key("1")
            page.evaluate("document.getElementById('opacity-1').value = 100")
            page.evaluate("document.getElementById('opacity-1').dispatchEvent(new Event('input'))")
            page.key("2")
            until((350, 200), [253, 231, 37])
            until((172, 200), white)
            until((236, 200), [33, 144, 141])  # of one half
            assert white > colour(177, 200) > colour(190, 200), "the smaller the fainter"
            assert not page.problems

    def test_stains_that_are_drawn_and_those_that_are_not_are_told(self, tmp_path):
        names, pixels = ["DAPI", "CD3", "CD8", "AF"], np.arange(4 * 64 * 64, dtype=np.uint16).reshape(4, 64, 64)
        for count in (4, 2, 1):
            options = {"metadata": {"axes": "CYX", "Channel": {"Name": names[:count]}}, "tile": (64, 64)}
            path = tmp_path / f"{count}.ome.tif"
            tifffile.imwrite(path, pixels[:count], ome=True, photometric="minisblack", **options)
        told = {
            "1": [],
            "2": ["Drawn: DAPI. Not drawn: CD3."],
            "4": ["Drawn: DAPI in red, CD3 in green, CD8 in blue. Not drawn: AF."],
        }
        with serving([tmp_path], []) as address, Browser() as page:
            for number, (name, lines) in enumerate(told.items()):
                page.open(f"{address}#slide={number}")
                page.wait(f"document.querySelector('#layers h1')?.textContent === '{name}'")
                about = "[...document.querySelectorAll('#layers .about')].slice(1).map((each) => each.textContent)"
                assert page.evaluate(about) == lines
            assert not page.problems

    def test_the_pixels_of_a_coarse_layer_do_not_melt_into_each_other(self, tmp_path):
        slide, shares = tmp_path / "slide.tif", np.tile(np.array([255, 128], np.uint8), (20, 15))
        (tmp_path / "probabilities").mkdir()
        tifffile.imwrite(slide, np.full((400, 600, 3), 255, np.uint8), tile=(256, 256))
        tifffile.imwrite(tmp_path / "probabilities" / "slide.tif", shares, tile=(16, 16))
        with serving([slide], [], tmp_path / "probabilities" / "slide.tif") as address, Browser() as page:
            page.open(address)
            page.wait("document.querySelectorAll('.layer').length === 1")
            page.key("1")

            def colour(right_of_middle: int) -> list[int]:
                place = f"stage.clientWidth / 2 + {right_of_middle}, stage.clientHeight / 2"
                found: list[int] = page.evaluate((DRAWN % ("X", "Y")).replace("X, Y", place))
                return found

            page.wait("document.querySelector('#stage canvas') !== null")
            end = time.monotonic() + 60
            while len({(255,) * 4, tuple(colour(-20)), tuple(colour(20))}) < 3:
                assert time.monotonic() < end
            one, near, beyond, other = (colour(at) for at in (-20, -2, 2, 20))
            assert one == near != other == beyond
            box = "document.getElementById('layer-0')"
            page.evaluate(f"{box}.click(), {box}.click(), {box}.click()")  # faster than its tiles come
            page.wait("new Promise((done) => setTimeout(() => done(true), 300))")
            assert colour(-20) == colour(20) == [255] * 4, "it is hidden"

    def test_a_gigapixel_slide_is_drawn_whole_and_pixel_by_pixel(self, tmp_path):
        """Of 16000 x 64000 px and its levels; blocks are left out of the file, but one in the middle of level 0."""
        path, (height, width), levels = tmp_path / "large.tif", (16000, 64000), 7
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            for level in range(levels):
                shape = (height >> level, width >> level, 3)
                blocks = [b""] * (-(-shape[0] // 256) * -(-shape[1] // 256))
                if not level:
                    blocks[31 * 250 + 125] = bytes((10, 200, 90)) * 256**2
                options = {"photometric": "rgb", "tile": (256, 256), "dtype": np.uint8, "shape": shape}
                file.write(iter(blocks), subfiletype=int(level > 0), subifds=0 if level else levels - 1, **options)
        with serving([path], []) as address, Browser() as large:
            large.open(f"{address}#slide=0&x=32128&y=8064&width=1000")
            centre = "stage.clientWidth >> 1, stage.clientHeight >> 1"
            large.wait("document.querySelector('#stage canvas') !== null")
            large.wait(f"{(DRAWN % ('X', 'Y')).replace('X, Y', centre)}.join() === '10,200,90,255'")
            large.screenshot(tmp_path / "screen.png")
            with Pillow.open(tmp_path / "screen.png") as screen:
                x, y = large.evaluate(f"[{centre}]")
                left = large.evaluate("stage.getBoundingClientRect().x")
                assert screen.convert("RGB").getpixel((left + x, y)) == (10, 200, 90)
            large.key("0")
            large.wait("Number(new URLSearchParams(location.hash.slice(1)).get('width')) >= 64000")
            large.wait(f"{(DRAWN % ('X', 'Y')).replace('X, Y', centre)}[3] === 255")
            assert not large.problems

    def test_a_page_of_another_origin_can_read_nothing(self, served):
        """Another local site, which even knows the address."""
        attack = f"""<!doctype html><title>attack</title><script>
          const told = [];
          const image = new Image();
          image.onload = () => told.push("image");
          image.onerror = () => told.push("refused");
          image.src = "{served}slides/0/0/0/0/0";
          fetch("{served}catalog").then(() => told.push("read"), () => told.push("refused"));
        </script><iframe src="{served}"></iframe>"""
        page = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            while True:
                try:
                    connection, _ = page.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    body = attack.encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + body)

        threading.Thread(target=answer, daemon=True).start()
        with Browser() as other:
            other.open(f"http://localhost:{page.getsockname()[1]}/")
            assert other.wait("typeof told !== 'undefined' && told.length === 2 && told") == ["refused", "refused"]
            end, refused = time.monotonic() + 120, list[int]()
            while not refused and time.monotonic() < end:
                other.evaluate("0")  # events come along with answers
                refused = [answer["status"] for answer in other.answers if answer["url"].startswith(served)]
            assert {*refused} == {403}
        page.close()


@pytest.fixture(scope="module")
def served_two(predicted, jpeg_label, tmp_path_factory) -> Iterator[str]:
    """Serve two predictions of one slide, of which the second finds everything, by a model of bags."""
    other = tmp_path_factory.mktemp("two") / "other"
    shutil.copytree(predicted, other)
    mask = other / "masks" / "small.tif"
    tifffile.imwrite(mask, np.ones_like(tifffile.imread(mask)), tile=(256, 256))
    (other / "predictions.json").unlink()
    record = json.loads((other / "records" / "small.json").read_text())
    record["made_with"]["model_sha256"], record["files"]["attention"] = "0", "attention/small"
    (other / "records" / "small.json").write_text(json.dumps(record))
    (other / "attention" / "small").mkdir(parents=True)
    tiles = [tile(32 * number, 320, number / 100) for number in range(28)]
    (other / "attention" / "small" / "small.geojson").write_text(json.dumps({"features": tiles}))
    tifffile.imwrite(other / "attention" / "small" / "small.tif", np.ones((22, 29), np.float32), tile=(16, 16))
    with serving([predicted, other], [jpeg_label.parent]) as address:
        yield address


@pytest.fixture
def two(chromium, served_two) -> Iterator[Browser]:
    chromium.open(served_two)
    chromium.wait("document.querySelectorAll('.patches img').length === 24")
    yield chromium
    assert not chromium.problems


def _hide(two: Browser) -> None:
    """Hide the label and both predictions, which leaves the slide on either side."""
    for key in ("1", "2", "5"):
        two.key(key)
    two.wait(_SAME)


_SAME = """(() => {
  const [one, two] = ['#stage canvas', '#stage-2 canvas'].map((each) => {
    const canvas = document.querySelector(each);
    return canvas.getContext('2d').getImageData(0, 250, canvas.width, 400).data;
  });
  return one.length === two.length && one.some((each) => each !== one[0]) && one.every((each, at) => each === two[at]);
})()"""
_LAYER = "[...document.querySelectorAll('section.layer')].find((each) => each.ariaLabel.startsWith('%s'))"
_SPOT = "document.querySelector('#stage-2 canvas').getContext('2d').getImageData(200, 300, 60, 60).data.join()"


@pytest.mark.slow
@needs_page
@needs_browser
class TestTwo:
    def test_predictions_are_side_by_side_each_with_its_name(self, two):
        names = two.evaluate("[...document.querySelectorAll('.source select')].map((each) => each.value)")
        assert names[1] == "other"
        assert names[0] != names[1]
        told = "[...document.querySelectorAll('.pane [role=application]')].map((each) => each.ariaLabel)"
        for label, side, name in zip(two.evaluate(told), ("left", "right"), names, strict=True):
            assert label.startswith(f"Slide {side} with predictions of {name}: arrow keys")
        two.wait(f"!{_SAME}")
        _hide(two)
        two.key("2")
        two.key("5")
        two.wait(f"!{_SAME}")

    def test_both_move_in_step_whichever_is_touched(self, two):
        _hide(two)
        width = "Number(new URLSearchParams(location.hash.slice(1)).get('width'))"
        before, seen = two.wait(width), two.evaluate(_SPOT)
        two.key("+")
        two.key("ArrowRight")
        two.wait(f"{width} < {before} * 0.8")
        two.wait(_SAME)
        assert two.evaluate(_SPOT) != seen
        seen = two.evaluate(_SPOT)
        rect = "document.getElementById('stage-2').getBoundingClientRect()"
        box = [two.evaluate(f"{rect}.x + {rect}.width / 2"), two.evaluate(f"{rect}.y + {rect}.height / 2")]
        before = two.evaluate(width)
        two.ask("Input.dispatchMouseEvent", type="mouseWheel", x=box[0] + 60, y=box[1], deltaX=0, deltaY=-240)
        two.wait(f"{width} < {before} * 0.9")
        two.wait(_SAME)
        assert two.evaluate(_SPOT) != seen
        two.move(*box)
        assert two.evaluate("document.querySelector('#pane .cross').checkVisibility()")
        assert not two.evaluate("document.querySelector('#pane-2 .cross').checkVisibility()")
        two.key("0")

    def test_both_stay_in_step_where_the_window_changes(self, two):
        two.key("h", ("keyDown",))  # hides what differs
        for width in (1100, 1400):
            two.ask("Emulation.setDeviceMetricsOverride", width=width, height=860, deviceScaleFactor=1, mobile=False)
            two.wait(f"innerWidth === {width}")
            two.wait(_SAME, seconds=60)
        two.key("h", ("keyUp",))
        two.key("0")

    def test_one_of_them_may_be_looked_at_alone(self, two):
        two.key("c")
        assert not two.evaluate("document.getElementById('pane-2').checkVisibility()")
        shown = "[...document.querySelectorAll('.layer h2 label')].filter((each) => each.checkVisibility()).length"
        assert two.evaluate(shown) == 6
        two.key("c")
        two.wait("document.getElementById('pane-2').checkVisibility()")
        assert two.evaluate(shown) == 10
        _hide(two)

    @needs_axe
    def test_two_predictions_and_patches_keep_the_rules_of_accessibility(self, two):
        assert two.faults() == two.faults("dark") == []

    def test_the_list_of_patches_leads_to_each(self, two):
        names = two.evaluate("[...document.querySelectorAll('.patches button')].map((each) => each.ariaLabel)")
        assert names[0] == "Go to the patch at 864, 320 px: attention 0.270, more than 13 % of the patches"
        assert names[12].startswith("Go to the patch at 0, 320 px: attention 0.00")
        lines = "document.getElementById('grid-lines')"
        assert two.evaluate(f"{lines}.hidden")
        two.evaluate("document.querySelectorAll('.patches button')[20].click()")
        two.wait("Math.abs(Number(new URLSearchParams(location.hash.slice(1)).get('width')) / (6 * 32) - 1) < 0.2")
        place = "['x', 'y'].map((name) => Math.round(new URLSearchParams(location.hash.slice(1)).get(name)))"
        assert two.evaluate(place) == [8 * 32 + 16, 336]
        assert not two.evaluate(f"{lines}.hidden")
        assert two.evaluate("document.querySelectorAll('.patches [aria-current]').length") == 1

    def test_a_click_on_the_map_opens_the_patch_there(self, two):
        detail = "document.querySelector('.chosen')"
        two.wait("document.querySelectorAll('.patches img').length === 24")
        whole = "Number(new URLSearchParams(location.hash.slice(1)).get('width')) >= 899"
        two.key("0")
        two.wait(whole)
        two.evaluate(f"{_LAYER % 'Attention'}.querySelector('input').click()")
        rect = "document.getElementById('stage').getBoundingClientRect()"
        x, y = (
            two.evaluate(f"{rect}.{side} + {rect}.{length} / 2") for side, length in (("x", "width"), ("y", "height"))
        )
        two.click(x, y)
        two.wait(f"{detail}.querySelector('p')?.innerText.includes('rank 14 ')")
        said = two.evaluate(f"{detail}.querySelector('p').innerText").split("\n")
        assert said == ["x 448, y 320 px", "attention 0.140", "rank 14 of 28", "more than 7 % of the patches"]
        assert two.wait(f"{detail}.querySelector('img').naturalWidth") >= 32
        two.evaluate(f"{detail}.querySelector('button').focus()")
        two.key(" ")
        two.wait(f"{detail}.querySelector('p')?.innerText.includes('rank 13 of 28')")
        assert two.evaluate("document.activeElement.textContent") == "Higher", "the focus stays"
        two.wait("Number(new URLSearchParams(location.hash.slice(1)).get('width')) < 400")  # it has gone there
        two.key("0")
        two.wait(whole)
        two.key("i")
        two.wait(f"{detail}.querySelector('p')?.innerText.includes('rank 14 of 28')")
        two.evaluate(f"{_LAYER % 'Attention'}.querySelector('input').click()")
        two.click(x, y - 150)
        assert "rank 14 of 28" in two.evaluate(f"{detail}.innerText"), (
            "a click on a slide without its map is none on it"
        )

    def test_where_two_predictions_differ_is_shown_and_counted(self, two):
        two.key("d")
        difference = _LAYER % "Difference"
        count = f"{difference}.querySelector('.count').textContent"
        said = two.wait(f"{count}.startsWith('They differ in') && {count}")
        assert " of all pixels, " in said
        named = two.evaluate(f"[...{difference}.querySelectorAll('.legend label')].map((each) => each.textContent)")
        names = two.evaluate("[...document.querySelectorAll('.source select')].map((each) => each.value)")
        assert named == ["the same class", f"only in {names[1]}", f"only in {names[0]}", "another class"]
        shown = "[...document.querySelectorAll('.layer h2 input')].map((each) => Number(each.checked)).join('')"
        before = two.evaluate(shown)
        two.key("d")
        assert two.evaluate(shown) != before, "the predictions come back"
        choose = """(number) => {
          const select = document.getElementById('source-1');
          select.value = select.options[number].value;
          select.dispatchEvent(new Event('change'));
        }"""
        two.evaluate("document.getElementById('layer-0').focus()")
        two.evaluate(f"({choose})(0)")
        assert two.evaluate(f"{difference}.hidden"), "it is of the two that are chosen"
        assert two.evaluate("document.activeElement.id") == "layer-0", "the focus stays while the panel is made anew"
        two.evaluate(f"({choose})(1)")
        assert not two.evaluate(f"{difference}.hidden")

    def test_every_control_has_a_name_and_is_reached_by_tab(self, two):
        assert two.evaluate(_NAMELESS) == []
        two.evaluate("document.body.tabIndex = -1, document.body.focus()")  # from the beginning
        order = []
        for _ in range(14):
            two.key("Tab")
            order.append(two.evaluate("document.activeElement.closest('#pane, #pane-2, #tools, #layers')?.id ?? ''"))
        found = [each for each, before in zip(order, ["", *order], strict=False) if each and each != before]
        assert found == ["pane", "pane-2", "tools", "layers"]


@needs_page
def test_raw_requests_find_nothing_else(served):
    """What no client library would send."""
    host, port = served.split("/")[2].split(":")
    token = served.split("/")[3]

    def status(request: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(request)
            return connection.recv(65536).partition(b"\r\n")[0]

    def get(path: str, *headers: str) -> bytes:
        return status("\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode())

    own = f"Host: {host}:{port}"
    assert get(f"/{token}/catalog", own) == b"HTTP/1.1 200 OK"
    for path in (
        "/../../etc/passwd",
        f"/{token}/../../../etc/passwd",
        f"/{token}/..%2f..%2fetc/passwd",
        f"/{token}//etc/passwd",
    ):
        assert get(path, own).split()[1] in (b"403", b"404")
    assert get(f"/{token}/catalog").split()[1] == b"400"  # of HTTP/1.1 without a host
    assert get(f"/{token}/catalog", own, "Host: evil.example").split()[1] in (b"400", b"421")
    assert get(f"http://evil.example/{token}/catalog", "Host: evil.example").split()[1] == b"421"
    assert get(f"/{token}/catalog", own, "X: " + "x" * 10**5).split()[1] in (b"400", b"431")
    assert get("/" + "x" * 10**5, own).split()[1] in (b"400", b"414")
