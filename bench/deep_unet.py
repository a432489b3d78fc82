"""The deep network of the benchmarks: a U-Net with a published encoder, batch normalisation in training mode.

Needs segmentation-models-pytorch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def deep_unet(encoder: str) -> torch.nn.Module:
    """`smp.Unet(encoder)` with random weights, one class; takes float images."""
    import gigagrad.models.torchvision_operators  # noqa: F401, I001

    import segmentation_models_pytorch as smp

    model: torch.nn.Module = smp.Unet(encoder, encoder_weights=None, classes=1).train()
    return model


def child(script: str, arguments: list[str]) -> dict[str, Any]:
    """What a run of a benchmark in a process of its own printed last: memory is that of the whole process."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(result, flush=True)
    return result
