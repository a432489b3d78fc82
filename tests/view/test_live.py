"""What is predicted in view is what the whole slide's prediction holds there, bit for bit."""

import io

import numpy as np
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.events import TileBegun
from gigagrad.images import open_image
from gigagrad.view.live import Live
from gigagrad.view.pyramids import TILE


def test_tiles_hold_the_bytes_that_predict_writes(serve, predicted, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert client.get("catalog").json()["live"]
    assert client.get("slides/0").json()["layers"] == []
    told = client.get("slides/0/live").json()
    (classes, shares), (plan,) = told["layers"], told["plans"]
    assert plan["segments"][-1]["tile"] == [700, 900]
    assert (plan["shape"], plan["exact"]) == ([700, 900], True)
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


def test_what_the_network_computes_is_told_meanwhile(serve, network_dir, jpeg_slide):
    live = Live(network_dir)
    client, heard = serve(jpeg_slide, live=[live]), []

    def listen(event):  # behind the page's own listener
        if isinstance(event, TileBegun):
            heard.append(client.get("now").json())

    live._predictor.engine.events.subscribe(listen)
    assert client.get("slides/0/1/0/0/0").status_code == 200
    (told,) = heard[-1]
    assert (told["of"], told["slide"], told["name"]) == ("what is in view", 0, "small.tif")
    assert told["boxes"] == [[0, 0, 700, 900]]
    assert client.get("now").json() == []


def test_where_two_networks_differ_is_a_layer_of_its_own(serve, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir, name="one"), Live(network_dir, name="other")])
    layers = client.get("slides/0/live").json()["layers"]
    assert [(layer["name"], layer["between"]) for layer in layers[4:]] == [
        ("Difference now", ["one", "other"]),
        ("Difference of probabilities now", ["one", "other"]),
    ]
    drawn = Pillow.open(io.BytesIO(client.get("slides/0/5/0/0/0").content))
    assert {*np.unique(np.asarray(drawn)).tolist()} <= {0, 1}, "a network agrees with itself"
    assert client.get("slides/0/5/counts").status_code == 404
