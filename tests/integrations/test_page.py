"""The code of docs/in-other-programs.md and of the pages of single programs, as it stands there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from monai.bundle import ConfigParser
from rasterio.transform import from_origin
from torch.utils.data import DataLoader

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cli import main
from gigagrad.images import make_cohort
from gigagrad.integrations.monai import WholeImageInferer
from tests.pages import DOCS, play

PAGE = (DOCS / "in-other-programs.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_and_slide() -> None:
    """Make `runs/first` and a slide, `slide.tif`, as pages call them."""
    make_cohort("mine", 3, height=176, width=208)
    assert main("fit --slides mine/cohort.csv --epochs 1 --memory 16GiB --out runs/first".split()) == 0
    next(Path("mine").rglob("*-002.tif")).rename("slide.tif")


def test_a_process_of_its_own_imports_them():
    """Where tests did not import something before, a torchvision for another PyTorch for one."""
    code = "import gigagrad.integrations.lightning, gigagrad.integrations.monai"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_has_its_two_programs():
    assert list(CODE) == ["A plain loop", "Accelerate"]


@pytest.mark.parametrize("name", [*CODE, "how-to/lightning.md", "how-to/monai.md"])
def test_its_code_trains(name, model, pairs, paths, bce):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches: DataLoader[object] = DataLoader([{"image": image, "label": mask} for image, mask in pairs])  # type: ignore[arg-type]
    names = {"model": model, "loss": bce, "pairs": pairs if "lightning" in name else paths, "batches": batches}
    if name in CODE:
        exec(compile(CODE[name], name, "exec"), names)
    else:
        play(name, **names)
    assert all(bool((now != then).any()) for now, then in zip(model.parameters(), before, strict=True))


def test_its_bundle_names_the_inferer():
    page = (DOCS / "how-to" / "monai.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert isinstance(ConfigParser(json.loads(text)).get_parsed_content("inferer"), WholeImageInferer)


def test_torchgeos_network_learns_whole_scenes(here):
    pytest.importorskip("torchgeo", reason="needs TorchGeo")
    rng = np.random.default_rng(0)
    for folder, bands, most, dtype in (("scenes", 4, 10000, "uint16"), ("masks", 1, 3, "uint8")):
        (here / folder).mkdir()
        for name in "ab":
            described = {"width": 96, "height": 64, "count": bands, "dtype": dtype, "crs": "EPSG:32633"}
            place = from_origin(500000, 5000000, 10, 10)
            with rasterio.open(here / folder / f"{name}.tif", "w", "GTiff", transform=place, **described) as file:
                file.write(rng.integers(0, most, (bands, 64, 96), dtype=dtype))
    names = play("how-to/torchgeo.md", [("range(5)", "range(2)")])
    assert [Path(scene).name for scene, _ in names["pairs"]] == ["a.tif", "b.tif"]
    assert torch.isfinite(names["value"])
    with rasterio.open("prediction.tif") as file:
        assert (file.crs.to_epsg(), file.count, file.shape) == (32633, 3, (64, 96))


def test_a_model_goes_through_the_hub(here, monkeypatch):
    """The hub is a folder here: what is uploaded is what is downloaded."""
    import huggingface_hub

    class Hub:
        folders: dict[str, str] = {}  # noqa: RUF012

        def create_repo(self, name, private, exist_ok):
            assert private
            assert exist_ok

        def upload_folder(self, repo_id, folder_path):
            assert {"config.json", "model.safetensors", "README.md"} <= {
                path.name for path in Path(folder_path).iterdir()
            }
            self.folders[repo_id] = folder_path

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision: Hub.folders[name])
    run_and_slide()
    shutil.copytree("runs/first/model", "theirs")  # as `hf download` brings it
    play("how-to/hugging-face.md")
    assert Path("predictions/masks/slide.tif").is_file()
    assert Path("prediction.tif").is_file()


def test_tiatoolboxs_network_sees_a_whole_slide():
    pytest.importorskip("tiatoolbox", reason="needs TIAToolbox")
    run_and_slide()
    assert main("predict --run runs/first --slides slide.tif --threshold 0.01 --out predictions".split()) == 0
    names = play("how-to/tiatoolbox.md")
    assert len(names["store"]) >= 1
    with torch.no_grad(), gg.open_image("slide.tif") as image, gg.open_image("scores.tif") as found:
        whole, part = Box.whole(*image.shape[1:]), Box(30, 40, 90, 120)
        expected = names["model"](torch.from_numpy(np.ascontiguousarray(image.read(whole)))[None])[0]
        torch.testing.assert_close(
            torch.from_numpy(found.read(part).copy()), expected[:, 30:90, 40:120], rtol=1e-4, atol=1e-4
        )
