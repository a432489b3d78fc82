"""Importing this lets timm and segmentation-models-pytorch import beside a CPU PyTorch.

The torchvision that pip resolves there has a compiled part that needs CUDA; without it `import torchvision` fails for
want of two detection operators, which no network of ours calls. Nothing is defined where the real ones load.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def _define() -> torch.library.Library | None:
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return None
    for compiled in Path(package.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))  # type: ignore[no-untyped-call]
        except OSError:
            continue
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library


# The definitions live as long as the object does.
_library = _define()
