"""What the cell of a notebook shows: the page in a frame, and a picture where there is no server."""

from __future__ import annotations

import http.client
import sys
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import open_image
from gigagrad.view import Frame, serving
from gigagrad.view.page import read_page
from gigagrad.view.slides import Opened
from tests.view.browser import PROGRAM, Browser

try:
    BUILT: dict[str, bytes] | None = read_page()
except ConfigError:
    BUILT = None


@pytest.fixture
def shown(page, jpeg_slide):
    made = Frame(jpeg_slide)
    yield made
    made.close()


def status(address: str, **headers: str) -> tuple[int, str]:
    """Ask for a page as a browser would of the site of a notebook."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    given = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", **headers}
    connection.request("GET", parts.path, headers={name.replace("_", "-"): value for name, value in given.items()})
    answer = connection.getresponse()
    policy = answer.headers["content-security-policy"]
    connection.close()
    return answer.status, policy


def test_a_cell_holds_the_page_and_behind_it_a_picture(shown):
    html = shown._repr_html_()
    assert f'data="{shown.address}"' in html
    assert html.index("<object") < html.index('src="data:image/png') < html.index("</object>")
    for place in ("object", "iframe", "document"):
        code, policy = status(shown.address, sec_fetch_dest=place)
        assert code == 200
        assert "frame-ancestors" not in policy
        assert "default-src 'none'" in policy
    assert status(shown.address, sec_fetch_dest="script")[0] == 403
    assert status(shown.address + "catalog", sec_fetch_dest="iframe")[0] == 403
    assert status(shown.address[:-2] + "/", sec_fetch_dest="iframe")[0] == 403


def test_images_that_are_open_and_arrays_are_shown_too(page):
    pixels = np.zeros((3, 40, 60), np.uint8)
    with open_image(pixels) as opened:
        made = Frame(opened, pixels + 1)
        assert status(made.address, sec_fetch_dest="object")[0] == 200
        made.close()
        assert 'src="data:image/png' in made._repr_html_()
        assert opened.read(Box.whole(2, 2)).shape == (3, 2, 2), "who opened it closes it"


def test_closed_it_shows_the_picture_and_leaves_no_thread(shown):
    address, before = shown.address, threading.active_count()
    shown.close()
    assert threading.active_count() == before - 1
    with pytest.raises(OSError, match="refused"):
        status(address)
    assert "<object" not in shown._repr_html_()
    assert 'src="data:image/png' in shown._repr_html_()


def test_of_many_frames_the_first_are_closed(page, jpeg_slide, monkeypatch):
    monkeypatch.setattr(serving, "_MOST", 1)
    first, second = Frame(jpeg_slide), Frame(jpeg_slide)
    assert (first.address, bool(second.address)) == ("", True)
    second.close()


def test_without_a_server_one_line_says_why(jpeg_slide, page, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    made = Frame(jpeg_slide)
    assert made.address == ""
    html = made._repr_html_()
    assert 'src="data:image/png' in html
    assert "pip install &#x27;gigagrad[view]&#x27;" in html


@pytest.mark.slow
@pytest.mark.skipif(BUILT is None, reason="the page is not built; make page")
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_a_browser_shows_the_page_and_the_picture_once_the_server_is_gone(jpeg_slide, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "read_page", lambda: BUILT)
    asked, tile = threading.Event(), Opened.tile

    def noted(self, *which):
        asked.set()
        return tile(self, *which)

    monkeypatch.setattr(Opened, "tile", noted)
    made = Frame(jpeg_slide)
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><body>{made._repr_html_()}")
    picture = "document.querySelector('object img')?.getBoundingClientRect().width > 0"
    with Browser() as browser:
        browser.open(path.as_uri())
        assert asked.wait(120)
        assert not browser.evaluate(picture)
        made.close()
        browser.open("about:blank")
        browser.open(path.as_uri())
        browser.wait(picture)
