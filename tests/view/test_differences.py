"""Where two predictions of a slide differ is a layer, and its pixels are counted."""

import json
import shutil

import numpy as np
import pytest
import tifffile

from gigagrad.images import MaskClass
from gigagrad.view.pyramids import AGREED, FALSE, MISSED
from gigagrad.view.slides import _as_named
from tests.view.conftest import levels_of


@pytest.fixture
def two(predicted, tmp_path):
    """Two folders of predictions of one slide, made by hand."""
    found = []
    for name, band in (("one", slice(0, 300)), ("other", slice(100, 500))):
        folder = tmp_path / name
        shutil.copytree(predicted, folder)
        (folder / "predictions.json").unlink()
        record = json.loads((folder / "records" / "small.json").read_text())
        record["made_with"]["model_sha256"] = name
        (folder / "records" / "small.json").write_text(json.dumps(record))
        mask = np.zeros((700, 900), np.uint8)
        mask[band] = 1
        tifffile.imwrite(folder / "masks" / "small.tif", mask, tile=(256, 256))
        tifffile.imwrite(
            folder / "probabilities" / "small.tif", mask * (255 if name == "one" else 100), tile=(256, 256)
        )
        found.append(folder)
    return found


def test_classes_that_differ_are_drawn_and_counted(two, serve):
    client = serve(*two)
    layers = client.get("slides/0").json()["layers"]
    number = next(n for n, layer in enumerate(layers, 1) if layer["name"] == "Difference")
    layer = layers[number - 1]
    one, other = layer["between"]
    assert (one.rpartition("/")[2], other.rpartition("/")[2], layer["of"]) == ("one", "other", "")
    named = {kind["id"]: kind["name"] for kind in layer["classes"]}
    assert named[MISSED] == f"only in {other}"
    assert named[FALSE] == f"only in {one}"
    drawn = levels_of(client.get(f"slides/0/{number}/0/0/0").content, 512, 512)
    expected = np.repeat([FALSE, AGREED, MISSED, 0], [100, 200, 200, 12])
    np.testing.assert_array_equal(drawn[:, 5], expected)
    told = client.get(f"slides/0/{number}/counts").json()
    assert (told["counted"], told["pixels"]) == (1, 630_000)
    assert told["shares"][:5] == pytest.approx([200 / 700, 200 / 700, 200 / 700, 100 / 700, 0])


def test_probabilities_that_differ_are_drawn_by_how_much(two, serve):
    client = serve(*two)
    layers = client.get("slides/0").json()["layers"]
    number = next(n for n, layer in enumerate(layers, 1) if layer["name"] == "Difference of probabilities")
    drawn = levels_of(client.get(f"slides/0/{number}/0/0/0").content, 512, 512)
    np.testing.assert_array_equal(drawn[:, 5], np.repeat([255, 155, 100, 0], [100, 200, 200, 12]))
    shares = client.get(f"slides/0/{number}/counts?channel=0").json()["shares"]
    assert [shares[level] for level in (0, 100, 155, 255)] == pytest.approx([2 / 7, 2 / 7, 2 / 7, 1 / 7])


def test_of_a_large_slide_some_tiles_are_counted(predicted, jpeg_label, serve, monkeypatch):
    client = serve(predicted, masks=[jpeg_label])
    errors = next(n for n, each in enumerate(client.get("slides/0").json()["layers"], 1) if each["kind"] == "errors")
    with tifffile.TiffFile(predicted / "masks" / "small.tif") as mask, tifffile.TiffFile(jpeg_label) as label:
        found, true = mask.asarray() > 0, label.asarray() > 0
    expected = [(~found & ~true).mean(), (found & true).mean(), (~found & true).mean(), (found & ~true).mean()]
    assert client.get(f"slides/0/{errors}/counts").json()["shares"][:4] == pytest.approx(expected)
    monkeypatch.setattr("gigagrad.view.layers._COUNTED_PX", 350 * 900)
    some = client.get(f"slides/0/{errors}/counts").json()
    assert 0.1 < some["counted"] < 0.9
    assert sum(some["shares"]) == pytest.approx(1)


def test_one_prediction_differs_from_nothing(predicted, serve):
    client = serve(predicted)
    assert not any(layer["between"] for layer in client.get("slides/0").json()["layers"])
    assert client.get("slides/0/0/counts").status_code == client.get("slides/0/9/counts").status_code == 404
    assert client.get("slides/0/1/counts?channel=x").status_code == 400


def test_classes_are_compared_by_their_names():
    ours = [MaskClass(1, "tumour", (0, 0, 0)), MaskClass(2, "stroma", (0, 0, 0))]
    theirs = [MaskClass(1, "stroma", (0, 0, 0)), MaskClass(2, "fat", (0, 0, 0)), MaskClass(3, "tumour", (0, 0, 0))]
    assert _as_named(ours, theirs) == {1: 2, 2: 4, 3: 1}
