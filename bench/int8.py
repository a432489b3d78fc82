"""Trained networks in INT8: size, Dice and time beside float32, through ONNX Runtime.

    python bench/int8.py --cohort COHORT.csv --runs RUN [RUN ...] [--rounds 5]

The best network of each run of `gigagrad fit` is exported (`torch.onnx.export`) at the size of the slides, which is
one, and quantised as ONNX Runtime does it after training: activations in 8 bits, calibrated on the training slides,
weights by channel. Both predict the cohort's test slides whole; Dice against the labels, pixels of all slides together.
Times of one slide in turns: PyTorch, ONNX Runtime in float32, and in INT8; the best of the rounds counts. Needs `onnx`,
`onnxscript` and `onnxruntime`. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).resolve().parent))  # onnxruntime has a module of the same name as one in there
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnxruntime
import torch
from onnxruntime import quantization

from gigagrad.boxes import Box
from gigagrad.cohorts.rows import Row, read_rows
from gigagrad.images import open_image
from gigagrad.masks import open_mask
from gigagrad.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=Path, required=True)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = read_rows(args.cohort)[1]
    found = []
    for run in args.runs:
        found.append(compared(run, rows, args))
        print(json.dumps(found[-1]), flush=True)
    print(
        json.dumps(
            {"threads": args.threads, "onnxruntime": onnxruntime.__version__, "torch": torch.__version__, "runs": found}
        )
    )


def compared(run: Path, rows: tuple[Row, ...], args: argparse.Namespace) -> dict[str, Any]:
    """One network in float32 and in INT8."""
    spec, network = load_model(run)
    test = [row for row in rows if row.split == "test"]
    train = [row for row in rows if row.split == "train"]
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        image, _ = pixels(test[0])
        with torch.no_grad():
            torch.onnx.export(network, (torch.from_numpy(image),), whole, dynamo=True, external_data=False)
        prepared = Path(folder) / "prepared.onnx"
        quantization.quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
        name = onnxruntime.InferenceSession(str(whole)).get_inputs()[0].name
        slides = [pixels(row)[0] for row in train]
        quantization.quantize_static(
            str(prepared), str(small), Slides(name, slides), per_channel=True, weight_type=quantization.QuantType.QInt8
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        sessions = {
            path.stem: onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for path in (whole, small)
        }

        def by_session(kind: str) -> Callable[[Any], Any]:
            return lambda image: sessions[kind].run(None, {name: image})[0]

        def by_torch(image: Any) -> Any:
            with torch.no_grad():
                return network(torch.from_numpy(image)).numpy()

        ways: dict[str, Callable[[Any], Any]] = {
            "torch": by_torch,
            "float32": by_session("float32"),
            "int8": by_session("int8"),
        }
        counts = {way: np.zeros(3, np.int64) for way in ways}
        for row in test:
            slide, label = pixels(row)
            for way, predict in ways.items():
                mask = predict(slide)[0, 0] > 0
                counts[way] += [int((mask & label).sum()), int(mask.sum()), int(label.sum())]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, predict in ways.items():
                start = time.perf_counter()
                predict(image)
                seconds[way].append(time.perf_counter() - start)
        megapixels = image.shape[-1] * image.shape[-2] / 1e6
        return {
            "model": spec,
            "bytes": {path.stem: os.path.getsize(path) for path in (whole, small)},
            "dice": {way: round(float(2 * both / (made + true)), 5) for way, (both, made, true) in counts.items()},
            "seconds_per_megapixel": {way: round(min(times) / megapixels, 4) for way, times in seconds.items()},
        }


class Slides(quantization.CalibrationDataReader):  # type: ignore[misc]
    """What ONNX Runtime measures ranges of activations on."""

    def __init__(self, name: str, slides: list[Any]) -> None:
        self._left = iter([{name: slide} for slide in slides])

    def get_next(self) -> Any:
        return next(self._left, None)


def pixels(row: Row) -> tuple[Any, Any]:
    """A slide as floats from 0 to 1, `(1, 3, H, W)`, and its label `(H, W)`."""
    with open_image(row.slide) as image:
        whole = Box.whole(image.height, image.width)
        made = np.asarray(image.read(whole), np.float32)[None] / 255
        assert row.mask is not None
        with open_mask(row.mask, image) as mask:
            return made, np.asarray(mask.read(whole))[0] > 0


if __name__ == "__main__":
    main()
