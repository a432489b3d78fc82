"""Where patches are, as TRIDENT, CLAM and tables say it; what hostile files say is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from gigagrad.errors import ConfigError, ImageError, WriteError
from gigagrad.images import open_image
from gigagrad.images.coordinates import magnification, read_coordinates, trident_attributes, write_coordinates
from gigagrad.masks import open_bag

h5py = pytest.importorskip("h5py")

CORNERS = np.array([[0, 0], [128, 64], [800, 600]])
TRIDENT = {
    "patch_size": 64,
    "patch_size_level0": 128,
    "level0_magnification": 40,
    "target_magnification": 20,
    "overlap": 0,
    "name": "small",
    "savetodir": "./job/20x_64px_0px_overlap",
    "level0_width": 900,
    "level0_height": 700,
}
CLAM = {
    "patch_size": 64,
    "patch_level": 1,
    "downsample": (2.0, 2.0),
    "downsampled_level_dim": (450, 350),
    "level_dim": (450, 350),
    "name": "small",
    "save_path": "./patches",
}


@pytest.fixture
def slide(jpeg_slide):
    with open_image(jpeg_slide) as image:
        yield image


@pytest.fixture
def write(tmp_path):
    """A function that writes `coords` with these attributes."""

    def written(attributes, corners=CORNERS, more=()):
        path = tmp_path / "small_patches.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("coords", data=corners, maxshape=(None, *np.shape(corners)[1:]), chunks=True)
            file["coords"].attrs.update(attributes)
            for name in more:
                file.create_dataset(name, data=np.zeros((len(corners), 8), np.float32))
        return path

    return written


def without(*names):
    return {name: value for name, value in TRIDENT.items() if name not in names}


@pytest.mark.parametrize("attributes", [
    TRIDENT,
    without("level0_width", "level0_height"),  # as it wrote them in 2025
    without("patch_size_level0"),
    TRIDENT | {"patch_size_level0": np.float64(128)},
])  # fmt: skip
def test_tridents_files_are_read(attributes, slide, write):
    found = read_coordinates(write(attributes), slide)
    assert found.corners.dtype == np.int64
    assert np.array_equal(found.corners, CORNERS)
    assert (found.size, found.side) == (64, 128)


def test_files_of_features_say_where_they_are_from(slide, write):
    found = read_coordinates(write(TRIDENT, more=["features"]), slide)
    assert (len(found.corners), found.size, found.side) == (3, 64, 128)


@pytest.mark.parametrize(("changed", "size", "side"), [
    ({}, 64, 128),
    ({"patch_level": 0, "level_dim": (900, 700), "downsample": (1.0, 1.0)}, 64, 64),
    ({"custom_downsample": 2}, 32, 128),
])  # fmt: skip
def test_clams_files_are_read(changed, size, side, slide, write):
    found = read_coordinates(write(CLAM | changed, CORNERS.astype(np.int32)), slide)
    assert np.array_equal(found.corners, CORNERS)
    assert (found.size, found.side) == (size, side)


def test_files_that_say_nothing_of_patches_are_taken_as_they_are(slide, write):
    found = read_coordinates(write({}), slide)
    assert (found.size, found.side) == (None, None)


@pytest.mark.parametrize(("text", "first"), [
    ("x,y\n3,5\n7,9\n", [3, 5]),
    ("\ufeffX;Y\r\n3;5\r\n7;9\r\n", [3, 5]),
    ("x\ty\n3\t5\n7\t9\n", [3, 5]),
    ("\ufeffslide, Y ,X,score\na,5,3,0.1\n\nb,9,7.0,\n", [3, 5]),
])  # fmt: skip
def test_tables_are_read(text, first, slide, tmp_path):
    path = tmp_path / "patches.csv"
    path.write_text(text, encoding="utf-8")
    assert read_coordinates(path, slide).corners.tolist() == [first, [7, 9]]


@pytest.mark.parametrize(("text", "told"), [
    ("", "has the columns none; expected x and y"),
    ("left,top\n1,2\n", "has the columns left, top; expected x and y"),
    ("x,y\n", "has no patches"),
    ("x,y\n1\n", "no table of coordinates"),
    ("x,y\n1,two\n", "no table of coordinates"),
    ("x,y\n1,2.5\n", "no pixels; expected whole numbers"),
    ("x,y\n1,nan\n", "no pixels"),
    ("x,y\n1,1e30\n", "no pixels"),
])  # fmt: skip
def test_tables_that_are_none_are_refused(text, told, slide, tmp_path):
    path = tmp_path / "patches.csv"
    path.write_text(text)
    with pytest.raises(ImageError, match=told):
        read_coordinates(path, slide)


@pytest.mark.parametrize(("attributes", "told"), [
    (TRIDENT | {"level0_width": 1800}, r"of a slide of 1800 x 700 px at level 0, and small has 900 x 700 px there"),
    (CLAM | {"level_dim": (225, 175)}, r"of a slide of 225 x 175 px at level 1, and small has 450 x 350 px there"),
    (CLAM | {"patch_level": 3}, r"patches of level 3, and small has 3 levels"),
])  # fmt: skip
def test_coordinates_of_another_slide_are_refused(attributes, told, slide, write):
    with pytest.raises(ImageError, match=told):
        read_coordinates(write(attributes), slide)


@pytest.mark.parametrize(("corners", "told"), [
    (np.zeros(0), "has no patches"),  # what TRIDENT writes of a slide without tissue
    (np.zeros((3, 3), np.int64), r"\(3, 3\) of int64; expected x and y"),
    (np.full((3, 2), 0.5), "no pixels; expected whole numbers"),
    (np.full((3, 2), 2**40), "no pixels"),
    (np.array([[b"0", b"1"]]), "expected x and y"),
])  # fmt: skip
def test_what_is_no_corner_is_refused(corners, told, slide, write):
    with pytest.raises(ImageError, match=told):
        read_coordinates(write(TRIDENT, corners), slide)
    with pytest.raises(ImageError, match=told):
        read_coordinates(corners, slide)


def created(*shape, **options):
    return lambda file, _: file.create_dataset("coords", shape, np.int64, **options)


def linked(link):
    def make(file, path):
        file["coords"] = link(path)

    return make


def beside(file, path):
    file.create_dataset("coords", (3, 2), np.int64, external=[(str(path.with_name("secret")), 0, 48)])


def virtual(file, path):
    layout = h5py.VirtualLayout((3, 2), np.int64)
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "coords", (3, 2))
    file.create_virtual_dataset("coords", layout)


def plugged(file, path):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((3, 2))
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    h5py.h5d.create(file.id, b"coords", h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple((3, 2)), plist)


@pytest.mark.parametrize(("make", "told"), [
    (linked(lambda path: h5py.ExternalLink(str(path.with_name("other.h5")), "coords")), "leads elsewhere"),
    (linked(lambda _: h5py.SoftLink("/other")), "leads elsewhere"),
    (lambda file, _: file.create_group("coords"), "leads elsewhere"),
    (beside, "in other files"),
    (virtual, "in other files"),
    (lambda file, _: file.create_dataset("coords", (2, 2), h5py.string_dtype()), "expected x and y"),
    (created(10**9, 2, chunks=(1000, 2)), "up to 10000000 patches"),
    (created(10**6, 2, chunks=(10**6, 2), maxshape=(None, 2**20)), None),
    (created(10, 2, chunks=(10**8, 2), maxshape=(None, 2)), "at a time"),
    (plugged, "the filter 32015; expected gzip"),
    (lambda file, _: file.create_dataset("features", (3, 2), "f4"), "has no coords, but 'features'"),
    (lambda file, _: [file.create_dataset(name, (3, 2), "f4") for name in ("coords", "imgs")], "create_patches_fp.py"),
])  # fmt: skip
def test_hostile_files_are_refused(make, told, slide, tmp_path):
    path = tmp_path / "small_patches.h5"
    path.with_name("secret").write_bytes(bytes(48))
    for target in (path.with_name("other.h5"), path):
        with h5py.File(target, "w") as file:
            if target == path:
                make(file, path)
            else:
                file["coords"] = CORNERS
    if told is None:
        assert len(read_coordinates(path, slide).corners) == 10**6
        return
    with pytest.raises(ImageError, match=told):
        read_coordinates(path, slide)


def test_attributes_that_are_no_numbers_say_nothing(slide, write):
    strange = {
        "patch_size": "64",
        "patch_size_level0": np.arange(10),
        "level0_magnification": -4,
        "patch_level": "0",
    }
    found = read_coordinates(write(strange | {"target_magnification": np.nan}), slide)
    assert (found.size, found.side) == (None, None)


def test_a_truncated_file_is_told(slide, write):
    path = write(TRIDENT)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ImageError, match="cannot read"):
        read_coordinates(path, slide)


def test_the_extra_is_named(slide, write, monkeypatch):
    path = write(TRIDENT)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"pip install 'gigagrad\[bags\]'"):
        read_coordinates(path, slide)


def test_a_missing_file_is_told(slide, tmp_path):
    with pytest.raises(ImageError, match="no file of coordinates"):
        read_coordinates(tmp_path / "none.h5", slide)


@pytest.mark.parametrize(("mpp", "side", "target"), [(0.5, 64, 20), (1.0, 128, 10), (0.75, 96, 20 / 1.5)])
def test_files_are_written_as_trident_reads_them(mpp, side, target, jpeg_slide, slide, tmp_path):
    path = tmp_path / "job" / "patches" / "small_patches.h5"
    path.parent.mkdir(parents=True)
    with open_bag(jpeg_slide, 64, mpp, step=48) as bag:
        assert write_coordinates(path, bag) == path
        with pytest.raises(WriteError, match="exists already"):
            write_coordinates(path, bag)
        write_coordinates(path, bag, overwrite=True)
    with h5py.File(path) as file:  # by names and types that its `read_coords` and `extract_patch_features` use
        assert list(file) == ["coords"]
        coords, said = file["coords"][:], dict(file["coords"].attrs)
    assert coords.dtype == np.int64
    assert np.array_equal(coords, bag.coords)
    assert {name: type(value) for name, value in said.items() if name != "target_magnification"} == {
        name: str if isinstance(value, str) else np.int64
        for name, value in TRIDENT.items()
        if name != "target_magnification"
    }
    assert said["target_magnification"] == pytest.approx(target)
    assert isinstance(said["target_magnification"], np.int64) == float(target).is_integer()
    wanted = TRIDENT | {
        "patch_size_level0": side,
        "level0_magnification": 20,
        "overlap": 16,
        "savetodir": str(tmp_path / "job"),
    }
    assert said | {"target_magnification": 0} == wanted | {"target_magnification": 0}
    assert round(said["patch_size"] * said["level0_magnification"] / said["target_magnification"]) == side
    found = read_coordinates(path, slide)
    assert (found.size, found.side) == (64, side)
    with open_bag(jpeg_slide, 64, mpp, coords=path) as again:
        assert np.array_equal(again.coords, bag.coords)
        assert again.patch_size_level0 == side


@pytest.mark.parametrize(("mpp", "power"), [(0.1, 80), (0.16, 60), (0.2527, 40), (0.499, 20), (0.6, 10), (2.3, 5)])
def test_magnifications_are_tridents(mpp, power):
    assert magnification(mpp) == power


def test_what_trident_cannot_say_is_refused(tmp_path):
    with pytest.raises(ImageError, match="coarser than the 5x"):
        magnification(2.4)
    with (
        open_bag(np.zeros((3, 64, 64), np.uint8), 32, mpp=None, tissue=None) as bag,
        pytest.raises(ImageError, match="no micrometres per pixel"),
    ):
        trident_attributes(bag, tmp_path)
