"""What is predicted in view is what the whole slide's prediction holds there, bit for bit."""

import io

import numpy as np
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.images import open_image
from gigagrad.view.live import Live
from gigagrad.view.pyramids import TILE


def test_tiles_hold_the_bytes_that_predict_writes(serve, predicted, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert client.get("catalog").json()["live"]
    assert client.get("slides/0").json()["layers"] == []
    told = client.get("slides/0/live").json()
    (classes, shares), (plan,) = told["layers"], told["plans"]
    assert plan["tile"] == [700, 900]
    assert plan["exact"]
    assert (classes["kind"], shares["kind"]) == ("classes", "probabilities")
    box = Box(TILE, 0, 700, TILE)
    for number, kind in ((1, "masks"), (2, "probabilities")):
        with open_image(predicted / kind / "small.tif") as written:
            expected = written.read(box)[0]
        got = np.asarray(Pillow.open(io.BytesIO(client.get(f"slides/0/{number}/0/0/1").content)))
        np.testing.assert_array_equal(got, expected)
    assert len(np.unique(expected)) > 10
    told = client.get("slides/0/pixel/600/10?live=1").json()["layers"]
    assert told["2"] == f"{expected[600 - TILE, 10] / 255:.3f}"
    assert not client.get("slides/0/pixel/600/10").json()["layers"]


def test_a_plan_that_would_compute_for_long_before_the_first_tile_is_another_one(
    serve, network_dir, jpeg_slide, monkeypatch
):
    monkeypatch.setattr("gigagrad.view.live._MOST_BEFORE_SECONDS", -1.0)
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert not client.get("slides/0/live").json()["plans"][0]["exact"]
    assert client.get("slides/0/1/0/0/1").status_code == 200


def test_a_model_that_scores_slides_is_refused_in_words(serve, jpeg_slide, network_dir, monkeypatch):
    monkeypatch.setattr("gigagrad.view.live.image_shape", lambda engine, slide: None)
    client = serve(jpeg_slide, live=[Live(network_dir)])
    answer = client.get("slides/0/live")
    assert "no image of its size" in answer.json()["problems"][0]
    assert not answer.json()["layers"]
    assert client.get("slides/0/0/0/0/0").status_code == 200


def test_a_tile_of_a_live_layer_comes_also_when_its_slide_was_closed_meanwhile(serve, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert client.get("slides/0/2/0/0/0").status_code == 200
    assert client.get("slides/0/3/0/0/0").status_code == 404
