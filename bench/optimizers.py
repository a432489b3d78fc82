"""APOLLO-Mini beside AdamW: bytes of state as plans count them and as a step makes them, budgets, and losses.

    python bench/optimizers.py [--steps 300] [--seeds 3] [--batch 16] [--side 32] [--rates adamw=3e-4 apollo=1e-3]

ViT-S learns to tell four kinds of synthetic patches (large or small nuclei, many or few), once a seed with each
optimizer: the same weights and patches. The loss is that of the last tenth of the steps, and of 256 patches that were
not seen. State and budget are those of ViT-S with patches of 224 px. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.models.torchvision_operators
from gigagrad.execution.model_state import coming_state_bytes
from gigagrad.models import resolve
from gigagrad.training import FitConfig
from gigagrad.training.learner import make_optimizer


def patches(count: int, side: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw patches of pink tissue with nuclei, (N, 3, side, side), and their kinds (N): 2 * large + many."""
    kind = torch.randint(0, 4, (count,), generator=draw)
    noise = torch.randn(count, 1, side, side, generator=draw)
    fields = [F.avg_pool2d(noise, width, 1, width // 2, count_include_pad=False) for width in (5, 9)]
    field = torch.where((kind >= 2)[:, None, None, None], fields[1], fields[0])
    field = field / field.std((1, 2, 3), keepdim=True)
    nuclei = (field > torch.where(kind % 2 == 1, 1.0, 1.5)[:, None, None, None]).float()
    stain = torch.tensor([0.85, 0.6, 0.8])[:, None, None] - nuclei * torch.tensor([0.5, 0.4, 0.2])[:, None, None]
    shade = 0.05 * torch.randn(count, 3, 1, 1, generator=draw)
    return stain + shade + 0.1 * torch.randn(count, 3, side, side, generator=draw) - 0.7, kind


def optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    decay = 0.0 if name.startswith("sgd") else 0.05
    return make_optimizer(FitConfig(slides="", out="", optimizer=name, learning_rate=rate, weight_decay=decay), model)


def train(name: str, rate: float, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Train once; the rate rises over a tenth of the steps."""
    import timm

    torch.manual_seed(seed)
    model = timm.create_model("vit_small_patch16_224", img_size=args.side, patch_size=args.patch, num_classes=4)
    made, draw, losses = optimizer(name, model, rate), torch.Generator().manual_seed(seed), []
    warm = max(1, args.steps // 10)
    start = time.perf_counter()
    for step in range(args.steps):
        for group in made.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm)
        images, kinds = patches(args.batch, args.side, draw)
        loss = F.cross_entropy(model(images), kinds)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    images, kinds = patches(256, args.side, torch.Generator().manual_seed(10_000))
    with torch.no_grad():
        output = model.eval()(images)
    last = losses[-warm:]
    return {
        "loss": sum(last) / len(last),
        "unseen_loss": F.cross_entropy(output, kinds).item(),
        "unseen_accuracy": (output.argmax(1) == kinds).float().mean().item(),
        "seconds": seconds,
    }


def held_bytes(name: str) -> dict[str, int]:
    """Count the state of ViT-S by the plan before a step, by the plan's peak, and after a step."""
    model = resolve("timm:vit_small_patch16_224?num_classes=2").train()
    made = optimizer(name, model, 1e-3)
    engine = gg.compile(model, F.cross_entropy, optimizer=made)
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)
    coming, plan = coming_state_bytes(made), engine.plan(image, torch.tensor([1]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    state = sum(v.nbytes for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    return {"planned_bytes": coming, "state_bytes": state, "peak_bytes": plan.predicted_peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--rates", nargs="+", default=["adamw=3e-4", "apollo=1e-3"])
    args = parser.parse_args()
    rates = {name: float(rate) for name, _, rate in (text.rpartition("=") for text in args.rates)}
    found: dict[str, Any] = {}
    held_bytes("adamw")  # loads what the process holds from then on
    for name in rates:
        found[name] = {"rate": rates[name], **held_bytes(name), "runs": []}
        print(name, found[name], flush=True)
    for seed in range(args.seeds):
        for name, rate in rates.items():
            found[name]["runs"].append(train(name, rate, seed, args))
            print(seed, name, found[name]["runs"][-1], flush=True)
    adamw, apollo = found["adamw"], found["apollo"]
    losses = {name: [run["loss"] for run in found[name]["runs"]] for name in found}
    spread = max(losses["adamw"]) - min(losses["adamw"])
    told = {
        "state_share": apollo["state_bytes"] / adamw["state_bytes"],
        "peak_saved_bytes": adamw["peak_bytes"] - apollo["peak_bytes"],
        "state_saved_bytes": adamw["state_bytes"] - apollo["state_bytes"],
        "losses": losses,
        "adamw_spread": spread,
        "within_spread": sum(losses["apollo"]) / args.seeds <= max(losses["adamw"]),
    }
    print(json.dumps({**vars(args), "torch": torch.__version__, "optimizers": found, **told}))


if __name__ == "__main__":
    main()
