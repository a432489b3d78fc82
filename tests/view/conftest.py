"""A server of a few slides, asked as a browser would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="needs gigagrad[view]")

from starlette.testclient import TestClient

from gigagrad.config.predict import PredictConfig
from gigagrad.models import resolve, save_model
from gigagrad.prediction import predict
from gigagrad.view import serving
from gigagrad.view.catalog import find
from gigagrad.view.server import application
from gigagrad.view.slides import Slides

TOKEN = "a-token-of-this-test"
PAGE = {"index.html": b"<!doctype html>", "page.js": b"//", "page.css": b"", "icon.svg": b"", "licences.txt": b""}

Serve = Callable[..., TestClient]


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Serve:
    """Serve what `find` finds; addresses are relative to the page's own."""

    def started(*sources: Path, live=(), host: str = "127.0.0.1", **named) -> TestClient:
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


@pytest.fixture(scope="session")
def network_dir(tmp_path_factory):
    """A network with something to say, saved as a run would save it."""
    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    model = resolve("paper-unet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    save_model(folder / "best.pt", "paper-unet", model)
    return folder


@pytest.fixture(scope="session")
def predicted(network_dir, jpeg_slide, jpeg_label, tmp_path_factory):
    """A folder of predictions."""
    out = tmp_path_factory.mktemp("predicted")
    table = out.with_name("cohort.csv")
    table.write_text(f"slide,mask\n{jpeg_slide},{jpeg_label}\n")
    predict(PredictConfig(run=network_dir, slides=(table,), out=out, outputs=("mask", "probabilities", "geojson")))
    return out
