"""What is predicted in view is what the whole slide's prediction holds there, bit for bit."""

import asyncio
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.at_work import Work
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.events import TileBegun
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.georeference import geotiff_tags
from gigagrad.models import Normalise
from gigagrad.view.catalog import find
from gigagrad.view.live import Live
from gigagrad.view.pyramids import TILE
from tests.view.conftest import TOKEN, levels_of


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
        got = levels_of(client.get(f"slides/0/{number}/0/0/1").content, *expected.shape)
        np.testing.assert_array_equal(got, expected)
    assert len(np.unique(expected)) > 10
    told = client.get("slides/0/pixel/600/10?live=1").json()["layers"]
    assert told["2"] == f"{expected[600 - TILE, 10] / 255:.3f}"
    assert not client.get("slides/0/pixel/600/10").json()["layers"]


def test_nothing_is_predicted_where_there_is_no_data(serve, tmp_path):
    pixels = np.random.default_rng(0).integers(1, 256, (60, 90, 3), np.uint8)
    pixels[:, 40:60] = 0
    path, tags = tmp_path / "a.tif", geotiff_tags(None, 0)
    write_pyramid(path, [pixels], shape=(60, 90, 3), dtype=np.uint8, nearest=False, tags=tags)
    engine = gg.compile(nn.Sequential(Normalise(), nn.Conv2d(3, 2, 3, padding=1)), F.cross_entropy)
    client = serve(path, live=[Live(engine)])
    assert len(client.get("slides/0/live").json()["layers"]) == 2
    ids, shares = (levels_of(client.get(f"slides/0/{number}/0/0/0").content, 60, 90) for number in (1, 2))
    assert (ids[:, 40:60] == 255).all()
    assert (shares[:, 40:60] == 0).all()
    assert (ids[:, :40] < 2).all()
    assert (shares[:, :40] > 0).all()


def test_a_plan_that_would_compute_for_long_before_the_first_tile_is_another_one(
    serve, network_dir, jpeg_slide, monkeypatch
):
    monkeypatch.setattr("gigagrad.view.live._MOST_BEFORE_SECONDS", -1.0)
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert not client.get("slides/0/live").json()["plans"][0]["exact"]
    assert client.get("slides/0/1/0/0/1").status_code == 200


@pytest.mark.parametrize(
    ("layers", "refused"),
    [((nn.AdaptiveAvgPool2d(1), nn.Flatten()), "output is no image"), ((nn.MaxPool2d(2),), "no image of its size")],
    ids=["a score", "half the size"],
)
def test_a_model_that_predicts_no_pixels_is_refused_in_words(serve, jpeg_slide, layers, refused):
    client = serve(jpeg_slide, live=[Live(gg.compile(nn.Sequential(Normalise(), *layers)))])
    answer = client.get("slides/0/live")
    assert refused in answer.json()["problems"][0]
    assert not answer.json()["layers"]
    assert client.get("slides/0/0/0/0/0").status_code == 200


def test_an_engine_predicts_what_is_in_view(serve, jpeg_slide):
    """With the weights of its model as they are, whatever its loss; and images that are open are slides."""
    torch.manual_seed(0)
    model = nn.Sequential(Normalise(), nn.Conv2d(3, 3, 3, padding=1))
    engine = gg.compile(model, F.cross_entropy)
    slide = open_image(np.random.default_rng(0).integers(0, 256, (3, 60, 90), np.uint8))
    client = serve(slide, live=[Live(engine, classes=["a", "b"])])
    assert client.get("slides/0").json()["name"] == slide.name
    ids, shares = client.get("slides/0/live").json()["layers"]
    assert [kind["name"] for kind in ids["classes"]] == ["a", "b"]
    assert [kind["name"] for kind in shares["classes"]] == ["Background", "a", "b"]
    with torch.no_grad():
        expected = model(torch.from_numpy(slide.read(Box.whole(60, 90)))[None])[0].argmax(0)
    got = levels_of(client.get("slides/0/1/0/0/0").content, 60, 90)
    np.testing.assert_array_equal(got, expected)
    assert not engine.events.has_listeners, "its own bars are shown as before"
    with pytest.raises(ConfigError, match="leave memory, device, trust out"):
        Live(engine, memory="1GiB")


def test_two_open_images_of_one_name_are_two_slides(jpeg_slide):
    pixels = np.zeros((3, 8, 8), np.uint8)
    first, second = find([open_image(pixels), open_image(pixels), jpeg_slide]).items[:2]
    assert first.image is not second.image
    assert first.files == ()


def test_a_tile_of_a_live_layer_comes_also_when_its_slide_was_closed_meanwhile(serve, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir)])
    assert client.get("slides/0/2/0/0/0").status_code == 200
    assert client.get("slides/0/3/0/0/0").status_code == 404


def test_what_the_network_computes_is_told_meanwhile(serve, network_dir, jpeg_slide):
    live = Live(network_dir)
    client, heard = serve(jpeg_slide, live=[live]), []

    class Asked(Work):
        def __call__(self, event):
            super().__call__(event)
            if isinstance(event, TileBegun):
                heard.append(client.get("now").json())

    live.work = Asked()
    assert client.get("slides/0/1/0/0/0").status_code == 200
    (told,) = heard[-1]
    assert (told["of"], told["slide"], told["name"]) == ("what is in view", 0, "small.tif")
    assert told["boxes"] == [[0, 0, 700, 900]]
    assert client.get("now").json() == []


def of_small_tiles() -> Live:
    return Live(gg.compile(nn.Sequential(Normalise(), nn.Conv2d(3, 2, 3, padding=1)), tile=(128, 128)))


def test_what_a_tile_takes_is_what_the_last_ones_took_here(serve, jpeg_slide):
    live = of_small_tiles()
    client = serve(jpeg_slide, live=[live])
    foretold = client.get("slides/0/live").json()["plans"][0]["seconds"]
    assert foretold > 0
    live.measured(9.9, 0.0)  # beside a second that was foretold and taken
    assert client.get("slides/0/live").json()["plans"][0]["seconds"] == pytest.approx(foretold * 10.8 / 0.9)
    before = live.pace
    assert client.get("slides/0/1/0/0/0").status_code == 200
    after = live.pace
    assert after != before
    assert client.get("slides/0/2/0/0/0").status_code == 200
    assert live.pace == after, "a tile that is there already says nothing"


def test_how_far_out_levels_go_is_the_plans_to_say(serve, network_dir, jpeg_slide, monkeypatch):
    def levels():
        return len(serve(jpeg_slide, live=[Live(network_dir)]).get("slides/0/live").json()["layers"][0]["levels"])

    assert levels() == 2, "until one tile holds it all"
    monkeypatch.setattr("gigagrad.view.live._MOST_TILE_SECONDS", 1e-9)
    assert levels() == 1


def test_what_nobody_waits_for_any_more_is_not_computed(serve, jpeg_slide, monkeypatch):
    live, go = of_small_tiles(), threading.Event()
    client = serve(jpeg_slide, live=[live])
    client.get("slides/0/live")
    live.call(lambda: None)
    asked = [{"type": "http.request", "body": b""}]
    answers, computed = [], []
    monkeypatch.setattr(live, "measured", lambda took, foretold: computed.append(took))
    path = f"/{TOKEN}/slides/0/1/0/0/1"
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": path, "query_string": b""}
    scope |= {"headers": [(b"host", b"127.0.0.1:8000")], "http_version": "1.1", "server": ("127.0.0.1", 8000)}

    async def receive():
        if asked:
            return asked.pop()
        live._thread.submit(go.set)  # behind what was asked for, and what that waits for
        return {"type": "http.disconnect"}

    async def send(message):
        answers.append(message)

    waiting = live._thread.submit(go.wait, 0.5)  # what was asked for before
    asyncio.run(client.app(scope, receive, send))
    waiting.result()
    assert [message["status"] for message in answers if "status" in message] == [499]
    assert not computed
    assert client.get("slides/0/1/0/0/1").status_code == 200, "somebody else may ask for it"
    assert computed


def test_where_two_networks_differ_is_a_layer_of_its_own(serve, network_dir, jpeg_slide):
    client = serve(jpeg_slide, live=[Live(network_dir, name="one"), Live(network_dir, name="other")])
    layers = client.get("slides/0/live").json()["layers"]
    assert [(layer["name"], layer["between"]) for layer in layers[4:]] == [
        ("Difference now", ["one", "other"]),
        ("Difference of probabilities now", ["one", "other"]),
    ]
    drawn = levels_of(client.get("slides/0/5/0/0/0").content, TILE, TILE)
    assert {*np.unique(drawn).tolist()} <= {0, 1}, "a network agrees with itself"
    assert client.get("slides/0/5/counts").status_code == 404
