"""Maps of slides whose answer is known: a bright square decides the score, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image as Pillow
from torch import nn

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.errors import ConfigError, ImageError, ModelError
from gigagrad.models import save_model
from gigagrad.prediction.attribution import Tapped, attribute, block_rows, score_of
from gigagrad.prediction.slide_scores import Reading

SQUARE = slice(40, 72), slice(16, 56)
SPEC = "networks_of_test_attribution:Bright"
NETWORK = """
import torch
class Bright(torch.nn.Module):
    "Two logits: the mean of how far pixels are above 150, and that times -2. `excess` is a map of its own."
    def __init__(self):
        super().__init__()
        self.excess = torch.nn.Threshold(0.0, 0.0)
        self.scale = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    def forward(self, x):
        mean = self.excess(x.float() - 150).mean((1, 2, 3), keepdim=True)
        return mean.flatten(1) * self.scale
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "networks_of_test_attribution.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    from gigagrad.models import resolve

    save_model(folder / "best.pt", SPEC, resolve(SPEC))
    (folder / "config.yaml").write_text("loss: ce\nclasses: [bright=0, dark=1]\n")
    return folder


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(40, 140, (101, 83, 3)).astype(np.uint8)
    pixels[SQUARE] += 100
    path = tmp_path / "a slide.tif"
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", resolution=(2e4, 2e4), resolutionunit="CENTIMETER")
    return path


def made(run: Path, slide: Path, **settings: Any) -> np.ndarray:
    out = run.parent / "maps"
    (picture,) = attribute(run, [slide], out, trust=[SPEC], **settings)
    assert picture == out / "a slide.png"
    return tifffile.imread(out / "a slide.tif")


def test_the_map_is_the_gradient_and_shows_the_square(run: Path, slide: Path) -> None:
    found = made(run, slide, block=8)
    pixels = torch.from_numpy(tifffile.imread(slide)).permute(2, 0, 1)[None].double().requires_grad_()
    torch.relu(pixels - 150).mean().backward()
    assert pixels.grad is not None
    padded = np.zeros((104, 88))
    padded[:101, :83] = pixels.grad[0].abs().sum(0).numpy()
    expected = padded.reshape(13, 8, 11, 8).sum((1, 3))
    assert found.shape == (13, 11)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with tifffile.TiffFile(run.parent / "maps" / "a slide.tif") as file:
        said = json.loads(file.pages.first.description.removeprefix("gigagrad attribution: "))
        assert said["block"] == 8
        assert file.pages.first.tags["XResolution"].value == (2500, 1)
    picture = np.asarray(Pillow.open(run.parent / "maps" / "a slide.png")).astype(int)
    coloured = np.ptp(picture[:101], axis=2) > 60
    inside = np.zeros_like(coloured)
    inside[SQUARE] = True
    assert coloured[44:68, 20:52].mean() > 0.9
    assert coloured[~inside].mean() < 0.1


def test_a_map_is_of_the_class_that_was_asked_for(run: Path, slide: Path) -> None:
    usual = made(run, slide)
    dark = made(run, slide, of="dark", overwrite=True)
    np.testing.assert_allclose(dark, 2 * usual, rtol=1e-5)
    with pytest.raises(ImageError, match="no score of 'drak', did you mean 'dark'"):
        made(run, slide, of="drak", overwrite=True)


def test_a_map_of_other_classes_or_colours_is_another_one(run: Path, slide: Path) -> None:
    made(run, slide, of="dark")
    for changes in ({"classes": ("dark=0", "bright=1")}, {"bands": (3, 2, 1)}):
        with pytest.raises(ImageError, match="another map"):
            made(run, slide, of="dark", **changes)
        made(run, slide, of="dark", overwrite=True, **changes)
        made(run, slide, of="dark", **changes)
        made(run, slide, of="dark", overwrite=True)


def test_another_slide_of_the_same_name_has_a_map_of_its_own(run: Path, slide: Path) -> None:
    before = made(run, slide)
    pixels = tifffile.imread(slide)
    for kept in (slice(None), slice(0, 90)):
        tifffile.imwrite(slide, pixels[::-1, ::-1][kept], tile=(64, 64), photometric="rgb")
        found = made(run, slide)
        whole, x = len(pixels[kept]) // 8, 83 // 8
        assert found.shape == (-(-len(pixels[kept]) // 8), 11)
        assert not np.allclose(found[:whole, :x], before[:whole, :x])
    with pytest.raises(ImageError, match="another map"):
        made(run, slide, block=4)


def test_the_output_of_a_module_is_a_map(run: Path, slide: Path) -> None:
    found = made(run, slide, module="excess")
    pixels = tifffile.imread(slide).astype(np.float32)
    np.testing.assert_allclose(found, np.maximum(pixels - 150, 0).mean(2), rtol=1e-5)
    with pytest.raises(ConfigError, match="no module 'exces', did you mean 'excess'"):
        made(run, slide, module="exces")
    with pytest.raises(ConfigError, match="one of them"):
        made(run, slide, module="excess", of="dark")
    with pytest.raises(ImageError, match="another map"):
        made(run, slide)


def test_the_output_of_a_module_is_what_it_gave_whatever_writes_into_it() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.norm(x)
            found += x
            return self.act(found).mean((2, 3))

    image = torch.randn(1, 3, 8, 8)
    model = Residual().eval()
    torch.testing.assert_close(Tapped(model, "norm")(image), model.norm(image))
    engine = gg.compile(Tapped(model, "norm").eval(), tile=(3, 5))
    torch.testing.assert_close(engine.forward(image[0]), model.norm(image))


def test_a_slide_of_another_resolution_has_a_map_of_that(run: Path, slide: Path) -> None:
    for mpp in (0.5, 0.25):
        cohort = run.parent / "cohort.csv"
        cohort.write_text(f"slide,mpp\n{slide.name},{mpp}\n")
        attribute(run, [cohort], run.parent / "maps", trust=[SPEC])
        with gg.open_image(run.parent / "maps" / "a slide.tif") as heat:
            assert heat.mpp == pytest.approx(8 * mpp)


def test_a_picture_is_never_that_of_a_map_before(run: Path, slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run ended between both files, the picture of another class or slide stayed beside the new map."""
    made(run, slide, of="bright")
    picture = run.parent / "maps" / "a slide.png"
    before = picture.read_bytes()

    def ended(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("gigagrad.prediction.attribution.write_overlay", ended)
        with pytest.raises(KeyboardInterrupt):
            made(run, slide, of="dark", overwrite=True)
    made(run, slide, of="dark")
    assert picture.read_bytes() != before


def test_what_is_there_is_left_alone_and_what_failed_is_told(run: Path, slide: Path, capsys: Any) -> None:
    broken = slide.with_name("broken.tif")
    broken.write_bytes(b"no picture")
    line = ["attribute", "--run", "run", "--slides", "broken.tif", "a slide.tif", "--out", "maps", "--trust", SPEC]
    assert main(line) == 2
    assert "broken" in capsys.readouterr().err
    before = (run.parent / "maps" / "a slide.tif").stat().st_mtime_ns
    assert main([*line[:4], "a slide.tif", *line[6:]]) == 0
    assert "done before" in capsys.readouterr().out
    assert (run.parent / "maps" / "a slide.tif").stat().st_mtime_ns == before
    assert main([*line[:4], "a slide.tif", *line[6:], "--share", "2/2"]) == 0
    assert "a slide" not in capsys.readouterr().out
    (run.parent / "maps" / "a slide.png").unlink()
    assert main([*line[:4], "a slide.tif", *line[6:]]) == 0
    assert (run.parent / "maps" / "a slide.png").is_file()


def test_a_model_of_masks_has_no_score(run: Path, slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = nn.Conv2d(3, 1, 1)

    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return masks(x.float())

    monkeypatch.setattr("gigagrad.prediction.attribution.load_model", lambda path, trust: ("masks", Masks().eval()))
    with pytest.raises((ImageError, ModelError), match="whole slides"):
        made(run, slide)


@pytest.mark.parametrize(
    ("loss", "outputs", "of", "expected"),
    [
        ("ce", 3, None, ("2", (0, 0, 1))),
        ("ce", 3, "1", ("1", (0, 1, 0))),
        ("bce", 1, None, ("1", (1,))),
        ("bce", 1, "0", ("0", (-1,))),
        ("mse", 1, None, ("output", (1,))),
        ("mse", 2, "output_1", ("output_1", (0, 1))),
    ],
)
def test_the_outputs_that_make_up_a_score(loss: str, outputs: int, of: str | None, expected: Any) -> None:
    reading = Reading.of(outputs, loss, None)
    scores = reading.scores(torch.arange(1.0, outputs + 1)[None])
    assert score_of(reading, scores, of, 0.5) == expected


def test_of_several_numbers_one_is_to_be_named() -> None:
    reading = Reading.of(2, "mse", None)
    with pytest.raises(ConfigError, match="--of output_0 or output_1"):
        score_of(reading, {"output_0": 1.0, "output_1": 2.0}, None, 0.5)


@pytest.mark.parametrize("heights", [[20], [3, 5, 12], [1] * 20, [8, 8, 4], [16, 4]])
def test_blocks_are_summed_whatever_the_strips(heights: list[int]) -> None:
    field = np.random.default_rng(0).random((20, 13))
    strips = np.split(field, np.cumsum(heights)[:-1])
    found = np.concatenate(list(block_rows(strips, 20, 8)))
    padded = np.pad(field, ((0, 4), (0, 3)))
    np.testing.assert_allclose(found, padded.reshape(3, 8, 2, 8).sum((1, 3)), rtol=1e-6)


def test_an_image_of_one_row_has_a_map(run: Path, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "thin.tif", np.full((1, 40, 3), 200, np.uint8), photometric="rgb")
    (picture,) = attribute(run, [tmp_path / "thin.tif"], tmp_path / "maps", trust=[SPEC])
    assert picture.is_file()
    assert tifffile.imread(tmp_path / "maps" / "thin.tif").shape == (1, 5)
