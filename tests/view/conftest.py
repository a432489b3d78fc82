"""A server of a few slides, asked as a browser would."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs gigagrad[view]")

from starlette.testclient import TestClient

from gigagrad.images import Image
from gigagrad.view import serving
from gigagrad.view.catalog import find
from gigagrad.view.server import application
from gigagrad.view.slides import Slides

TOKEN = "a-token-of-this-test"
PAGE = {"index.html": b"<!doctype html>", "page.js": b"//", "page.css": b"", "icon.svg": b"", "licences.txt": b""}

Serve = Callable[..., TestClient]


def levels_of(data: bytes, *shape: int) -> np.ndarray:
    """Return what a tile of a layer holds."""
    return np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Serve:
    """Serve what `find` finds; addresses are relative to the page's own."""

    def started(*sources: Path | Image, live=(), host: str = "127.0.0.1", **named) -> TestClient:
        catalog = find(sources, **named)
        slides = Slides(catalog.items, live)
        request.addfinalizer(slides.close)
        app = application(catalog, slides, PAGE, token=TOKEN, host=host, threads=2)
        client = TestClient(app, base_url=f"http://127.0.0.1:8000/{TOKEN}/")
        client.__enter__()  # all requests in one event loop, as in a server
        request.addfinalizer(client.__exit__)
        return client

    return started


@pytest.fixture
def page(monkeypatch):
    """Stand in for the built page."""
    monkeypatch.setattr(serving, "read_page", lambda: PAGE)
