"""Bags in float64 against plain autograd on all patches at once: encoders of timm, heads, modes and chunks.

    python bench/bag_exactness.py [--device cuda]

Six encoders beside five heads, in training and in evaluation mode, 60 in all; bags of odd numbers of patches, in chunks
of 1, 7 and 64. Compared are the loss, the gradients of encoder and head, the buffers after the step, and the gradient
of the patches. Dropout is off: PyTorch draws its masks otherwise. Prints every case above the tolerance and one JSON
line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.models.torchvision_operators
from gigagrad.models import resolve
from tests.exactness.comparison import compare

TOLERANCE = 1e-10
Loss = Callable[[Any, Any], Tensor]
ENCODERS = {
    "timm:resnet18": 32,
    "timm:vit_tiny_patch16_224&encoder.img_size=32&encoder.patch_size=8": 32,
    "timm:convnext_atto": 32,
    "timm:swin_tiny_patch4_window7_224&encoder.img_size=56&encoder.drop_path_rate=0.0": 56,
    "timm:efficientnet_b0": 32,
    "timm:regnety_002": 32,
}
HEADS = "mean", "max", "abmil", "clam", "transmil"
CHUNKS = 1, 7, 64
COUNTS = 33, 67
LABEL = 1


def model_of(encoder: str, head: str, *, training: bool) -> nn.Module:
    torch.manual_seed(0)
    model = resolve(f"mil:encoder={encoder}&head={head}&classes=2").double().train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def patch_error(model: nn.Module, bag: Tensor, label: Tensor, loss: Loss, chunk: int, device: str) -> float:
    """Returns the relative error of the patches' own gradient."""
    whole = bag.double().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(model(whole), label), whole)
    given = bag.double().requires_grad_()
    gg.compile(model, loss, tile=(chunk, 1), device=device).backward(given, label)
    model.zero_grad()
    assert given.grad is not None
    return ((given.grad - wanted).norm() / wanted.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    worst = dict.fromkeys(("loss", "gradient", "buffer", "patches"), 0.0)
    above, whole, cases, start = 0, 0, 0, time.perf_counter()
    turns = itertools.cycle(itertools.product(CHUNKS, COUNTS))
    for encoder, head, training in itertools.product(ENCODERS, HEADS, (True, False)):
        (chunk, count), side = next(turns), ENCODERS[encoder]
        draw = torch.Generator().manual_seed(cases)
        bag = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
        model, label = model_of(encoder, head, training=training), torch.tensor([LABEL])
        loss: Loss = gg.losses.clam if head == "clam" and training else nn.CrossEntropyLoss()
        result = compare(model, loss, bag, label, tile=(chunk, 1), device=args.device)
        model = model_of(encoder, head, training=training)
        errors = {
            "loss": result.loss_error,
            "gradient": result.gradient_error,
            "buffer": result.buffer_error,
            "patches": patch_error(model, bag, label, loss, chunk, args.device),
        }
        worst = {name: max(worst[name], error) for name, error in errors.items()}
        cases += 1
        gathered = [one for one in result.plan.whole_field if ".encoder" in one.module]
        whole += bool(gathered)
        if max(errors.values()) > TOLERANCE:
            above += 1
        if max(errors.values()) > TOLERANCE or gathered:
            print(encoder, head, "training" if training else "eval", count, chunk, errors, gathered[:3], flush=True)
    line = {
        "cases": cases,
        "device": args.device,
        "above_tolerance": above,
        "tolerance": TOLERANCE,
        "worst": worst,
        "encoders_with_whole_fields": whole,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
