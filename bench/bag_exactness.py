"""Bags in float64 against plain autograd on all patches at once: encoders of timm, heads, modes and chunks.

    python bench/bag_exactness.py --out rows.jsonl [--device cuda]

Six encoders beside five heads, in training and in evaluation mode, 60 in all; each with 67 patches in chunks of 1, 7
and 64. Compared are the loss, the gradients of encoder and head, the buffers after the step, and the gradient of the
patches. Dropout is off: PyTorch draws its masks otherwise. Each of the 60 adds a line to `--out` when it is done; those
that are there are not computed again. Prints every case above the tolerance and one JSON line last.
"""

from __future__ import annotations

import argparse
import copy
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
from gigagrad.models import resolve
from tests.exactness.comparison import order_cotangents
from tests.exactness.steering import with_tiles

TOLERANCE = 1e-10
Loss = Callable[[Any, Any], Tensor]
SIDE = 32
ENCODERS = (
    "timm:resnet10t",
    "timm:resnet18",
    "timm:vit_tiny_patch16_224&encoder.img_size=32&encoder.patch_size=8&encoder.depth=4",
    "timm:convnext_atto",
    "timm:mobilenetv3_small_050",
    "timm:test_efficientnet",
)
HEADS = "mean", "max", "abmil", "clam", "transmil&head.width=64"
CHUNKS = 1, 7, 64
PATCHES = 67
LABEL = 1
Tensors = dict[tuple[str, str], Tensor]
"""Results of a step, by kind and name."""


def model_of(encoder: str, head: str, *, training: bool) -> nn.Module:
    torch.manual_seed(0)
    model = resolve(f"mil:encoder={encoder}&head={head}&classes=2").double().train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def results(model: nn.Module, loss: Tensor, bag: Tensor) -> Tensors:
    """Return what a step left behind: the loss, gradients and buffers."""
    assert bag.grad is not None
    found: Tensors = {("loss", ""): loss.detach(), ("patches", ""): bag.grad}
    found |= {("gradient", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {("buffer", n): b.double() for n, b in model.named_buffers() if b.numel()}
    return found


def errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Return the worst relative error of each kind, in 2-norms.

    A gradient that is zero but for rounding has no relative error: 1e-4 of the whole gradient and 1e-5 of the loss
    are then its scale, as in tests/exactness.
    """
    assert found.keys() == wanted.keys()
    gradients = [value for (kind, _), value in wanted.items() if kind == "gradient"]
    floor = max(1e-4 * torch.stack([g.norm() for g in gradients]).norm().item(), 1e-5 * abs(wanted["loss", ""].item()))
    floors = {"gradient": floor, "buffer": 1.0}
    worst: dict[str, float] = {}
    for (kind, name), value in wanted.items():
        scale = max(value.norm().item(), floors.get(kind, 0.0))
        error = (found[kind, name].cpu() - value.cpu()).norm().item() / scale if scale else 0.0
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


def row_of(encoder: str, head: str, training: bool, device: str) -> dict[str, Any]:
    """Compare one model in all chunks."""
    start = time.process_time()
    model, label = model_of(encoder, head, training=training), torch.tensor([LABEL])
    loss: Loss = gg.losses.clam if head == "clam" and training else nn.CrossEntropyLoss()
    draw = torch.Generator().manual_seed(0)
    bag = torch.randint(0, 256, (PATCHES, 3, SIDE, SIDE), dtype=torch.uint8, generator=draw).double()
    whole_model, whole_bag = copy.deepcopy(model), bag.clone().requires_grad_()
    order_cotangents(whole_model)
    whole_loss = loss(whole_model(whole_bag), label)
    whole_loss.backward()
    wanted = results(whole_model, whole_loss, whole_bag)
    found: dict[str, dict[str, float]] = {}
    gathered: set[str] = set()
    fresh = copy.deepcopy(model.state_dict())
    engine = gg.compile(model, loss, tile=(CHUNKS[-1], 1), device=device)
    for chunk in reversed(CHUNKS):  # with one capture, which takes longer than the steps
        tiled_bag = bag.clone().requires_grad_()
        engine.plan(tiled_bag, label)
        engine.load_state_dict(with_tiles(engine.state_dict(), (chunk, 1)))
        plan = engine.plan(tiled_bag, label)
        assert {segment.tile[0] for segment in plan.segments} == {chunk}
        value = engine.backward(tiled_bag, label)
        found[str(chunk)] = errors(results(model, value, tiled_bag), wanted)
        gathered |= {one.module for one in plan.whole_field if ".encoder" in one.module}
        model.zero_grad()
        model.load_state_dict(fresh)
    return {
        "encoder": encoder,
        "head": head,
        "mode": "training" if training else "evaluation",
        "patches": PATCHES,
        "errors_by_chunk": found,
        "worst": max(max(kinds.values()) for kinds in found.values()),
        "whole_fields_of_encoder": sorted(gathered),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["encoder"], row["head"], row["mode"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    there = {key(row) for row in rows}
    for encoder, head, training in itertools.product(ENCODERS, HEADS, (True, False)):
        if (encoder, head, "training" if training else "evaluation") in there:
            continue
        row = row_of(encoder, head, training, args.device)
        rows.append(row)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        if row["worst"] > TOLERANCE or row["whole_fields_of_encoder"]:
            print(json.dumps(row), flush=True)
    kinds = {kind for row in rows for of_chunk in row["errors_by_chunk"].values() for kind in of_chunk}
    line = {
        "cases": len(rows),
        "chunks": CHUNKS,
        "patches": PATCHES,
        "device": args.device,
        "above_tolerance": sum(row["worst"] > TOLERANCE for row in rows),
        "tolerance": TOLERANCE,
        "worst": {
            kind: max(of_chunk.get(kind, 0.0) for row in rows for of_chunk in row["errors_by_chunk"].values())
            for kind in sorted(kinds)
        },
        "encoders_with_whole_fields": sum(bool(row["whole_fields_of_encoder"]) for row in rows),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
