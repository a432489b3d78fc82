"""Exported networks: files that predict as their network does, at any size and tile, or a refusal."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cli import main
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import BudgetError, ConfigError, GigagradError, ImageError, ModelError, WriteError
from gigagrad.events import Event, TileDone
from gigagrad.images import open_image
from gigagrad.images.views import ArrayImage
from gigagrad.models import load, resolve, save_model
from gigagrad.models.exported import ExportedNetwork, Geometry
from gigagrad.prediction.export import export
from gigagrad.prediction.exported import ExportedEngine
from gigagrad.prediction.predict import predict

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the exporters of PyTorch and ONNX warn each other of

SMALL, GLOBAL, SCORES = (f"{__name__}:{name}" for name in ("Small", "Centred", "Scores"))


class Small(nn.Module):
    """A U-Net in small: a stride, a pooling that keeps odd rows, transposed convolutions, a norm, a skip."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.full = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        half = torch.relu(self.norm(self.down(x / 255)))
        deep = torch.relu(self.deep(nn.functional.max_pool2d(half, 2, ceil_mode=True)))
        half = half + self.up(deep)[..., : half.shape[-2], : half.shape[-1]]
        return self.head(self.full(half, output_size=x.shape[-2:]))


class Centred(Small):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean((2, 3), keepdim=True)


class Scores(nn.Module):
    def forward(self, x):
        return x.float().mean((2, 3))[:, :2]


def saved(path, spec, model):
    torch.manual_seed(0)
    save_model(path, spec, model() if isinstance(model, type) else model)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The model's file, and the exported one."""
    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    run = saved(folder / "small.pt", SMALL, Small)
    return run, export(run, folder / "exported", trust=[SMALL]).folder


@pytest.fixture(scope="module")
def paper(network_dir, tmp_path_factory):
    """The paper's network, exported by the command."""
    folder = tmp_path_factory.mktemp("paper") / "exported"
    assert main(["export", "--run", str(network_dir), "--out", str(folder)]) == 0
    return folder


def image_of(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (channels, height, width), np.uint8)


@pytest.mark.parametrize(("height", "width"), [(61, 90), (37, 128), (4, 7)])
@pytest.mark.parametrize("tile", [(4, 8), (16, 12), (64, 200)])
def test_it_predicts_as_the_engine_whatever_the_tiles(small, height, width, tile, monkeypatch):
    run, folder = small
    pixels = image_of(height, width)
    expected = gg.compile(load(run, [SMALL])).forward(pixels)
    exported = ExportedEngine(ExportedNetwork.read(folder / "model.onnx"))
    monkeypatch.setattr(exported, "_tile", lambda sink, shape: tile)
    assert torch.allclose(exported.forward(ArrayImage(pixels)), expected, rtol=0, atol=1e-5)


def test_progress_counts_what_is_computed_alone(small, monkeypatch):
    heard: list[Event] = []
    exported = ExportedEngine(ExportedNetwork.read(small[1] / "model.onnx"))
    monkeypatch.setattr(exported, "_tile", lambda sink, shape: (16, 16))
    exported.events.subscribe(heard.append)
    cells = np.zeros((4, 4), bool)
    cells[1, 1:3] = True
    exported.forward(ArrayImage(image_of(64, 64)), within=cells)
    assert [(event.done, event.total) for event in heard if isinstance(event, TileDone)] == [(1, 2), (2, 2)]


def test_the_file_says_what_it_takes(small):
    said = json.loads((small[1] / "config.json").read_text())
    assert said["format"] == "gigagrad export"
    assert (said["spec"], said["channels"], said["outputs"], said["int8"]) == (SMALL, 3, 2, False)
    assert said["stride"] == {"y": 4, "x": 4}
    assert (small[1] / "model.pt2").stat().st_size > 0
    # A pixel reads 5 half pixels deep and around: the deepest path, at stride 4.
    geometry = ExportedNetwork.read(small[1] / "model.onnx").geometry
    assert all(6 <= margin <= 12 for pair in geometry.margins for margin in pair)


def test_crops_begin_at_strides_and_end_there_or_with_the_image():
    geometry = Geometry((4, 8), ((5, 6), (1, 0)))
    assert geometry.crop(Box(12, 16, 20, 24), 100, 100) == Box(4, 8, 28, 24)
    assert geometry.crop(Box(0, 0, 8, 8), 9, 11) == Box(0, 0, 9, 8)
    assert geometry.crop(Box(92, 96, 99, 101), 99, 101) == Box(84, 88, 99, 101)


@pytest.mark.parametrize("int8", [False, True])
def test_predict_takes_it_as_a_run(network_dir, paper, jpeg_slide, jpeg_label, tmp_path, int8, capsys):
    (tmp_path / "cohort.csv").write_text(f"slide,mask,split\n{jpeg_slide},{jpeg_label},train\n")
    folder = tmp_path / "exported" if int8 else paper
    if int8:
        command = ["export", "--run", str(network_dir), "--out", str(folder), "--int8", str(tmp_path / "cohort.csv")]
        assert main(command) == 0
        assert "in float32" in capsys.readouterr().out
    assert (folder / "model.pt2").exists() == (not int8)
    found = {}
    for name, run in (("run", network_dir), ("found", folder)):
        outputs = "mask", "probabilities", "geojson"
        slides = [tmp_path / "cohort.csv"]
        (result,) = predict(run, slides=slides, out=tmp_path / name, outputs=outputs, only_tissue="auto")
        assert result.status == "done", result.error
        with open_image(tmp_path / name / result.files["probabilities"]) as image:
            found[name] = np.asarray(image.read(Box.whole(*image.shape[1:]))).astype(int)
        assert result.dice is not None
    assert np.abs(found["run"] - found["found"]).max() <= (30 if int8 else 1)


def test_eight_bits_are_calibrated_on_training_slides_of_split_files_and_of_folds(small, jpeg_slide, tmp_path):
    (tmp_path / "unseen.tif").write_bytes(b"no slide, which nobody reads")
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(f"slide_id,slide\nseen,{jpeg_slide}\nunseen,unseen.tif\n")
    (tmp_path / "splits_0.csv").write_text(f",train,val,test\n0,{jpeg_slide.stem},,unseen\n")
    export(small[0], tmp_path / "listed", int8=cohort, trust=[SMALL])
    cohort.write_text(f"slide,fold\n{jpeg_slide},0\nunseen.tif,1\n")
    with pytest.raises(ConfigError, match="no training slides"):
        export(small[0], tmp_path / "folds", int8=cohort, trust=[SMALL])


@pytest.mark.parametrize(("spec", "model", "said"), [
    (GLOBAL, Centred, "reads the whole image at once"),
    (SCORES, Scores, "is no image of the slide's size"),
])  # fmt: skip
def test_what_reads_the_whole_image_is_refused_by_the_operator(spec, model, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        export(saved(tmp_path / "model.pt", spec, model), tmp_path / "out", trust=[spec])
    assert not (tmp_path / "out").exists()


class Stretched(nn.Module):
    """Resizes by the ratio of the whole image's sizes."""

    def forward(self, x):
        half = nn.functional.avg_pool2d(x.float(), 2, ceil_mode=True)
        return nn.functional.interpolate(half, size=x.shape[-2:], mode="bilinear", align_corners=True)[:, :1]


def test_what_depends_on_the_size_of_the_image_is_refused_by_the_check(tmp_path):
    spec = f"{__name__}:Stretched"
    with pytest.raises(GigagradError, match=r"differ by|reads the whole image"):
        export(saved(tmp_path / "model.pt", spec, Stretched), tmp_path / "out", trust=[spec])
    assert not (tmp_path / "out").exists()


def test_memory_chooses_tiles(small, monkeypatch):
    exported = ExportedEngine(ExportedNetwork.read(small[1] / "model.onnx"), memory="1 KiB")
    with pytest.raises(BudgetError, match="does not fit"):
        exported.forward(ArrayImage(image_of(300, 300)))
    monkeypatch.setattr(exported, "_device", SimpleNamespace(held_bytes=lambda: 1000, free_bytes=lambda: 10**10))
    tiles: list[tuple[int, int]] = []
    nothing_held: Any = SimpleNamespace(held_bytes=lambda tile_height, shape: 0)
    for pixels in (2000, 20_000, None):
        exported._budget_bytes = None if pixels is None else 1000 + pixels * round(exported.network.bytes_per_pixel)
        tiles.append(exported._tile(nothing_held, (1, 2, 3001, 3001)))
    assert tiles[0] < tiles[1] < tiles[2]
    for height, width in tiles:
        assert height == width
        assert height % 4 == 0
        assert -(-3001 // height) * height - 3001 < height
    assert tiles[2][0] * -(-3001 // tiles[2][0]) - 3001 < 100  # about one size
    assert exported._tile(nothing_held, (1, 2, 50, 51)) == (52, 52)


@pytest.mark.parametrize(
    "settings", [{"device": "cuda"}, {"scratch": "."}, {"patch_size": 224}, {"outputs": ("attention",)}]
)
def test_settings_of_engines_are_refused(small, jpeg_slide, tmp_path, settings):
    with pytest.raises(ConfigError, match="leave"):
        predict(small[1], slides=[jpeg_slide], out=tmp_path / "out", **settings)


def test_other_images_are_refused(small):
    exported = ExportedEngine(ExportedNetwork.read(small[1] / "model.onnx"))
    for pixels in (image_of(8, 8)[:1], image_of(8, 8).astype(np.uint16)):
        with pytest.raises(ImageError, match="the exported network takes 3 of uint8"):
            exported.forward(ArrayImage(pixels))


def test_other_commands_name_the_run(small, jpeg_slide, tmp_path, capsys):
    assert main(["attribute", "--run", str(small[1]), "--slides", str(jpeg_slide), "--out", str(tmp_path / "a")]) == 2
    assert "is an exported network, which 'predict' runs alone" in capsys.readouterr().err


def damage(folder, **changes):
    path = folder / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | changes))


@pytest.mark.parametrize("changes", [
    {"stride": {"y": 0, "x": 4}}, {"stride": 4}, {"margins": {"y": [1], "x": [1, 2]}}, {"channels": "3"},
    {"outputs": 2**40}, {"format": "gigagrad model"}, {"spec": "a\nb"}, {"bytes_per_pixel": True},
])  # fmt: skip
def test_a_damaged_config_is_one_line(small, tmp_path, changes):
    folder = Path(tmp_path / "x")
    folder.mkdir()
    for name in ("config.json", "model.onnx"):
        (folder / name).write_bytes((small[1] / name).read_bytes())
    damage(folder, **changes)
    with pytest.raises(ModelError, match="cannot read the exported network"):
        ExportedNetwork.read(folder / "model.onnx")


def test_a_damaged_network_is_one_line(small, tmp_path):
    for content in (b"", b"nothing of the kind", (small[1] / "model.onnx").read_bytes()[:-300]):
        (tmp_path / "model.onnx").write_bytes(content)
        (tmp_path / "config.json").write_bytes((small[1] / "config.json").read_bytes())
        with pytest.raises(ModelError, match="ONNX Runtime"):
            ExportedEngine(ExportedNetwork.read(tmp_path / "model.onnx")).forward(ArrayImage(image_of(16, 16)))


def test_weights_outside_of_the_folder_are_not_read(small, tmp_path):
    """ONNX can say that a tensor's bytes lie in another file."""
    import onnx

    model = onnx.load(small[1] / "model.onnx")
    (tmp_path / "secret").write_bytes(bytes(4096))
    tensor = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    place = tensor.external_data.add()
    place.key, place.value = "location", "../secret"
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "x/config.json").write_bytes((small[1] / "config.json").read_bytes())
    with pytest.raises(ModelError, match="cannot load"):
        ExportedEngine(ExportedNetwork.read(tmp_path / "x/model.onnx"))


def test_what_is_there_stays(small, tmp_path):
    with pytest.raises(WriteError, match="exists already"):
        export(small[0], small[1], trust=[SMALL])


def test_the_paper_s_network_at_an_odd_size(network_dir, paper, monkeypatch):
    exported = ExportedEngine(ExportedNetwork.read(paper / "model.onnx"))
    pixels = image_of(701, 933, exported.network.channels)
    expected = gg.compile(load(network_dir)).forward(pixels)
    monkeypatch.setattr(exported, "_tile", lambda sink, shape: (160, 320))
    assert torch.allclose(exported.forward(ArrayImage(pixels)), expected, rtol=1e-5, atol=1e-5)


def test_a_run_must_not_be_of_patches(tmp_path):
    run = saved(tmp_path / "best.pt", "paper-unet", resolve("paper-unet"))
    (tmp_path / "config.yaml").write_text("patch_size: 224\n")
    with pytest.raises(ModelError, match="models of bags are not exported"):
        export(run, tmp_path / "out")
    assert PredictConfig(run=run, slides=("x",), out="x").resolved_patches is not None
