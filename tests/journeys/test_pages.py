"""What the pages on single subjects say, typed on tiny slides: files called as the pages call them are there."""

from __future__ import annotations

import json
import shutil
import sys
import webbrowser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import rasterio
import tifffile
import torch
import uvicorn
from torch.utils.data import DistributedSampler

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.images import make_cohort
from gigagrad.view import serving
from tests.pages import DOCS, blocks, play
from tests.ranks.started import variables_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("some_page")]

HEIGHT, WIDTH = 160, 192  # what paper-unet needs, and patches of 64 px
NETWORKS = """
from torch import nn

class Encoder(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return super().forward(x / 255)

class PerPixel(nn.Sequential):
    def __init__(self, channels=3, outputs=1):
        super().__init__(nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))

    def forward(self, x):
        return super().forward(x / 255)
"""
"""Networks that stand for those that take seconds to trace."""
ENCODER = "networks:Encoder&features=4"
TRUST = "--trust networks:Encoder --trust networks:PerPixel --trust networks:SlideNet"
BRIEF = "--epochs 1 --memory 16GiB"


def typed(line: str) -> None:
    assert main(line.split()) == 0, line


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what most pages begin with: slides, masks, annotations, cohort files, networks and a run."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_cohort(".", 4, height=HEIGHT, width=WIDTH)
        Path("slides/synthetic-003.tif").rename("slides/CMU-1.svs")
        Path("masks/synthetic-003.tif").rename("masks/CMU-1.tif")
        for name in ("slide.svs", "slide.tif"):
            shutil.copy("slides/CMU-1.svs", name)
        shutil.copy("masks/CMU-1.tif", "mask.tif")
        table = Path("cohort.csv").read_text().replace("slides/synthetic-003.tif", "slides/CMU-1.svs")
        head, *lines = table.replace("synthetic-003", "CMU-1").splitlines()
        write("cohort.csv", head, lines)
        slides = [line.split(",")[0::2] for line in lines]
        write(
            "labels.csv", "slide,label,split", [f"{slide},{n % 2},{split}" for n, (slide, split) in enumerate(slides)]
        )
        features = []
        for x, name in ((20, "tumour"), (70, "stroma"), (120, "artefact")):
            ring = [[x, 20], [x + 40, 20], [x + 40, 120], [x, 120], [x, 20]]
            feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
            features.append(feature | {"properties": {"classification": {"name": name}}})
        Path("slide.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
        page = (DOCS / "tutorials/slide-classifier.md").read_text(encoding="utf-8")
        (slide_net,) = (block.text for block in blocks(page) if block.title is not None)
        Path("networks.py").write_text(NETWORKS + slide_net)
        typed(f"fit --slides cohort.csv {BRIEF} --out runs/first")
    return folder


def write(name: str, head: str, lines: list[str]) -> None:
    Path(name).write_text("\n".join([head, *lines]) + "\n")


@pytest.fixture
def here(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the shelf to work in."""
    shutil.copytree(shelf, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("networks", None)


@pytest.fixture
def labels(here: Path) -> None:
    """The cohort with a label of each slide in the place of masks."""
    shutil.copy("labels.csv", "cohort.csv")


def test_a_cohort_on_many_machines(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and Dask are stood in for by variables of the environment, and by a thread."""
    head, *lines = Path("cohort.csv").read_text().splitlines()
    write("cohort.csv", f"{head},fold", [f"{line},{number % 2}" for number, line in enumerate(lines)])
    for name, value in (("TASK_ID", 1), ("TASK_MIN", 1), ("TASK_MAX", 1), ("TASK_COUNT", 1), ("TASK_STEP", 1)):
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", str(value))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    dask = ModuleType("dask.distributed")
    dask.Client = lambda _: ThreadPoolExecutor(1)  # type: ignore[attr-defined]
    dask.LocalCluster = lambda **_: ThreadPoolExecutor(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask.distributed", dask)
    page = blocks((DOCS / "many-machines.md").read_text(encoding="utf-8"))
    (machines,) = (block.text for block in page if block.text.startswith("- {name:"))
    Path("machines.yaml").write_text(machines)
    smaller = [("smp:Unet?encoder_name=resnet34&classes=1", "paper-unet"), ("--fold $", f"{BRIEF} --fold $")]
    play("many-machines.md", smaller, __name__="__main__")
    assert {path.stem for path in Path("predictions/records").iterdir()} >= {"CMU-1"}
    assert Path("scored/evaluation.json").is_file()


def test_one_answer_for_a_slide(labels: None) -> None:
    table = [f"slides/synthetic-00{n}.tif,p{n},{9 + n},{n % 2},{split}" for n, split in enumerate(["train", "train"])]
    table += ["slides/synthetic-002.tif,p2,3,0,val", "slides/CMU-1.svs,p3,7,0,test"]
    write("survival.csv", "slide,patient,survival_months,censorship,split", table)
    lines = Path("cohort.csv").read_text().replace(",1,", ",tumour,").replace(",0,", ",normal,").splitlines()
    for name in ("cohort.csv", "classes.csv"):
        write(name, lines[0], lines[1:])
    shutil.copy("slide.tif", "p21-0.tif")
    # What its Python begins with.
    typed("embed --slides slide.tif --encoder networks:Encoder --patch-size 64 --mpp 0.5 --out features")
    next(Path("features").rglob("*.h5")).rename("features/CMU-1.h5")
    with gg.open_image("slide.tif") as slide:
        names = play(
            "slide-level.md",
            [
                ("timm:resnet18?num_classes=2", "networks:SlideNet"),
                ("--loss ce --memory", f"--loss ce {BRIEF} --memory"),
                ("--loss cox", f"--loss cox {BRIEF}"),
                ("--run runs/slides", f"{TRUST} --run runs/slides"),
                ("--run runs/bags --slides slides", f"{TRUST} --run runs/bags --slides slide.tif"),
                ("evaluate --run runs/bags", f"evaluate {TRUST} --run runs/bags"),
                ("encoder=timm:resnet18&encoder.pretrained=true", f"encoder={ENCODER}"),
                ("--patch-size 224", f"--patch-size 64 --tissue all {BRIEF}"),
            ],
            gg=gg,
            torch=torch,
            model=gg.models.resolve("networks:SlideNet"),
            head=torch.nn.Linear(4, 1),
            slide=slide,
        )
    with gg.open_image("gradient.tif") as gradient:
        assert gradient.shape == (3, HEIGHT, WIDTH)
    assert len(names["scores"]) == len(names["coords"])


def test_bags(labels: None) -> None:
    play(
        "bags.md",
        [
            ("timm:resnet18&encoder.pretrained=true", ENCODER),
            ("timm:resnet18&head", f"{ENCODER}&head"),
            ("timm:vit_tiny_patch16_224&encoder.img_size=64", ENCODER),
            ("patches 10000", "patches 20"),
            ("size=224", "size=64"),
            ("--patch-size 224", f"--patch-size 64 --tissue all {BRIEF}"),
            ("--run runs/bags --slides slides", f"{TRUST} --run runs/bags --slides slide.tif"),
            ("evaluate --run runs/bags", f"evaluate {TRUST} --run runs/bags"),
        ],
    )
    assert "predicted" in Path("found/slides.csv").read_text()


def test_weights_of_files(here: Path) -> None:
    torch.save(gg.models.resolve("networks:PerPixel").state_dict(), "encoder.pth")
    more = f"--slides cohort.csv {BRIEF} --out runs/"
    names = play(
        "weights.md",
        [
            ('"smp:Unet?encoder_name=resnet34" --weights', "networks:PerPixel --weights"),
            ("encoder.pth ...", f"encoder.pth {more}a"),
            ("--weights runs/first ...", f"--weights runs/first {more}b"),
        ],
        gg=gg,
        model=gg.models.resolve("networks:PerPixel"),
    )
    assert not names["report"].missing


def test_classes_stains_and_regions(here: Path) -> None:
    head, *lines = Path("cohort.csv").read_text().splitlines()
    slides = [line.split(",") for line in lines]
    write(
        "stains.csv",
        "slide,slide:ihc,mask,split",
        [f"{slide},slide.tif,{mask},{split}" for slide, mask, split in slides],
    )
    ids = np.random.default_rng(0).integers(0, 5, (HEIGHT, WIDTH), np.uint8)
    for name, values in (("ids", ids), ("binary", np.where(ids > 2, 255, 0).astype(np.uint8))):
        tifffile.imwrite(f"{name}.tif", values, photometric="minisblack")
    for name, mask in (("annotated", "slide.geojson"), ("binary", "binary.tif"), ("ids", "ids.tif")):
        write(f"{name}.csv", head, [f"{slide},{mask},{split}" for slide, _, split in slides])
    play(
        "labels.md",
        [
            ("cohort.csv --classes tumour=1", f"annotated.csv {BRIEF} --classes tumour=1"),
            ("artefact=ignore ...", "artefact=ignore --model networks:PerPixel?outputs=3 --loss ce --out runs/a"),
            (
                "cohort.csv --classes 255=1 ...",
                f"binary.csv --classes 255=1 --model networks:PerPixel {BRIEF} --out runs/b",
            ),
            ("multi-stain?stains=2", "networks:PerPixel?channels=6"),
            ("--out runs/stains", f"{BRIEF} --out runs/stains"),
            ("--run runs/stains", f"{TRUST} --run runs/stains"),
            ("cohort.csv --classes whole=1", f"ids.csv {BRIEF} --overwrite --out runs/first --classes whole=1"),
            ('"smp:Unet?classes=3" ...', "networks:PerPixel?outputs=3"),
            ("--outputs labelmap --out predictions", f"{TRUST} --outputs labelmap --out regions"),
        ],
    )
    assert Path("regions/labelmaps/CMU-1.tif").is_file()


def test_memory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fast").mkdir()
    capsys.readouterr()
    play(
        "how-to/memory.md",
        [
            ("16000x64000 --memory", "1600x1600 --memory"),
            ('"smp:Unet?encoder_name=resnet34" --memory 2GiB', f"networks:PerPixel {BRIEF} --overwrite"),
            ("/fast/disk", "fast"),
            ("cohort.csv --patch-size 224", f"labels.csv --patch-size 64 --tissue all {BRIEF}"),
            ("encoder=timm:vit_small_patch16_224", f"encoder={ENCODER}"),
        ],
    )
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("predicted peak", "predicted time", "smallest budget", "what would help"))


def test_masks_tables_and_graphs(here: Path) -> None:
    play("outputs.md")
    assert Path("predictions/instances/CMU-1.csv").is_file()
    with gg.open_image("CMU-1.ome.tif") as image:
        assert image.dtype == np.float32


def test_bands_and_places(here: Path) -> None:
    rng = np.random.default_rng(0)

    def scene(name: str, bands: list[str], most: int, scale: int = 1) -> None:
        place = rasterio.Affine(0.1 / scale, 0, 90, 0, -0.1 / scale, 60)
        shape = {"height": 32 * scale, "width": 48 * scale, "count": len(bands), "dtype": "uint8"}
        with rasterio.open(name, "w", "GTiff", transform=place, crs="EPSG:4326", **shape) as file:
            file.write(rng.integers(0, most, (len(bands), 32 * scale, 48 * scale), dtype=np.uint8))
            file.descriptions = bands

    scene("scene.tif", ["B03", "B04", "B08", "DAPI", "CD8", "panCK"], 256)
    scene("water.tif", ["water"], 2)
    write("bands.csv", "slide,mask,split", ["scene.tif,water.tif,train"])
    Path("blue-marble").mkdir()
    page = blocks((DOCS / "remote-sensing.md").read_text(encoding="utf-8"))
    (table,) = (block.text for block in page if block.language == "csv")
    Path("blue-marble/cohort.csv").write_text(table)
    for line in table.splitlines()[1:]:
        slide, mask, _ = line.split(",")
        scene(f"blue-marble/{slide}", ["red", "green", "blue"], 256)
        scene(f"blue-marble/{mask}", ["land"], 3, scale=2)
    more = f"--model networks:PerPixel {BRIEF} --out runs/bands --overwrite"
    names = play(
        "remote-sensing.md",
        [
            ("cohort.csv --bands", "bands.csv --bands"),
            ("B03 ...", f"B03 {more}"),
            ("panCK ...", f"panCK {more}"),
            ("3 2 ...", f"3 2 {more}"),
            ('"smp:Unet?encoder_name=mobilenet_v2&encoder_depth=2&decoder_channels=16,8"', "networks:PerPixel"),
            ("--epochs 8", "--epochs 1"),
            ("--run runs/land", f"{TRUST} --run runs/land"),
        ],
        gg=gg,
        engine=gg.compile(gg.models.resolve("networks:PerPixel"), gg.losses.bce),
    )
    assert torch.isfinite(names["loss"])
    with rasterio.open("map/masks/asia.cog.tif") as file:
        assert file.crs.to_epsg() == 4326


def test_ranks_in_python(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them makes the meshes."""
    for name, value in next(variables_of(1)).items():
        monkeypatch.setenv(name, value)
    try:
        names = play(
            "training-over-ranks.md",
            [
                ('init_device_mesh("cpu", (4,))', 'init_device_mesh("cpu", (1,))'),
                ("optimizer.step()\ndestroy_process_group()", "optimizer.step()"),
                ('init_device_mesh("cpu", (2, 4)', 'init_device_mesh("cpu", (1, 1)'),
                ("gg.compile(model, loss, memory", "gg.compile(model, gg.losses.bce, memory"),
            ],
            DistributedSampler=DistributedSampler,
            slides=["slide.svs"],
        )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert torch.isfinite(names["loss"])


def test_a_gpu(here: Path) -> None:
    """Where there is none, a processor stands for it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = play(
        "tutorials/gpu.md",
        [
            ("16000x64000", "1600x1600"),
            ("--device cuda --memory 20GiB --loss", f"--device {device} {BRIEF} --loss"),
            ("--split test --device cuda", f"--split test --device {device}"),
            ('device="cuda"', f'device="{device}"'),
        ],
    )
    assert torch.isfinite(names["loss"])


def test_what_is_looked_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are made, and are not served; frames are."""
    typed("predict --run runs/first --slides cohort.csv --split test --out predictions")
    shutil.copytree("runs/first", "runs/second")
    for name in ("slides", "masks", "predictions"):
        shutil.copytree(name, f"gigagrad-demo/{name}")
    served: list[object] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: True)
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(sockets))
        names: dict[str, Any] = {"gg": gg, "model": gg.models.load("runs/first")}
        read = ("Box(4000, 8000, 4512, 8512)", "Box(40, 80, 60, 110)")
        assert play("view.md", [read], **names)["logits"].shape == (1, 20, 30)
    assert len(served) == 10
    try:
        assert play("how-to/notebook.md")["frame"].address
    finally:
        while serving._served:
            serving._served.popleft().close()
    play("how-to/report.md")
    assert "CMU-1" in Path("report.html").read_text()


def test_an_exported_network(here: Path) -> None:
    pytest.importorskip("onnxruntime")
    play("how-to/export.md", [("--slides slides", "--slides slide.tif")])
    assert Path("predictions/masks/slide.tif").is_file()
    assert json.loads(Path("exported-8/config.json").read_text())["int8"]


def test_a_model_that_names_code(here: Path) -> None:
    Path("mynets").mkdir()
    Path("mynets/unet.py").write_text(NETWORKS.replace("PerPixel", "Net"))
    gg.models.save_model("best.pt", "mynets.unet:Net", gg.models.resolve("mynets.unet:Net"))
    play("../SECURITY.md")
    assert Path("predictions/masks/CMU-1.tif").is_file()


def test_what_a_processor_could_do(capsys: pytest.CaptureFixture[str]) -> None:
    play("performance.md")
    assert "products" in capsys.readouterr().out
