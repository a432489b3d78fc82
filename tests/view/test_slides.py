"""What a command names is found, and shown with what belongs to it."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts.rows import told_apart
from gigagrad.errors import ConfigError
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.georeference import geotiff_tags
from gigagrad.masks import ClassTable
from gigagrad.prediction.attention import write_map
from gigagrad.view.catalog import Item, Predicted, find
from gigagrad.view.pyramids import errors
from gigagrad.view.slides import MOST_OPEN, Opened, Slides
from tests.images.scanned import write_scn


def named(opened):
    return [(layer.name, layer.kind) for layer in opened.layers]


def values(opened, y, x):
    found = opened.values(y, x)
    assert found is not None
    return found


def test_a_folder_a_csv_and_a_file_name_slides(jpeg_slide, jpeg_label, tmp_path):
    table = tmp_path / "cohort.csv"
    table.write_text(f"slide,mask\n{jpeg_slide},{jpeg_label}\n")
    for source in (jpeg_slide, jpeg_slide.parent, table):
        assert [item.name for item in find([source]).items] == ["small"]
    (item,) = find([table, jpeg_slide]).items
    assert item.labels == ((jpeg_label,),)


def test_masks_come_by_file_or_by_folder(jpeg_slide, jpeg_label):
    for mask in (jpeg_label, jpeg_label.parent):
        (item,) = find([jpeg_slide], [mask]).items
        assert item.labels == ((jpeg_label,),)


def test_a_folder_of_predictions_brings_slides_masks_and_scores(predicted, jpeg_slide, jpeg_label):
    (item,) = find([predicted], [jpeg_label]).items
    assert item.row.slide == jpeg_slide
    assert dict(item.scores).keys() == {"Dice"}
    opened = Opened(item)
    assert named(opened) == [
        ("Label", "classes"),
        ("Prediction", "classes"),
        ("Probabilities", "probabilities"),
        ("Errors", "errors"),
    ]
    assert not opened.problems
    told = opened.describe()
    assert json.loads(json.dumps(told))["mpp"] == 0.5
    kinds = next(layer["classes"] for layer in told["layers"] if layer["kind"] == "errors")
    assert len(kinds) == 3, "of one class nothing can be of another"
    opened.close()
    (other,) = find([jpeg_slide], predictions=predicted).items
    assert other.predictions == item.predictions
    assert item.predictions[0].mask


def test_outlines_of_qupath_are_a_layer_with_their_classes(jpeg_slide, tmp_path):
    ring = [[100, 100], [300, 100], [300, 200], [100, 200], [100, 100]]
    kind = {"name": "Tumor", "color": [200, 0, 0]}
    feature = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"objectType": "annotation", "classification": kind},
    }
    (tmp_path / "small.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    opened = Opened(find([jpeg_slide], [tmp_path]).items[0])
    (layer,) = opened.layers
    assert [kind.name for kind in layer.classes] == ["Tumor"]
    assert [values(opened, y, 150)["layers"] for y in (150, 250)] == [{1: "Tumor"}, {1: "background"}]
    opened.close()


def test_a_layer_that_can_t_be_read_is_told_and_the_slide_is_shown(jpeg_slide, tmp_path):
    wrong = tmp_path / "small.tif"
    tifffile.imwrite(wrong, np.zeros((50, 500), np.uint8))
    opened = Opened(find([jpeg_slide], [wrong]).items[0])
    assert not opened.layers
    assert "must show the same part of the slide" in opened.problems[0]
    assert opened.tile(0, 0, 0, 0) is not None
    opened.close()


def test_labels_of_one_name_are_called_by_their_folders(jpeg_slide, jpeg_label, tmp_path):
    (item,) = find([jpeg_slide], [jpeg_label]).items
    places = [tmp_path / folder / "small.tif" for folder in ("masks", "second")]
    for place in places:
        place.parent.mkdir()
        shutil.copy(jpeg_label, place)
    opened = Opened(dataclasses.replace(item, labels=tuple((place,) for place in places)))
    assert [name for name, _ in named(opened)] == ["Label small in masks", "Label small in second"]
    outlines(places[1].with_suffix(".geojson"), Tumour=0)
    beside = (places[1], places[1].with_suffix(".geojson"))
    opened = Opened(dataclasses.replace(item, labels=tuple((place,) for place in beside)))
    assert [name for name, _ in named(opened)] == ["Label small.tif", "Label small.geojson"]
    opened = Opened(dataclasses.replace(item, labels=tuple((place,) for place in (places[0], *beside))))
    assert len({name for name, _ in named(opened)}) == 3


def outlines(path, **kinds):
    """Write squares of 100 px by the left edge of each, in the order of the names of their classes."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[[x, 0], [x + 100, 0], [x + 100, 100], [x, 100], [x, 0]]]},
            "properties": {"objectType": "annotation", "classification": {"name": name}},
        }
        for name, x in kinds.items()
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def labels_at(opened, *columns):
    return [values(opened, 50, x)["layers"][1] for x in columns]


def test_masks_of_several_labels_are_shown_as_they_are_learnt(jpeg_slide, tmp_path):
    outlines(tmp_path / "whole.geojson", Grade3=0, Grade4=100, **{"Artefact*": 300})
    core = np.zeros((700, 900), np.uint8)
    core[:, 100:200], core[:, 400:500] = 255, 7  # 7: no data
    tags = geotiff_tags(None, 7)
    write_pyramid(tmp_path / "core.tif", [core], shape=(700, 900, 1), dtype=np.uint8, nearest=True, tags=tags)
    (tmp_path / "cohort.csv").write_text(f"slide,mask:whole,mask:core\n{jpeg_slide},whole.geojson,core.tif\n")
    opened = Opened(find([tmp_path / "cohort.csv"]).items[0])
    assert not opened.problems
    seen = labels_at(opened, 50, 150, 250, 350)
    assert seen == ["whole", "core", "background", "ignored"]
    opened.close()


def test_what_a_table_or_a_file_leaves_out_is_shown_so(jpeg_slide, tmp_path):
    outlines(tmp_path / "small.geojson", Tumor=0, **{"Ignore*": 100})
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "cohort.csv").write_text(f"slide,mask\n{jpeg_slide},small.geojson\n")
    (run / "config.yaml").write_text(f"slides: {tmp_path / 'cohort.csv'}\nclasses: [Tumor=1, unlabelled=0]\n")
    opened = Opened(find([run]).items[0])
    assert labels_at(opened, 50, 150, 250) == ["Tumor", "ignored", "background"]
    opened.close()
    mask = np.zeros((700, 900), np.uint8)
    for name, value, nodata in (("foreground", 255, None), ("gaps", 1, 9)):
        mask[:, :100], mask[:, 100:200] = value, nodata or 0
        tags = geotiff_tags(None, nodata)
        path = tmp_path / f"{name}.tif"
        write_pyramid(path, [mask], shape=(700, 900, 1), dtype=np.uint8, nearest=True, tags=tags)
        opened = Opened(find([jpeg_slide], [path]).items[0])
        assert labels_at(opened, 50, 150, 250) == ["Foreground", "ignored" if nodata else "background", "background"]
        opened.close()


def test_values_under_the_pointer_are_those_of_the_file(jpeg_slide, jpeg_label):
    opened = Opened(find([jpeg_slide], [jpeg_label]).items[0])
    with open_image(jpeg_slide) as slide, open_image(jpeg_label) as label:
        for y, x in ((0, 0), (350, 450), (699, 899)):
            told = values(opened, y, x)
            box = Box(y, x, y + 1, x + 1)
            assert told["pixel"] == slide.read(box)[:, 0, 0].tolist()
            assert told["layers"][1] == ["background", "Foreground"][int(label.read(box)[0, 0, 0])]
    assert opened.values(700, 0) is None
    opened.close()


def test_few_slides_are_open_at_a_time(jpeg_slide, tmp_path):
    for number in range(MOST_OPEN + 3):
        os.link(jpeg_slide, tmp_path / f"{number}.tif")
    slides = Slides(find([tmp_path]).items)
    with slides.opened(0) as first:
        for number in range(1, MOST_OPEN + 3):
            with slides.opened(number) as other:
                other.thumbnail()
        assert len(slides._open) <= MOST_OPEN
        assert first.thumbnail()
        with slides.opened(0) as again:
            assert again is first
    slides.close()
    assert not slides._open


def test_links_that_lead_out_of_a_folder_are_left_out(jpeg_slide, tmp_path):
    folder = tmp_path / "slides"
    folder.mkdir()
    (folder / "own.tif").write_bytes(jpeg_slide.read_bytes())
    (folder / "link.tif").symlink_to(jpeg_slide)
    assert [item.name for item in find([folder]).items] == ["own"]
    assert [item.name for item in find([folder / "link.tif"]).items] == ["link"]
    (folder / "own.tif").unlink()
    with pytest.raises(ConfigError, match="are links to other folders"):
        find([folder])


def test_a_mask_that_is_a_link_out_of_its_folder_is_left_out(jpeg_slide, jpeg_label, tmp_path):
    (tmp_path / "small.tif").symlink_to(jpeg_label)
    with pytest.raises(ConfigError, match="no file in"):
        find([jpeg_slide], [tmp_path])


def test_a_record_can_t_name_files_elsewhere(predicted, tmp_path, jpeg_slide):
    folder = tmp_path / "predicted"
    folder.mkdir()
    record = json.loads((predicted / "records" / "small.json").read_text())
    (folder / "masks").mkdir()
    (folder / "masks" / "small.tif").symlink_to(predicted / "masks" / "small.tif")
    (folder / "records").mkdir()
    (folder / "records" / "small.json").write_text(json.dumps(record))
    (item,) = find([folder]).items
    assert item.predictions[0].mask is None
    record["files"]["mask"] = "../../etc/passwd"
    (folder / "records" / "small.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="not as predict writes it"):
        find([folder])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sources": ["none.svs"]}, "there is no none.svs"),
        ({"masks": ["none.tif"]}, "there is no mask none.tif"),
        ({"predictions": "none"}, "there is no none"),
        ({"masks": ["{folder}"]}, "no file in"),
    ],
)
def test_what_is_not_there_is_named(arguments, said, jpeg_slide, tmp_path):
    given = {"sources": [jpeg_slide], **arguments}
    given = {
        name: Path(value) if isinstance(value, str) else [Path(str(each).format(folder=tmp_path)) for each in value]
        for name, value in given.items()
    }
    with pytest.raises(ConfigError, match=said):
        find(**given)


def test_two_slides_of_one_name_are_told_apart(jpeg_slide, jpeg_label, tmp_path):
    """Each keeps what is its own: a mask of either is not the other's."""
    other = tmp_path / "other" / "small.tif"
    other.parent.mkdir()
    other.write_bytes(jpeg_slide.read_bytes())
    table = tmp_path / "cohort.csv"
    table.write_text(f"slide,mask\n{jpeg_slide},{jpeg_label}\n")
    first, second = find([table, other]).items
    assert [first.label, second.label] == [f"{jpeg_slide.parent.name}/small", "other/small"]
    assert [first.row.slide, second.row.slide] == [jpeg_slide, other]
    assert [first.labels, second.labels] == [((jpeg_label,),), ()]


def test_a_prediction_is_of_the_slide_that_it_names(predicted, jpeg_slide, tmp_path):
    other = tmp_path / "small.tif"
    other.write_bytes(jpeg_slide.read_bytes())
    items = find([jpeg_slide, other], predictions=predicted).items
    assert [len(item.predictions) for item in items] == [1, 0]


def test_names_grow_until_they_differ():
    paths = [Path("/a/x/slides/s"), Path("/b/x/slides/s"), Path("/b/y/slides/s")]
    names = ["/".join(told_apart(path, paths)) for path in paths]
    assert names == ["a/x/slides/s", "b/x/slides/s", "y/slides/s"]
    assert told_apart(Path("/s"), paths) == ("s",)


@pytest.fixture
def study(predicted, jpeg_slide, jpeg_label, tmp_path):
    """A folder as people have it, and as the demo leaves it: nothing but folders and a table."""
    folder = tmp_path / "study"
    for name in ("slides", "masks", "large", "run", ".hidden", "texts"):
        (folder / name).mkdir(parents=True)
    (folder / "slides" / "small.tif").write_bytes(jpeg_slide.read_bytes())
    (folder / "masks" / "small.tif").write_bytes(jpeg_label.read_bytes())
    (folder / "large" / "large.tif").write_bytes(jpeg_slide.read_bytes())
    (folder / ".hidden" / "secret.tif").write_bytes(jpeg_slide.read_bytes())
    (folder / "run" / "metrics.jsonl").write_text("")
    (folder / "scores.csv").write_text("a,b\n1,2\n")
    (folder / "elsewhere").symlink_to(jpeg_slide.parent)
    shutil.copytree(predicted, folder / "predictions")
    for path in ("predictions.json", "records/small.json"):
        path = folder / "predictions" / path
        path.write_text(path.read_text().replace(str(jpeg_slide), str(folder / "slides" / "small.tif")))
    return folder


def test_of_a_folder_of_folders_those_are_shown(study):
    catalog = find([study])
    assert catalog.parts == ("large", "masks", "predictions", "run", "slides")
    large, small = catalog.items
    assert (large.label, large.labels, large.predictions) == ("large", (), ())
    assert small.labels == ((study / "masks" / "small.tif",),)
    assert small.predictions[0].mask == study / "predictions" / "masks" / "small.tif"
    assert small.predictions[0].of == ""
    assert [run.name for run in catalog.runs] == ["study/run"]
    (only,) = find([study / "masks"]).items
    assert only.row.slide == study / "masks" / "small.tif", "a folder that was named is taken at its word"


def test_what_lies_deeper_is_found_and_what_is_passed_over_is_told(study, jpeg_slide, tmp_path):
    """As a project has it: `runs/first`, cohorts of several sites, links to a disk."""
    home = tmp_path / "home"
    (home / "runs" / "first").mkdir(parents=True)
    (home / "runs" / "first" / "metrics.jsonl").write_text("")
    study.rename(home / "site")
    for place in ("other/slides", "a/b/c/d/slides"):
        (home / place).mkdir(parents=True)
        (home / place / "small.tif").write_bytes(jpeg_slide.read_bytes())
    (home / "loop").symlink_to(home)
    (home / "site" / "predictions" / "predictions.json").unlink()
    shutil.rmtree(home / "site" / "predictions" / "records")
    catalog = find([home])
    assert [run.name for run in catalog.runs] == ["runs/first", "site/run"]
    assert {"runs/first", "site/slides", "other/slides"} < set(catalog.parts)
    assert {"a/b/c/d (too deep)", "site/elsewhere (a link to elsewhere)"} <= set(catalog.passed)
    labels = {item.row.slide.relative_to(home).as_posix(): len(item.labels) for item in catalog.items}
    assert labels["site/slides/small.tif"] == 1
    assert labels["other/slides/small.tif"] == 0, "masks of one site are not those of another"
    assert not any(path.startswith("a/") for path in labels)
    with pytest.raises(ConfigError, match=r"where a/b/c/d \(too deep\) was passed over"):
        find([_empty(tmp_path)])


def test_beside_slides_runs_and_tables_are_found_too(study, jpeg_slide, jpeg_label):
    """As a beginner has it: slides, a table and `runs/first` in one folder."""
    (study / "small.tif").write_bytes(jpeg_slide.read_bytes())
    (study / "label.tif").write_bytes(jpeg_label.read_bytes())
    (study / "cohort.csv").write_text("slide,mask\nsmall.tif,label.tif\n")
    catalog = find([study])
    assert catalog.parts[:2] == (".", "cohort.csv")
    (own,) = [item for item in catalog.items if item.row.slide == study / "small.tif"]
    assert own.labels == ((study / "label.tif",), (study / "masks" / "small.tif",))
    assert [run.name for run in catalog.runs] == ["study/run"]


def _empty(folder):
    """A folder of nothing but folders, too many below each other."""
    deepest = folder / "empty" / "a" / "b" / "c" / "d"
    deepest.mkdir(parents=True)
    return folder / "empty"


def test_a_table_of_the_folder_says_which_mask_belongs_to_which_slide(study):
    (study / "cohort.csv").write_text("slide,mask\nslides/small.tif,masks/small.tif\n")
    catalog = find([study])
    assert catalog.parts[0] == "cohort.csv"
    assert [item.labels for item in catalog.items] == [((study / "masks" / "small.tif",),), ()]


@pytest.mark.parametrize(
    ("names", "slides"),
    [
        ("slide.tif mask.tif", {"slide": ["mask.tif"]}),
        ("a.svs.tif a_mask.tif b.tif b-Labels.tif", {"a.svs": [], "a_mask": [], "b": ["b-Labels.tif"]}),
        ("a.tif a_mask.tif b.tif c_mask.tif", {"a": ["a_mask.tif"], "b": [], "c_mask": []}),
        ("a.tif b.tif mask.tif", {"a": [], "b": [], "mask": []}),
        ("mask.tif", {"mask": []}),
        ("unmask.tif unmask_label.tif", {"unmask": ["unmask_label.tif"]}),
    ],
)
def test_a_mask_beside_its_slide_is_a_label_of_it(names, slides, jpeg_label, tmp_path):
    for name in names.split():
        (tmp_path / name).write_bytes(jpeg_label.read_bytes())
    found = {item.name: [path.name for (path,) in item.labels] for item in find([tmp_path]).items}
    assert found == slides


def test_what_a_table_calls_a_mask_is_no_slide(jpeg_slide, jpeg_label, tmp_path):
    for name, source in (("a.tif", jpeg_slide), ("truth.tif", jpeg_label)):
        (tmp_path / name).write_bytes(source.read_bytes())
    (tmp_path / "cohort.csv").write_text("slide,mask\na.tif,truth.tif\n")
    assert [item.name for item in find([tmp_path]).items] == ["a"]
    assert [item.name for item in find([tmp_path, tmp_path / "cohort.csv"]).items] == ["a"]
    (tmp_path / "cohort.csv").unlink()
    assert [item.name for item in find([tmp_path]).items] == ["a", "truth"]


def test_a_folder_without_anything_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(ConfigError, match="holds no slides"):
        find([tmp_path])


def test_what_two_networks_predicted_is_told_apart_by_their_runs(predicted, jpeg_slide, network_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(predicted, other)
    for path in (other / "predictions.json", other / "records" / "small.json"):
        path.write_text(re.sub(r'"model_sha256": "\w+"', '"model_sha256": "0"', path.read_text()))
    run = tmp_path / "run"
    shutil.copytree(network_dir, run)
    (run / "metrics.jsonl").write_text("")
    (item,) = find([run, predicted, other]).items
    assert [each.of for each in item.predictions] == [f"{tmp_path.name}/run", "other"]
    assert list(item.scores) == [f"Dice ({tmp_path.name}/run)", "Dice (other)"]
    opened = Opened(item)
    assert [(layer.name, layer.of) for layer in opened.layers if not layer.between][::2] == [
        ("Prediction", f"{tmp_path.name}/run"),
        ("Prediction", "other"),
    ]
    opened.close()


def test_a_run_brings_its_cohort_and_its_curves(jpeg_slide, jpeg_label, tmp_path):
    table = tmp_path / "cohort.csv"
    table.write_text(f"slide,mask,split\n{jpeg_slide},{jpeg_label},train\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"slides: {table}\nclasses: [tissue=1]\n")
    catalog = find([run])
    assert [each.name for each in catalog.runs] == [f"{tmp_path.name}/run"]
    (item,) = catalog.items
    assert isinstance(item, Item)
    assert item.table.foreground == ("tissue",)


@pytest.mark.parametrize(("side", "mpp"), [(32, None), (32, 2.0), (64, None)])
def test_attention_is_shown_by_rank_where_its_patches_lie(jpeg_slide, tmp_path, side, mpp):
    # The map of 64 px, 32 um, is beyond what a file is believed; one may be predicted at another mpp than the file's.
    with gg.open_image(jpeg_slide, mpp=mpp) as slide, gg.open_bag(slide, side, None, tissue=None) as bag:
        attention = np.zeros(len(bag))
        for place, value in (((3, 2), 1e-6), ((5, 4), 0.9)):
            attention[(bag.coords == np.array(place) * side).all(axis=1)] = value
        write_map(tmp_path / "small.tif", bag, attention)
        height, width = (-(-length // side) * side for length in slide.shape[1:])
    predicted = Predicted(tmp_path, attention=tmp_path / "small.tif")
    item = dataclasses.replace(find([jpeg_slide]).items[0], predictions=(predicted,))
    opened = Opened(item)
    assert named(opened) == [("Attention (rank)", "probabilities")]
    assert opened.layers[0].part == Box(0, 0, height, width)
    places = [(2 * side, 3 * side), (3 * side - 1, 4 * side - 1), (4 * side, 5 * side), (0, 0), (3 * side, 4 * side)]
    assert [values(opened, *place)["layers"][1] for place in places] == ["0.500", "0.500", "1.000", "0.000", "0.000"]
    opened.close()


@pytest.mark.parametrize("parts", [("label",), ("mask",), ("label", "mask")], ids=str)
def test_errors_lie_where_the_label_does_on_a_slide_of_which_a_part_was_scanned(tmp_path, parts):
    random = np.random.default_rng(3)
    pixels = random.integers(0, 256, (640, 1280, 3), np.uint8)
    slide, scan = write_scn(tmp_path / "a.scn", pixels, corner=(64, 128), slide=(800, 2000)), Box(64, 128, 704, 1408)
    ids = {name: np.zeros((800, 2000), np.uint8) for name in ("label", "mask")}
    for each in ids.values():
        each[64:704, 128:1408] = random.integers(0, 3, (80, 160), np.uint8).repeat(8, 0).repeat(8, 1)
    for name, each in ids.items():
        seen = each[64:704, 128:1408] if name in parts else each
        tifffile.imwrite(tmp_path / f"{name}.tif", seen, tile=(64, 64), photometric="minisblack")
    (item,) = find([slide], [tmp_path / "label.tif"]).items
    opened = Opened(dataclasses.replace(item, predictions=(Predicted(tmp_path, mask=tmp_path / "mask.tif"),)))
    assert opened.slide.bounds == scan
    assert not opened.problems
    (number,) = (place for place, layer in enumerate(opened.layers, 1) if layer.name == "Errors")
    found = opened.layers[number - 1]
    assert found.part == (scan if "mask" in parts else None)
    expected = errors(ids["mask"][None], ids["label"][None])
    shown = found.part or Box(0, 0, 800, 2000)
    whole = found.pyramid.read(0, Box.whole(*shown.shape))
    np.testing.assert_array_equal(whole[0], expected[0, shown.y0 : shown.y1, shown.x0 : shown.x1])
    np.testing.assert_array_equal(found.pyramid.read(1, Box(16, 32, 64, 96)), whole[:, 32:128:2, 64:192:2])
    opened.close()


@pytest.mark.parametrize(("dtype", "one", "nodata"), [(np.uint8, 254, 255), (np.float32, 0.996, np.nan)], ids=str)
def test_probabilities_are_0_where_there_is_no_data(jpeg_slide, tmp_path, dtype, one, nodata):
    shares = np.zeros((700, 900, 2), dtype)
    shares[:, :100, 0], shares[:, 100:200] = one, nodata
    settings = {"shape": shares.shape, "dtype": dtype, "nearest": False, "tags": geotiff_tags(None, nodata)}
    path = write_pyramid(tmp_path / "small.tif", [shares], **settings)
    item = dataclasses.replace(find([jpeg_slide]).items[0], predictions=(Predicted(tmp_path, probabilities=path),))
    opened = Opened(item)
    assert labels_at(opened, 50, 150, 250) == [
        "Background 0.996, Foreground 0.000",
        "Background 0.000, Foreground 0.000",
        "Background 0.000, Foreground 0.000",
    ]
    (layer,) = opened.layers
    counted = layer.counts()
    assert counted is not None
    assert counted["shares"][254] == pytest.approx(1 / 9)
    assert counted["shares"][255] == 0
    opened.close()


@pytest.mark.parametrize(
    ("channels", "classes", "named"),
    [
        (1, ("A",), ["A"]),
        (2, ("A", "B"), ["A", "B"]),  # labels, which may overlap
        (2, ("A",), ["Background", "A"]),
        (3, ("A", "B"), ["Background", "A", "B"]),
        (2, (), ["Background", "Foreground"]),
    ],
    ids=str,
)
def test_probabilities_are_called_by_their_classes(jpeg_slide, tmp_path, channels, classes, named):
    path, shape = tmp_path / "small.tif", (700, 900, channels)
    write_pyramid(path, [np.zeros(shape, np.float32)], shape=shape, dtype=np.float32, nearest=False)
    table = ClassTable.parse(classes) if classes else None
    predicted = Predicted(tmp_path, probabilities=path, table=table)
    opened = Opened(dataclasses.replace(find([jpeg_slide]).items[0], predictions=(predicted,)))
    assert [kind.name for kind in opened.layers[0].classes] == named
    opened.close()


@pytest.mark.parametrize("names", [("core", "whole"), ("whole", "core")], ids=str)
def test_labels_of_a_part_and_of_the_whole_slide_are_one_layer(tmp_path, names):
    write_scn(tmp_path / "a.scn", np.full((640, 1280, 3), 9, np.uint8), corner=(64, 128), slide=(800, 2000))
    core, whole = np.zeros((640, 1280), np.uint8), np.zeros((800, 2000), np.uint8)
    core[:64, :128], whole[128:192, 256:384] = 1, 1
    for name, mask in {"core": core, "whole": whole}.items():
        tifffile.imwrite(tmp_path / f"{name}.tif", mask, tile=(64, 64), photometric="minisblack")
    lines = [
        "slide," + ",".join(f"mask:{name}" for name in names),
        "a.scn," + ",".join(f"{name}.tif" for name in names),
    ]
    (tmp_path / "cohort.csv").write_text("\n".join(lines))
    opened = Opened(find([tmp_path / "cohort.csv"]).items[0])
    assert not opened.problems
    places = [(64, 128), (127, 255), (128, 256), (191, 383), (192, 384), (128, 128)]
    shown = [values(opened, *place)["layers"][1] for place in places]
    assert shown == ["core", "core", "whole", "whole", "background", "background"]
    opened.close()


def test_floats_are_drawn_between_those_that_are_numbers(tmp_path):
    pixels = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)
    pixels[0, 0], pixels[5, 5] = np.nan, np.inf
    tifffile.imwrite(tmp_path / "floats.tif", pixels, tile=(16, 16))
    opened = Opened(find([tmp_path / "floats.tif"]).items[0])
    ((low, high),) = opened.shades.ranges
    assert -1 <= low < high <= 1
    assert opened.tile(0, 0, 0, 0) is not None
    opened.close()


def test_each_stain_is_drawn_in_its_own_range_and_colours_in_one(tmp_path):
    """Of a strong stain and a weak one, as fluorescence has them; QuPath and QGIS stretch each channel, too."""
    pixels = np.zeros((4, 64, 64), np.uint16)
    pixels[0, :, :32], pixels[1, :, 32:], pixels[2] = 10000, 100, 7
    tifffile.imwrite(tmp_path / "stains.tif", pixels, photometric="minisblack", tile=(64, 64))
    tifffile.imwrite(tmp_path / "colours.tif", pixels[:3].transpose(1, 2, 0), photometric="rgb", tile=(64, 64))
    stains, colours = (Opened(find([tmp_path / f"{name}.tif"]).items[0]) for name in ("stains", "colours"))
    assert [stains.shades.of(pixels)[0, x].tolist() for x in (0, 63)] == [[255, 0, 0], [0, 255, 0]]
    assert [colours.shades.of(pixels[:3])[0, x].tolist() for x in (0, 63)] == [[255, 0, 0], [0, 3, 0]]
    for opened in (stains, colours):
        opened.close()


def test_a_mask_is_of_the_slide_with_the_longest_name_that_it_has(jpeg_slide, jpeg_label, tmp_path):
    (tmp_path / "masks").mkdir()
    for name in ("case", "case.2"):
        shutil.copy(jpeg_slide, tmp_path / f"{name}.tif")
    for name in ("case.2.tif", "case.tissue.tif"):
        shutil.copy(jpeg_label, tmp_path / "masks" / name)
    found = {item.name: [path.name for (path,) in item.labels] for item in find([tmp_path]).items}
    assert found == {"case": ["case.tissue.tif"], "case.2": ["case.2.tif"]}
