"""What each output holds, read back by whoever it is for."""

import csv
import dataclasses
import json
import sqlite3
import zlib
from contextlib import closing

import numpy as np
import ome_types
import pytest
import shapely
import tifffile
import torch

from gigagrad.boxes import Box
from gigagrad.cohorts.records import FORMATS, PLACES, file_names
from gigagrad.errors import ConfigError
from gigagrad.execution.sinks import OutputField
from gigagrad.images import open_image
from gigagrad.masks import ClassTable
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction.classes import Channels
from gigagrad.prediction.outlines import draw_overlay, layers
from gigagrad.prediction.outputs import OUTPUTS, Predicted, Streaming
from gigagrad.prediction.polygons import measured, trace
from tests.images.scanned import write_scn

TABLE = ClassTable.parse(("Tumour", "Stroma"))


@pytest.fixture
def predicted():
    """A mask at half of the slide's width and a third of its height, 0.5 um/px."""
    ids = np.zeros((90, 120), np.uint8)
    ids[10:60, 20:100] = 1
    ids[20:40, 40:80] = 0
    ids[70:90, 0:30] = 2
    slide = open_image(np.zeros((3, 90, 120), np.uint8), mpp=0.5)
    mask = open_image(ids)
    classes = mask_classes(2, ["Tumour", 'Stroma "\u00b5"'])
    made = Predicted(slide, mask, measured(trace(mask, classes), mask, classes), classes, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predicted, "scale", (3, 2))
        yield made


def written(name, predicted, folder):
    output = OUTPUTS[name]
    assert output.write is not None
    path = folder / file_names("a.slide", "tiff")[name].rpartition("/")[2]
    output.write(path, predicted)
    return path


def test_every_output_is_of_one_kind_and_has_a_file_of_its_own():
    others = [output for name, output in OUTPUTS.items() if name != "attention"]  # of a bag, no image
    assert all((output.sink is None) != (output.write is None) for output in others)
    names = [name for form in FORMATS for name in file_names("a", form).values()]
    assert len(set(names)) == len(FORMATS) * 3 + 6
    assert not any("/" in suffix for suffix in FORMATS.values())
    assert list(OUTPUTS) == list(PLACES)


def test_the_table_of_instances(predicted, tmp_path):
    with written("instances", predicted, tmp_path).open(newline="", encoding="utf-8") as file:
        tumour, stroma = csv.DictReader(file)
    collection = json.loads(written("geojson", predicted, tmp_path).read_text())
    assert [tumour["id"], stroma["id"]] == [feature["id"] for feature in collection["features"]]
    assert (tumour["class"], tumour["class_id"]) == ("Tumour", "1")
    assert (stroma["class"], stroma["class_id"]) == ('Stroma "\u00b5"', "2")
    assert float(tumour["area_px"]) == (50 * 80 - 20 * 40) * 6
    assert float(tumour["area_um2"]) == (50 * 80 - 20 * 40) * 0.25
    assert [float(stroma[side]) for side in ("x0", "y0", "x1", "y1")] == [0, 210, 60, 270]
    assert (float(stroma["centroid_x"]), float(stroma["centroid_y"])) == (30, 240)


def test_the_graph_is_of_the_regions(predicted, tmp_path):
    with np.load(written("graph", predicted, tmp_path)) as graph:
        assert graph["y_names"][np.searchsorted(graph["y_ids"], graph["y"])].tolist() == ["Tumour", 'Stroma "\u00b5"']
        assert graph["pos"].tolist()[1] == [30, 240]
        assert graph["x"][:, 0].tolist() == [50 * 80 - 20 * 40, 600]
        collection = json.loads(written("geojson", predicted, tmp_path).read_text())
        assert graph["id"].tolist() == [feature["id"] for feature in collection["features"]]
    coarse = dataclasses.replace(predicted, traced=dataclasses.replace(predicted.traced, downsample=2))
    with np.load(written("graph", coarse, tmp_path)) as graph:
        assert graph["id"].tolist() == ["", ""]


def test_a_slide_of_unknown_resolution_has_no_areas_in_micrometres(predicted, tmp_path):
    unknown = Predicted(
        open_image(np.zeros((3, 90, 120), np.uint8)),
        *[getattr(predicted, name) for name in ("mask", "traced", "classes", "truth")],
    )
    with written("instances", unknown, tmp_path).open(newline="", encoding="utf-8") as file:
        assert [row["area_um2"] for row in csv.DictReader(file)] == ["", ""]


def test_the_annotation_store_is_by_tiatoolbox_s_schema(predicted, tmp_path):
    path = written("tiatoolbox", predicted, tmp_path)
    features = json.loads(written("geojson", predicted, tmp_path).read_text())["features"]
    with closing(sqlite3.connect(path)) as store:
        said = {key: json.loads(value) for key, value in store.execute("SELECT key, value FROM metadata")}
        assert said == {"version": "1.0.1", "compression": "zlib", "compression_level": 9}
        rows = list(store.execute("SELECT * FROM annotations ORDER BY id"))
        inside = store.execute("SELECT id FROM rtree WHERE max_x >= 0 AND min_x <= 30 AND max_y >= 200").fetchall()
    assert inside == [(2,)]
    for (_, key, kind, cx, cy, geometry, properties, area), feature in zip(rows, features, strict=True):
        polygon = shapely.from_wkb(zlib.decompress(geometry))
        assert polygon.equals(shapely.geometry.shape(feature["geometry"]))
        assert (key, kind, area) == (feature["id"], "Polygon", polygon.area)
        assert (cx, cy) == (polygon.centroid.x, polygon.centroid.y)
        said = json.loads(properties)
        assert said["type"] == feature["properties"]["classification"]["name"]
        assert [round(255 * part) for part in said["color"]] == feature["properties"]["classification"]["color"]


def test_regions_are_counted_as_who_reads_them_counts(tmp_path):
    """QuPath from where the slide was scanned; OpenSlide, TIAToolbox and the table from its corner."""
    scan = write_scn(tmp_path / "a.scn", np.zeros((64, 96, 3), np.uint8), corner=(20, 30), slide=(120, 150))
    ids = np.zeros((120, 150), np.uint8)
    ids[40:70, 50:100] = 1
    with open_image(scan) as slide:
        mask, classes = open_image(ids), mask_classes(1, ["Tumour"])
        predicted = Predicted(slide, mask, measured(trace(mask, classes), mask, classes), classes, None)
        (region,) = json.loads(written("geojson", predicted, tmp_path).read_text())["features"]
        assert shapely.geometry.shape(region["geometry"]).bounds == (20, 20, 70, 50)
        with written("instances", predicted, tmp_path).open(newline="", encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        assert [float(row[side]) for side in ("x0", "y0", "x1", "y1")] == [50, 40, 100, 70]
        with closing(sqlite3.connect(written("tiatoolbox", predicted, tmp_path))) as store:
            (kept,) = store.execute("SELECT geometry FROM annotations").fetchone()
        assert shapely.from_wkb(zlib.decompress(kept)).bounds == (50, 40, 100, 70)
        drawn = draw_overlay(slide, layers(mask, classes))
    rows, columns = np.nonzero((drawn[:120] == classes[0].color).all(axis=2))
    assert abs(np.array([columns.min(), rows.min(), columns.max(), rows.max()]) - (50, 40, 100, 70)).max() <= 2


def test_an_empty_mask_makes_empty_outputs(tmp_path):
    mask = open_image(np.zeros((1, 7), np.uint8))
    empty = Predicted(open_image(np.zeros((3, 1, 7), np.uint8)), mask, trace(mask, ()), (), None)
    assert len(written("instances", empty, tmp_path).read_text().splitlines()) == 1
    with np.load(written("graph", empty, tmp_path)) as graph:
        assert graph["edge_index"].shape == (2, 0)
    with closing(sqlite3.connect(written("tiatoolbox", empty, tmp_path))) as store:
        assert store.execute("SELECT count(*) FROM annotations").fetchone() == (0,)


def sink_to(path, logits, table=None, name="probabilities", *, labels=False):
    """The output written as the sweep would, in tiles."""
    channels = Channels(logits.shape[1], labels)
    shape = tuple(logits.shape)
    boxes = [
        Box(y, x, min(y + 40, shape[2]), min(x + 50, shape[3]))
        for y in range(0, shape[2], 40)
        for x in range(0, shape[3], 50)
    ]
    pieces = ((box, logits[..., box.y0 : box.y1, box.x0 : box.x1]) for box in boxes)
    field = OutputField(shape, torch.float32, torch.device("cpu"), 0.5)
    output = OUTPUTS[name]
    assert output.sink is not None
    seen = open_image(np.zeros((1, *shape[2:]), np.uint8))
    return output.sink(path, Streaming(seen, channels, channels.classes(table), 0.5)).take(pieces, field)


@pytest.mark.parametrize(("channels", "labels"), [(1, False), (2, False), (3, False), (3, True), (5, False)])
@pytest.mark.parametrize("form", FORMATS)
def test_probabilities_of_any_number_of_channels(form, channels, labels, tmp_path):
    torch.manual_seed(0)
    logits = 4 * torch.randn(1, channels, 90, 120)
    path = sink_to(tmp_path / f"p{FORMATS[form]}", logits, labels=labels)
    expected = logits[0].sigmoid() if channels == 1 or labels else logits[0].softmax(0)
    with open_image(path) as image:
        assert (image.shape, image.mpp) == ((channels, 90, 120), pytest.approx(0.5))  # type: ignore[comparison-overlap]
        read = np.asarray(image.read(Box.whole(90, 120))) / 255
    assert np.abs(read - expected.numpy()).max() <= 0.5 / 255 + 1e-6


def test_channels_have_the_names_of_the_classes(tmp_path):
    path = sink_to(tmp_path / "p.ome.tif", torch.zeros(1, 3, 90, 120), TABLE)
    pixels = ome_types.from_tiff(path).images[0].pixels
    assert [channel.name for channel in pixels.channels] == ["Background", "Tumour", "Stroma"]
    with tifffile.TiffFile(sink_to(tmp_path / "p.tif", torch.zeros(1, 3, 90, 120), TABLE)) as tiff:
        assert tiff.pages[0].description.endswith("Background, Tumour, Stroma")
    with tifffile.TiffFile(sink_to(tmp_path / "m.tif", torch.zeros(1, 3, 90, 120), TABLE, "mask")) as tiff:
        assert tiff.pages[0].description.endswith("1 Tumour, 2 Stroma")


@pytest.mark.parametrize("form", FORMATS)
def test_a_mask_of_labels_that_overlap(form, tmp_path):
    logits = torch.full((1, 3, 90, 120), -1.0)
    logits[0, 0, 10:60, 20:100] = logits[0, 1, 30:80, 60:110] = logits[0, 2, 0:16, 0:16] = 1
    path = sink_to(tmp_path / f"m{FORMATS[form]}", logits, ClassTable.parse("abc"), "mask", labels=True)
    classes = Channels(3, labels=True).classes(ClassTable.parse("abc"))
    with open_image(path) as mask:
        assert np.array_equal(np.asarray(mask.read(Box.whole(90, 120))), logits[0].numpy() > 0)
        regions = trace(mask, classes).regions
        drawn = layers(mask, classes, mask)
        picture = draw_overlay(open_image(np.full((3, 90, 120), 255, np.uint8)), drawn)
    assert [(region.kind.name, region.polygon.bounds) for region in regions] == [
        ("a", (20, 10, 100, 60)),
        ("b", (60, 30, 110, 80)),
        ("c", (0, 0, 16, 16)),
    ]
    for kind in classes:
        assert (picture == kind.color).all(2).any()


def test_which_class_a_channel_is_of():
    assert [(kind.id, kind.name) for kind in Channels(1).classes(TABLE.parse(["Tumour"]))] == [(1, "Tumour")]
    classes = Channels(4).classes(TABLE)
    assert [(kind.id, kind.name) for kind in classes] == [
        (0, "Background"),
        (1, "Tumour"),
        (2, "Stroma"),
        (3, "Class 3"),
    ]
    assert Channels(2).classes(ClassTable.parse(["glass=0", "tissue=1"]))[0].name == "glass"
    labels = Channels(3, labels=True).classes(TABLE)
    assert [(kind.id, kind.name) for kind in labels] == [(1, "Tumour"), (2, "Stroma"), (3, "Class 3")]
    with pytest.raises(ConfigError, match="got 2 class names"):
        Channels(3, labels=True).classes(TABLE, typed=True)


def test_probabilities_of_what_is_no_number():
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, 0]).half().reshape(1, 1, 1, 4)
    assert Channels(1).probabilities(logits).flatten().tolist() == [0, 1, 0, 0.5]
    assert Channels(1).probabilities(logits).dtype == torch.float32
    several = torch.cat([logits, torch.zeros_like(logits)], 1)
    assert Channels(2).probabilities(several)[0, :, 0, 0].tolist() == [0, 0]
