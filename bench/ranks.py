"""One image over several processes: the same bits for any number of them, and what they send and take.

    python bench/ranks.py [--ranks 1 2 3 4 5 7 8] [--networks NAME ...] [--places memory scratch]

For each network and place, three steps of Adam over gloo, by so many ranks of one thread each, all with the plan that
the first run made: hashes of losses, gradients, buffers and weights are compared. Prints a line for each case that
differs, and one JSON line last: cases, how many differ, CPU seconds against one process, and bytes sent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from tests.ranks.started import started

_PLACES = ("memory", "scratch")
_SIZE = 192, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7, 8])
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--places", nargs="+", choices=_PLACES, default=list(_PLACES))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.networks, args.places, args.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {count: run(count, args, Path(folder)) for count in args.ranks}
    first = found[args.ranks[0]]
    differing = 0
    for count, ranks in found.items():
        for rank, cases in enumerate(ranks):
            for name, case in cases.items():
                if case["hash"] != first[0][name]["hash"]:
                    differing += 1
                    print(f"{name} by {count} ranks: rank {rank} differs", flush=True)
    seconds = {n: sum(case["cpu_seconds"] for rank in ranks for case in rank.values()) for n, ranks in found.items()}
    line = {
        "cases": len(first[0]),
        "ranks": args.ranks,
        "compared": sum(len(cases) for ranks in found.values() for cases in ranks),
        "differing": differing,
        "cpu_seconds_ratio": {n: round(taken / seconds[args.ranks[0]], 3) for n, taken in seconds.items()},
        "sent_bytes": {n: sum(c["sent_bytes"] for rank in ranks for c in rank.values()) for n, ranks in found.items()},
    }
    print(json.dumps(line))


def run(count: int, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """What every rank found, by case."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(folder),
        "--networks",
        *args.networks,
        "--places",
        *args.places,
    ]
    ranks = started(command, count)
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {count} failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def work(networks: list[str], places: list[str], folder: Path) -> None:
    """One rank. Plans lie in the folder, by case: the first run puts them there."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    print(json.dumps({f"{n} in {place}": case(n, place, mesh, folder) for n in networks for place in places}))
    torch.distributed.destroy_process_group()


def case(name: str, place: str, mesh: Any, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, image, target, options = NETWORKS[name]()
    with tempfile.TemporaryDirectory() as scratch:
        engine = gg.compile(model, loss, tile=(40, 48), scratch=scratch, mesh=mesh, progress=False, **options)
        adopt(engine, image, target, place, folder / f"{name}-{place}.json")
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        digest, start = hashlib.sha256(), time.process_time()
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            value = engine.backward(image, target)
            optimizer.step()
            images = image if isinstance(image, tuple) else (image,)
            gradients = [t.grad for t in (*model.parameters(), *images) if t.grad is not None]
            for tensor in (value, *gradients, *model.buffers(), *model.parameters()):
                digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        taken = time.process_time() - start
    return {"hash": digest.hexdigest(), "cpu_seconds": taken, "sent_bytes": engine.ranks.sent_bytes}


def adopt(engine: gg.Engine, image: Any, target: Any, place: str, path: Path) -> None:
    """The plan that the first run made, with its fields in this place."""
    if not path.exists():
        engine.plan(image, target)
        state = engine.state_dict()
        for choice in state["choices"].values():
            choice["kept"] = [[node, "disk" if place == "scratch" else "memory"] for node, _ in choice["kept"]]
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            path.write_text(json.dumps(state))
    else:
        state = json.loads(path.read_text())
    engine.load_state_dict(state)


def pair(channels: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    image = torch.rand(channels, *_SIZE, generator=generator)
    return image, (torch.rand(1, *_SIZE, generator=generator) > 0.5).float()


def bce(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def dice(output: Tensor, target: Tensor) -> Tensor:
    p = output.sigmoid()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def convolutions(norm: Callable[[], nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, 2, 1), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), norm(), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(8, 1, 4, 2, 1))


class Attention(nn.Module):
    """Every token looks at every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 16, 16), nn.ConvTranspose2d(8, 1, 16, 16)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(x)
        tokens = down.flatten(2).transpose(1, 2)
        attended: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        up: Tensor = self.up((tokens + attended).transpose(1, 2).unflatten(2, down.shape[2:]))
        return up


class TwoImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = convolutions(nn.Identity), convolutions(lambda: nn.BatchNorm2d(8))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        joined: Tensor = self.first(first) * self.second(second)
        return joined


class Bytes(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x * 255)
        return output


Network = tuple[nn.Module, Callable[..., Tensor], Any, Any, dict[str, Any]]


def of(model: nn.Module, loss: Callable[..., Tensor] = bce, **options: Any) -> Network:
    return (model, loss, *pair(), options)


def image_gradient() -> Network:
    image, target = pair()
    return convolutions(lambda: nn.BatchNorm2d(8)), bce, image.requires_grad_(), target, {}


def two_images() -> Network:
    image, target = pair()
    return TwoImages(), bce, (image, image.flip(0)), target, {}


def smp_unet() -> Network:
    return of(gg.models.resolve("smp:Unet?encoder_name=resnet18"))


NETWORKS: dict[str, Callable[[], Network]] = {
    "founding": lambda: of(Bytes(gg.models.resolve("paper-unet"))),
    "batch norm": lambda: of(convolutions(lambda: nn.BatchNorm2d(8))),
    "group norm and Dice": lambda: of(convolutions(lambda: nn.GroupNorm(2, 8)), dice),
    "dropout": lambda: of(nn.Sequential(convolutions(lambda: nn.Dropout2d(0.2)), nn.Dropout(0.3))),
    "attention": lambda: of(Attention()),
    "image gradient": image_gradient,
    "bfloat16": lambda: of(convolutions(lambda: nn.BatchNorm2d(8)), precision="bfloat16"),
    "lossy storage": lambda: of(convolutions(lambda: nn.BatchNorm2d(8)), storage="error 0.01"),
    "two images": two_images,
    "smp U-Net": smp_unet,
}

if __name__ == "__main__":
    main()
