"""A needle in a slide: encoder and head trained together on all patches, beside frozen features and sampled patches.

    python bench/needle.py [--seeds 3] [--epochs 5] [--slides 400] [--patches 200] [--memory 1GiB]

Synthetic slides, tissue everywhere. A patch shows four marks of 5 x 5 px, each of 12 bright and 12 dark pixels in
random order, at random places, in noise; its contrast is random, too. In half of the slides 1 % of the patches have
another texture: all their marks have one order, drawn once a seed. Brightness, contrast and the number of marks tell
nothing.

One network (a convolution, the maximum over a patch, gated attention), one start, the same steps of Adam with the same
schedule, `--together` slides a step: all patches of each slide through encoder and head (`gg.open_bag`,
`engine.backward`); the head alone, on features of the random encoder; and encoder and head on 5 % of each slide's
patches, drawn anew for each step. All are scored on all patches of slides that nobody trained on, by the area under the
ROC curve. The first way has one pair of learning rates; the other two are trained with it times each of `--factors`,
and the best of these on the slides of the test counts. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from gigagrad.models.mil import AttentionPool, BagNetwork

SIDE, CELL, MARK = 16, 8, 5
"""Pixels a side of a patch, of the cells that have a mark each, and of a mark."""
ORDERED = np.repeat([-1.0, 0.0, 1.0], [12, 1, 12])
NOISE = 0.15
CONTRAST = 0.3
NEEDLES = 0.01
SAMPLED = 0.05
MEAN, STD = (0.706, 0.471, 0.667), (0.09, 0.118, 0.059)
FEATURES = 8
ALL, FROZEN, SAMPLE = WAYS = "all patches", "frozen features", "sampled patches"


class Encoder(nn.Sequential):
    """A convolution and the maximum over pixels: `(N, 3, 16, 16)` to `(N, 8)`.

    The norm stays in evaluation mode, with the mean and the variance that features of the random convolution have.
    """

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(FEATURES, affine=False, momentum=None)
        super().__init__(nn.Conv2d(3, FEATURES, MARK), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), norm)


class Cohort:
    """Slides as bags, every other one with needles."""

    def __init__(self, slides: int, patches: int, needle: np.ndarray[Any, Any], draw: np.random.Generator) -> None:
        self.labels = [torch.tensor([number % 2]) for number in range(slides)]
        drawn = (slide(patches, needle, positive=bool(label), draw=draw) for label in self.labels)
        self.bags = [gg.open_bag(pixels, size=SIDE, mpp=None, tissue=None) for pixels in drawn]

    def patches(self, number: int) -> Tensor:
        return torch.from_numpy(np.array(self.bags[number].read(0, len(self.bags[number]))))


def slide(
    count: int, needle: np.ndarray[Any, Any], *, positive: bool, draw: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Draws a slide `(3, H, W)` of so many patches, in rows of ten."""
    cells = (SIDE // CELL) ** 2
    marks = draw.permuted(np.broadcast_to(ORDERED, (count, cells, MARK**2)), axis=-1)
    if positive:
        marks[draw.choice(count, max(1, round(NEEDLES * count)), replace=False)] = needle
    marks *= np.exp(CONTRAST * draw.normal(size=(count, 1, 1)))
    y, x = draw.integers(0, CELL - MARK + 1, (2, count, cells, 1))
    along_y, along_x = np.divmod(np.arange(MARK**2), MARK)
    texture = np.zeros((count, cells, CELL**2))
    np.put_along_axis(texture, (y + along_y) * CELL + x + along_x, marks, -1)
    texture += draw.normal(scale=NOISE, size=texture.shape)
    # rows, columns, cells along y, along x, pixels along y, along x
    parts = texture.reshape(-1, 10, SIDE // CELL, SIDE // CELL, CELL, CELL).transpose(0, 2, 4, 1, 3, 5)
    colours = np.array([180.0, 120.0, 170.0]) + parts.reshape(-1, 10 * SIDE, 1) * np.array([35.0, 50.0, 25.0])
    return np.ascontiguousarray(colours.clip(0, 255).astype(np.uint8).transpose(2, 0, 1))


def network(seen: Cohort) -> nn.Sequential:
    """Returns the random network that all ways start from, in evaluation mode."""
    encoder = Encoder()
    model = nn.Sequential(
        gg.models.Normalise(MEAN, STD), BagNetwork(encoder, AttentionPool(FEATURES, 2, width=0, hidden=32))
    )
    with torch.no_grad():
        model(torch.cat([seen.patches(number) for number in range(20)]))  # in training mode: the norm takes its numbers
    return model.eval()


class Seed:
    """Slides and a network, and what each way makes of them."""

    def __init__(self, seed: int, args: argparse.Namespace) -> None:
        draw = np.random.default_rng((7, seed))
        needle = draw.permutation(ORDERED)
        self.seed, self.args = seed, args
        self.seen, self.unseen = (Cohort(count, args.patches, needle, draw) for count in (args.slides, args.unseen))
        torch.manual_seed(seed)
        self.model = network(self.seen)
        self.start = copy.deepcopy(self.model.state_dict())
        self.engine = gg.compile(self.model, F.cross_entropy, memory=args.memory)
        self.patches = [self.seen.patches(number) for number in range(args.slides)]
        encode = nn.Sequential(self.model[0], self.model.get_submodule("1.encoder"))
        with torch.no_grad():
            self.features = [encode(patches) for patches in self.patches]

    def auc(self) -> float:
        """Scores all patches of each slide nobody trained on; returns the share of pairs in the right order."""
        found: tuple[list[float], list[float]] = [], []
        for bag, label in zip(self.unseen.bags, self.unseen.labels, strict=True):
            no, yes = self.engine.forward(bag)[0].tolist()
            found[int(label)].append(yes - no)
        return round(fmean((one > zero) + 0.5 * (one == zero) for one in found[1] for zero in found[0]), 4)

    def train(self, way: str, factor: float) -> float:
        """Trains from the start; returns the area under the ROC curve. The last epoch's mean loss goes to stderr."""
        args, draw = self.args, np.random.default_rng(self.seed)
        self.model.load_state_dict(self.start)
        encoder, head = (self.model.get_submodule(f"1.{name}") for name in ("encoder", "head"))
        rates = [factor * args.learning_rate, factor * args.encoder_rate]
        parts = [{"params": [*part.parameters()]} for part in (head, encoder)][: 1 if way == FROZEN else 2]
        optimizer = torch.optim.Adam(parts)
        steps = args.slides // args.together
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rates[: len(parts)], args.epochs * steps, pct_start=0.05, cycle_momentum=False
        )
        sampled = max(1, round(SAMPLED * args.patches))
        for _ in range(args.epochs):
            total = 0.0
            for numbers in draw.permutation(args.slides)[: steps * args.together].reshape(steps, -1):
                optimizer.zero_grad()
                for number in numbers.tolist():
                    label = self.seen.labels[number]
                    if way == ALL:
                        loss = self.engine.backward(self.seen.bags[number], label)
                    elif way == FROZEN:
                        (loss := F.cross_entropy(head(self.features[number]), label)).backward()
                    else:
                        chosen = draw.choice(args.patches, sampled, replace=False)
                        (loss := F.cross_entropy(self.model(self.patches[number][chosen]), label)).backward()
                    total += loss.item()
                optimizer.step()
                schedule.step()
        found = self.auc()
        mean = total / (steps * args.together)
        print(f"seed {self.seed}, {way}, rates x {factor}: loss {mean:.4f}, AUC {found}", file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--slides", type=int, default=400, help="to train on")
    parser.add_argument("--unseen", type=int, default=200, help="slides of the test")
    parser.add_argument("--patches", type=int, default=200, help="of a slide; a multiple of 10")
    parser.add_argument("--together", type=int, default=4, help="slides of a step")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="of the head, at its highest")
    parser.add_argument("--encoder-rate", type=float, default=0.012, help="of the encoder, at its highest")
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[0.3, 1.0, 3.0], help="of both, where one may choose"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start = time.perf_counter()
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    peaks: list[int] = []
    for number in range(args.seeds):
        seed = Seed(number, args)
        for way in WAYS:
            found[way].append([seed.train(way, factor) for factor in (args.factors if way != ALL else [1.0])])
        assert seed.engine.last_run is not None
        peaks.append(seed.engine.last_run.peak_bytes)
    auc = {way: [max(of_seed) for of_seed in by_seed] for way, by_seed in found.items()}
    line = {
        "auc": auc,
        "mean_auc": {way: round(fmean(scores), 4) for way, scores in auc.items()},
        "auc_by_factor": {way: found[way] for way in WAYS if way != ALL},
        "factors": args.factors,
        "slides": args.slides,
        "patches": args.patches,
        "steps": args.epochs * (args.slides // args.together),
        "memory": args.memory,
        "peak_bytes": max(peaks),
        "cpu_seconds": round(time.process_time(), 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
