"""A cohort's features: TRIDENT's layout, resumed, shared, and one bad slide that does not stop the others."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pydicom
import pytest
import tifffile
import torch

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.errors import ConfigError, ImageError, ModelError, WriteError
from gigagrad.events import Event, JobAdvanced, Notice
from gigagrad.models import resolve_encoder
from gigagrad.prediction import EmbedConfig, embed, open_features
from tests.images.dicom import write_dicom

ENCODER = "tests.prediction.counting:Counting"
HERE = "20x_64px_0px_overlap/features_Counting"


@pytest.fixture
def slides(tmp_path, jpeg_slide):
    """Three slides of other sizes."""
    folder = tmp_path / "slides"
    folder.mkdir()
    for number, name in enumerate("abc"):
        write(folder / f"{name}.tif", tifffile.imread(jpeg_slide)[: 700 - 64 * number])
    return folder


def write(path, pixels):
    """Write a slide of 0.5 um/px."""
    resolution = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", **resolution)


class Run:
    """Embeds the three slides, and keeps what was told of each."""

    def __init__(self, slides, out):
        self.given = {"slides": [slides], "encoder": ENCODER, "out": out, "patch_size": 64}
        self.events: list[Event] = []

    def __call__(self, **settings):
        self.events.clear()
        return embed(listeners=[self.events.append], **{**self.given, **settings})

    @property
    def words(self):
        advanced = [event for event in self.events if isinstance(event, JobAdvanced)]
        return [event.detail for event in advanced if event.job.startswith("embed")]

    @property
    def notices(self):
        return [event.text for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def run(tmp_path, slides):
    return Run(slides, tmp_path / "out")


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_files_are_trident_s(run, tmp_path, slides):
    """Names, shapes, dtypes and attributes that `read_coords` and `load_features` of TRIDENT's pipeline rely on."""
    results = run()
    assert [made.name for made in results] == ["a", "b", "c"]
    assert JobAdvanced("patches", results[0].patches, results[0].patches, "") in run.events
    for made in results:
        assert made.file == tmp_path / "out" / HERE / f"{made.name}.h5"
        with h5py.File(made.file) as file:
            features, coords = file["features"], file["coords"]
            assert features.shape == (made.patches, made.length) == (len(coords), 5)
            assert (features.dtype, coords.dtype) == (np.float32, np.int64)
            assert features.attrs["encoder"] == "Counting"
            assert features.attrs["name"] == made.name
            assert features.attrs["savetodir"] == str(made.file.parent)
            said = dict(coords.attrs)
            width, height = 900, {"a": 700, "b": 636, "c": 572}[made.name]
            assert {name: said[name] for name in sorted(said)} == {
                "level0_height": height,
                "level0_magnification": 20,
                "level0_width": width,
                "name": made.name,
                "overlap": 0,
                "patch_size": 64,
                "patch_size_level0": 64,
                "savetodir": str(tmp_path / "out" / "20x_64px_0px_overlap"),
                "target_magnification": 20,
            }
            assert said["patch_size"] * said["level0_magnification"] // said["target_magnification"] == 64
        with gg.open_bag(slides / f"{made.name}.tif", 64, 0.5) as bag, torch.inference_mode():
            torch.random.manual_seed(0)
            want = resolve_encoder(ENCODER)(torch.as_tensor(np.asarray(bag.read(0, len(bag)))))
            found = open_features(made.file)
            np.testing.assert_allclose(found.features, want, rtol=1e-5)
            assert np.array_equal(np.asarray(found.coords), bag.coords)


def test_settings_take_the_place_of_a_config_s(slides, tmp_path):
    config = EmbedConfig(slides=(slides,), encoder=ENCODER, out=tmp_path / "out", patch_size=64)
    (made,) = embed(config, slides=[slides / "c.tif"], name="other")
    assert made.file == tmp_path / "out" / "20x_64px_0px_overlap" / "features_other" / "c.h5"
    assert gg.open_features(made.file).features.shape == (made.patches, 5)


def test_other_patches_have_other_folders(run, tmp_path):
    results = run(patch_mpp=0.7, patch_size=48, overlap=16, name="mine", tissue="all")
    assert results[0].file == tmp_path / "out" / "0.7mpp_48px_16px_overlap" / "features_mine" / "a.h5"
    with h5py.File(results[0].file) as file:
        said = dict(file["coords"].attrs)
        assert (said["patch_size"], said["patch_size_level0"], said["overlap"]) == (48, 67, 16)
        assert said["patch_size"] * said["level0_magnification"] / said["target_magnification"] == pytest.approx(67)
        x = np.unique(file["coords"][:, 0])
        assert np.all(np.diff(x) == 45)  # 32 px of the patches


def test_what_is_done_is_left_alone(run, tmp_path, slides):
    run(slides=[slides / "a.tif", slides / "b.tif"])
    before = inodes(tmp_path / "out" / HERE)
    results = run()
    assert [made.name for made in results] == ["a", "b", "c"]
    assert run.words[:2] == ["a: done before", "b: done before"]
    assert "patches" in run.words[2]
    after = inodes(tmp_path / "out" / HERE)
    assert {name: after[name] for name in before} == before
    write(slides / "b.tif", tifffile.imread(slides / "b.tif")[:500])
    run()
    assert ["done before" in words for words in run.words] == [True, False, True]  # the slide is another one now
    run(overwrite=True)
    assert not any("done before" in words for words in run.words)


def test_features_of_another_encoder_or_of_other_patches_stay(run, tmp_path, slides):
    run()
    before = inodes(tmp_path / "out" / HERE)
    for other in ({"encoder": "tests.prediction.counting:Twice", "name": "Counting"}, {"tissue": "all"}):
        with pytest.raises(ConfigError, match=r"another encoder, or of other patches; choose another --out or --name"):
            run(**other)
    with h5py.File(tmp_path / "out" / HERE / "c.h5", "r+") as file:
        file["features"].attrs["gigagrad"] = "{}"
    with pytest.raises(ConfigError, match=r"c\.h5 holds features of another encoder"):
        run()
    (tmp_path / "out" / HERE / "b.h5").write_bytes(b"mine")
    with pytest.raises(WriteError, match=r"b\.h5 exists, but was not written here"):
        run()
    assert inodes(tmp_path / "out" / HERE) == before
    run(tissue="all", overwrite=True)
    assert len(open_features(tmp_path / "out" / HERE / "b.h5").features) == 150


def test_a_killed_run_goes_on_where_it_was(tmp_path, slides):
    """The process is killed with a file half written; nothing of it counts."""
    (tmp_path / "nets.py").write_text(
        "import glob, os, time, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        tried = type(x) is not torch.Tensor or x.device.type == 'meta'\n"
        "        if not tried and len(x) < 16 and os.path.exists('wait') and glob.glob('out/*/*/a.h5'):\n"
        "            open('waiting', 'w').close()\n"
        "            time.sleep(600)\n"
        "        return x.float().mean((2, 3))\n"
    )
    command = [sys.executable, "-m", "gigagrad", "embed", "--encoder", "nets:Net", "--out", "out", "--patch-size", "64"]
    command += ["--slides", *map(str, sorted(slides.iterdir()))]
    folder = tmp_path / "out" / "20x_64px_0px_overlap" / "features_Net"

    def start():
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    (tmp_path / "wait").touch()
    killed = start()
    while not (tmp_path / "waiting").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {path.name for path in folder.iterdir() if path.suffix == ".h5"} == {"a.h5"}
    halves = [path for path in folder.iterdir() if path.suffix != ".h5"]
    assert any(path.name.startswith(".b.h5") for path in halves)
    (tmp_path / "wait").unlink()
    before = inodes(folder)["a.h5"]
    said, _ = start().communicate()
    assert "a: done before" in said
    assert inodes(folder).keys() == {"a.h5", "b.h5", "c.h5"}
    assert inodes(folder)["a.h5"] == before
    for path in folder.iterdir():
        assert np.isfinite(open_features(path).features).all()


def test_shares_make_the_files_of_one_process(run, tmp_path):
    run()
    names = []
    for number in (1, 2):
        results = run(out=tmp_path / "shared", share=f"{number}/2")
        names += [made.name for made in results]
    assert sorted(names) == ["a", "b", "c"]
    for one in (tmp_path / "out" / HERE).iterdir():
        other = tmp_path / "shared" / HERE / one.name
        assert np.array_equal(open_features(one).features, open_features(other).features)


def test_a_slide_that_fails_does_not_stop_the_others(run, tmp_path, slides):
    shutil.copy(slides / "b.tif", slides / "d.tif")
    (slides / "b.tif").write_bytes(b"no slide")
    write(slides / "c.tif", np.full((300, 300, 3), 255, np.uint8))
    with pytest.raises(ImageError, match=r"b: .*\(2 of 4 slides failed\)"):
        run()
    assert inodes(tmp_path / "out" / HERE).keys() == {"a.h5", "d.h5"}
    assert any("c has no patch" in text for text in run.notices)  # of nothing but glass


def test_a_slide_without_a_resolution_names_the_flag(run, slides, tmp_path):
    for path in slides.iterdir():
        tifffile.imwrite(path, tifffile.imread(path), tile=(64, 64), photometric="rgb")
    with pytest.raises(ImageError, match="no micrometres per pixel in its metadata; give them with --mpp"):
        run()
    assert len(run(mpp=0.5)) == 3
    table = tmp_path / "cohort.csv"
    table.write_text("slide,mpp\n" + "".join(f"slides/{name}.tif,1\n" for name in "abc"))
    with h5py.File(run(slides=[table], out=tmp_path / "other", patch_mpp=1.0)[0].file) as file:
        assert file["coords"].attrs["level0_magnification"] == 10


def test_patches_come_from_somebody_s_coordinates(run, tmp_path, slides):
    (tmp_path / "coords" / "patches").mkdir(parents=True)
    for name in "ab":
        with gg.open_bag(slides / f"{name}.tif", 64, 0.5, tissue=None) as bag:
            gg.images.write_coordinates(tmp_path / "coords" / "patches" / f"{name}_patches.h5", bag)
    (tmp_path / "coords" / "c.csv").write_text("x,y\n0,0\n128,64\n")
    results = run(coords=tmp_path / "coords")
    assert [made.patches for made in results] == [165, 150, 2]
    assert np.asarray(open_features(results[2].file).coords).tolist() == [[0, 0], [128, 64]]
    (tmp_path / "coords" / "c.csv").unlink()
    with pytest.raises(ImageError, match=r"has no corners of c: neither c\.h5 nor"):
        run(coords=tmp_path / "coords", out=tmp_path / "other")


def test_tissue_is_that_of_a_column(run, tmp_path, slides):
    mask = np.zeros((700, 900), np.uint8)
    mask[:128, :64] = 1
    tifffile.imwrite(tmp_path / "a-mask.tif", mask)
    table = tmp_path / "cohort.csv"
    table.write_text("slide,mask\nslides/a.tif,a-mask.tif\n")
    found = open_features(run(slides=[table], tissue="mask")[0].file)
    assert np.asarray(found.coords).tolist() == [[0, 0], [0, 64]]
    with pytest.raises(ImageError, match="b has no mask of tissue"):
        run(slides=[slides / "b.tif"], tissue="mask")


def test_features_are_of_other_outlines_of_tissue_however_large_their_file(run, tmp_path):
    """The file is of one size, and differs where no sample of large ones is."""
    table, outlines = tmp_path / "cohort.csv", tmp_path / "a.geojson"
    table.write_text(f"slide,mask\nslides/a.tif,{outlines.name}\n")
    text = (
        '{"type": "FeatureCollection",' + 40_000 * " " + '"features": [{"type": "Feature", "properties": {}, '
        '"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [SIDE, 0], [SIDE, 128], [0, 128], [0, 0]]]}}]'
    )
    outlines.write_text(text.replace("SIDE", " 64") + 5_000_000 * " " + "}")
    assert run(slides=[table], tissue="mask")[0].patches == 2
    outlines.write_text(text.replace("SIDE", "128") + 5_000_000 * " " + "}")
    with pytest.raises(ConfigError, match="of other patches"):
        run(slides=[table], tissue="mask")


def test_weights_of_a_file_and_of_nobody(run, tmp_path, slides):
    torch.manual_seed(5)
    net = resolve_encoder("timm:resnet10t")
    torch.save(net.state_dict(), tmp_path / "net.pt")
    given = {"slides": [slides / "a.tif"], "encoder": "timm:resnet10t"}
    (mine,) = run(**given, weights=tmp_path / "net.pt", name="mine")
    assert any("tensors begin as in" in text for text in run.notices)
    (random,) = run(**given)
    assert random.file.parent.name == "features_resnet10t"
    assert mine.length == random.length == 512
    assert not np.allclose(open_features(mine.file).features, open_features(random.file).features)
    assert any("weights of timm:resnet10t are random" in text for text in run.notices)
    run(**given)
    assert run.words == ["a: done before"]  # random, but the same


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"encoder": "timm:resnet81"}, ModelError, "did you mean 'timm:resnet18'|'resnet18'"),
        ({"encoder": "nothing"}, ModelError, "nothing"),
        ({"weights": "none.pt"}, ModelError, r"none\.pt"),
        ({"overlap": 64}, ConfigError, "overlap by less than that, got 64"),
        ({"mpp": 0}, ConfigError, "mpp must be a positive number"),
        ({"patch_size": 0}, ConfigError, "patch_size must be at least 1"),
        ({"tissue": "otsu"}, ConfigError, "tissue must be one of auto, mask, all"),
        ({"name": "../x"}, ConfigError, "part of a folder's name, got '../x'"),
        ({"device": "tpu"}, ConfigError, "tpu"),
        ({"slides": ()}, ConfigError, "no slides to embed"),
        ({"memory": "64 MiB"}, ImageError, "smallest budget that works"),
    ],
)
def test_errors_are_told_before_anything_is_written(run, tmp_path, settings, error, told):
    with pytest.raises(error, match=told):
        run(**settings)
    assert not list((tmp_path / "out").rglob("*.h5"))


def test_the_command_says_where_features_are(tmp_path, slides, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["embed", "--slides", str(slides), "--encoder", ENCODER, "--out", "out", "--patch-size", "64"]
    assert main(command) == 0
    assert f"3 of 3 slides are in out/{HERE}" in " ".join(capsys.readouterr().out.split())
    (slides / "b.tif").write_bytes(b"no slide")
    assert main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "b" in line
    assert main([*command[:-1], "-1"]) == 2
    assert "patch_size must be at least 1" in capsys.readouterr().err


def test_another_instance_of_a_slide_that_was_replaced_is_noticed(tmp_path):
    """The slide was known by the instance that named it alone."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    first, other = (write_dicom(tmp_path / name, shown) for name, shown in (("a", pixels), ("b", 255 - pixels)))
    given = {"slides": [first / "1.dcm"], "encoder": ENCODER, "out": tmp_path / "out", "patch_size": 64}
    embed(**given, tissue="all")
    features = open_features(tmp_path / "out" / HERE / "1.h5").features.copy()
    instance = pydicom.dcmread(other / "0.dcm")
    instance.SeriesInstanceUID = pydicom.dcmread(first / "1.dcm").SeriesInstanceUID
    instance.save_as(first / "0.dcm")
    embed(**given, tissue="all")
    assert not np.array_equal(open_features(tmp_path / "out" / HERE / "1.h5").features, features)
