"""The page lists the patches with most and with least attention, and shows each."""

import io
import json

import numpy as np
import pytest
import tifffile
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import open_image
from gigagrad.view.patches import Patches


def tile(x, y, attention, side=32):
    ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    measured = {"attention": attention, "attention rank": attention / 2}
    return {"geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {"measurements": measured}}


def written(path, tiles):
    path.write_text(json.dumps({"type": "FeatureCollection", "features": tiles}))
    return path


def test_those_with_most_come_first_and_those_with_least_in_their_order(tmp_path):
    path = written(tmp_path / "a.geojson", [tile(32 * number, 5, (number * 7) % 40) for number in range(40)])
    told = Patches(path, None).ends()
    assert told["count"] == 40
    assert [patch[3] for patch in told["most"]] == list(range(39, 27, -1))
    assert [patch[3] for patch in told["least"]] == list(range(12))
    assert told["most"][0] == [32 * 17, 5, 32, 39.0, 19.5]
    assert Patches(path, Box(100, 1000, 900, 2000)).ends()["most"][0][:2] == [32 * 17 + 1000, 105]


def test_of_few_patches_none_is_listed_twice(tmp_path):
    told = Patches(written(tmp_path / "a.geojson", [tile(0, 0, 1.0), tile(32, 0, 2.0)]), None).ends()
    assert [[patch[3] for patch in told[which]] for which in ("most", "least")] == [[2.0, 1.0], []]


def test_the_patch_at_a_pixel_is_the_one_whose_middle_is_nearest(tmp_path):
    overlapping = [tile(0, 0, 0.1), tile(16, 0, 0.3), tile(200, 40, 0.2)]
    patches = Patches(written(tmp_path / "a.geojson", overlapping), None)
    assert patches.at(10, 4) == {"patch": [0, 0, 32, 0.1, 0.05], "place": 2, "count": 3}
    for place, pixels in enumerate([((10, 30), (31, 47)), ((40, 200), (71, 231))]):
        assert all(patches.at(*pixel) == patches.nth(place) for pixel in pixels)
    assert [patches.at(y, x) for y, x in ((32, 4), (0, 48), (39, 200), (40, 199), (72, 231))] == [None] * 5
    assert [told["patch"][3] for place in range(9) if (told := patches.nth(place))] == [0.3, 0.2, 0.1]
    assert patches.nth(3) is None
    assert Patches(written(tmp_path / "a.geojson", []), None).at(0, 0) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"features": [1]}', '{"features": [{}]}', "[" * 10**5])
def test_a_damaged_file_is_told_in_one_line(text, tmp_path):
    path = tmp_path / "a.geojson"
    path.write_text(text)
    with pytest.raises(ConfigError, match="predict again"):
        Patches(path, None)
    with pytest.raises(ConfigError, match="no number"):
        Patches(written(path, [tile(0, 0, float("nan"))]), None)


def test_the_server_lists_them_and_shows_each(serve, jpeg_slide, tmp_path):
    folder, made_with = tmp_path / "predicted", {"model": "m", "model_sha256": "0", "threshold": 0.5, "classes": []}
    record = {
        "name": "small",
        "slide": str(jpeg_slide),
        "slide_bytes": 1,
        "status": "done",
        "made_with": {**made_with, "level": 0},
        "files": {"attention": "attention/small"},
    }
    for name in ("records", "attention/small"):
        (folder / name).mkdir(parents=True)
    (folder / "records" / "small.json").write_text(json.dumps(record))
    written(folder / "attention" / "small" / "small.geojson", [tile(64, 32, 0.5), tile(880, 690, 0.1)])
    tifffile.imwrite(folder / "attention" / "small" / "small.tif", np.ones((22, 29), np.float32), tile=(16, 16))
    client = serve(folder)
    assert client.get("slides/0").json()["patches"] == [""]
    told = client.get("slides/0/patches/0").json()
    assert [patch[:3] for patch in told["most"]] == [[64, 32, 32], [880, 690, 32]]
    assert client.get("slides/0/patches/1").status_code == 404
    assert client.get("slides/0/patches/0/1").json()["patch"][:2] == [880, 690]
    assert client.get("slides/0/patches/0/at/690/880").json()["place"] == 1
    assert client.get("slides/0/patches/0/at/0/0").json() is client.get("slides/0/patches/0/2").json() is None
    assert client.get("slides/0/patches/1/0").status_code == client.get("slides/0/patches/1/at/0/0").status_code == 404
    got = np.asarray(Pillow.open(io.BytesIO(client.get("slides/0/square/64/32/32").content)))
    with open_image(jpeg_slide) as slide:
        expected = np.asarray(slide.read(Box(32, 64, 64, 96))).transpose(1, 2, 0)
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).mean() < 8
    assert Pillow.open(io.BytesIO(client.get("slides/0/square/880/690/32").content)).size == (20, 10)
    assert max(Pillow.open(io.BytesIO(client.get(f"slides/0/square/0/0/{10**9}").content)).size) <= 512
    for place in ("900/0/32", "0/700/32", "0/0/0"):
        assert client.get(f"slides/0/square/{place}").status_code == 404
