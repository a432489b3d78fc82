"""Which parallelism when: PipeDream's published profiles, and a U-Net on whole images.

    python bench/pipelines.py

Arithmetic only. Speed-ups are over data parallelism on as many ranks, from three assumptions of what it costs to sum
the gradients of a stage's copies; for each, trying all splits of a coarser chain finds what the planner finds. The
U-Net needs segmentation-models-pytorch. Prints rows, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import inf, isclose
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.deep_unet import deep_unet
from bench.pipedream_profiles import RESNET50, VGG16
from gigagrad.scaling import Layer, Link, Replicated, parse_link, replicated, split

CARD = parse_link("10Gbit/s")
LINKS = {"10 Gbit/s each": CARD, "10 Gbit/s shared by 4": CARD.shared(4)}
RANKS = 16
PUBLISHED = {"vgg16": "15-1, up to 5.3", "resnet50": "16, 1"}
"""Narayanan et al., SOSP 2019, on 4 machines of 4 V100 with 10 Gbit/s between them: split and speed-up."""
PRINTED = {"10 Gbit/s each": 3.1296298528194013, "10 Gbit/s shared by 4": 9.49672926059045}
"""Speed-ups of VGG-16 that their program prints (-n 16 -b 1250000000; 312500000); cuts cost nothing by default."""


def seconds(layers: Sequence[Layer]) -> float:
    return sum(layer.seconds for layer in layers)


def parameters(layers: Sequence[Layer]) -> int:
    return sum(layer.parameter_bytes for layer in layers)


def pipedream_program(layers: Sequence[Layer], ranks: int, link: Link) -> float:
    """As optimizer_graph_hierarchical.py has it: what a ring sends, what it receives and the compute take turns."""
    return (seconds(layers) + 2 * link.sum_seconds(parameters(layers), ranks)) / ranks


def one_bus(layers: Sequence[Layer], ranks: int, link: Link) -> float:
    """The bytes of all copies' rings one after another on one link, beside the compute."""
    return max(seconds(layers), ranks * link.sum_seconds(parameters(layers), ranks)) / ranks


SUMS: dict[str, Replicated] = {
    "ring beside the compute": replicated,
    "PipeDream's program": pipedream_program,
    "all copies on one bus": one_bus,
}


def exhaustive(layers: Sequence[Layer], ranks: int, link: Link, stage_seconds: Replicated, first: int = 0) -> float:
    """The slowest stage of the best of all splits."""
    if first == len(layers):
        return 0.0
    cut = 2 * link.seconds(layers[first - 1].cut_bytes) if first else 0.0
    return min(
        (
            max(
                cut,
                stage_seconds(layers[first:stop], own, link),
                exhaustive(layers, ranks - own, link, stage_seconds, stop),
            )
            for stop in range(first + 1, len(layers) + 1)
            for own in range(1, ranks + 1)
        ),
        default=inf,
    )


def coarser(layers: Sequence[Layer], count: int) -> list[Layer]:
    """So many runs of layers of about equal time, and the last one by itself."""
    done = list(accumulate(layer.seconds for layer in layers))
    ends = sorted({next(i for i, s in enumerate(done, 1) if s * count >= k * done[-1]) for k in range(1, count)})
    groups = [layers[a:b] for a, b in pairwise([0, *ends, len(layers) - 1, len(layers)]) if a < b]
    return [Layer(seconds(group), group[-1].cut_bytes, parameters(group)) for group in groups]


def pipedream() -> list[dict[str, Any]]:
    found = []
    profiles = {"vgg16": VGG16, "resnet50": RESNET50}
    for (network, layers), (where, link), (how, stage_seconds) in product(
        profiles.items(), LINKS.items(), SUMS.items()
    ):
        best, data = split(layers, RANKS, link, stage_seconds), stage_seconds(layers, RANKS, link)
        coarse = coarser(layers, 6)
        row = {
            "network": network,
            "link": where,
            "sums": how,
            "split": str(best),
            "cut_behind": [stage.stop for stage in best.stages[:-1]],
            "milliseconds": round(1000 * best.seconds, 1),
            "data_parallel_milliseconds": round(1000 * data, 1),
            "speedup": round(data / best.seconds, 2),
            "published": PUBLISHED[network],
            "equals_exhaustive": split(coarse, 8, link, stage_seconds).seconds
            == exhaustive(coarse, 8, link, stage_seconds),
        }
        print(row, flush=True)
        found.append(row)
    return found


def free_cuts() -> dict[str, bool]:
    """Whether the planner finds what PipeDream's program prints, link by link."""
    layers = [replace(layer, cut_bytes=0) for layer in VGG16]
    return {
        where: isclose(
            pipedream_program(layers, RANKS, link) / split(layers, RANKS, link, pipedream_program).seconds,
            PRINTED[where],
        )
        for where, link in LINKS.items()
    }


def unet_bytes(side: int) -> tuple[list[int], int, int]:
    """Of a ResNet-34 U-Net: activations that cross each cut of its blocks, halos at a seam between tiles, parameters.

    A cut is crossed by the block before it and by every skip that a later one reads. At a seam each convolution and
    pooling reads kernel - stride rows of its input that lie on the other side; as much gradient is sent back.
    """
    model: Any = deep_unet("resnet34").to("meta")
    halos: list[int] = []
    blocks: list[int] = []

    def note_halo(module: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        kernel, stride = (size[0] if isinstance(size, tuple) else size for size in (module.kernel_size, module.stride))
        halos.append(2 * max(kernel - stride, 0) * inputs[0][:, :, 0].nbytes)

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.MaxPool2d):
            module.register_forward_hook(note_halo)
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda _, __, output: blocks.append(output.nbytes))
    image = torch.empty(1, 3, side, side, device="meta")
    model(image)
    halo_bytes = sum(halos)
    skips = [feature.nbytes for feature in model.encoder(image)[1:]]
    cuts = [*accumulate(skips), *(block + sum(skips[: max(3 - i, 0)]) for i, block in enumerate(blocks))]
    return cuts, halo_bytes, sum(parameter.nbytes for parameter in model.parameters())


def whole_images(ranks: int, step_seconds: float, images: Sequence[int]) -> dict[str, Any]:
    """Seconds of a step on images of 8192 px, all in balance, every cut of the pipeline as the narrowest."""
    link = parse_link("10Gbit/s,50us")
    cuts, halo_bytes, parameter_bytes = unet_bytes(8192)
    gradients = link.sum_seconds(parameter_bytes, ranks)
    cut_seconds = 2 * link.seconds(min(cuts))
    return {
        "ranks": ranks,
        "one_rank_seconds": step_seconds,
        "cut_gigabytes": [round(2 * cut / 1e9, 1) for cut in cuts],
        "seam_gigabytes": round(halo_bytes / 1e9, 3),
        "parameter_gigabytes": round(parameter_bytes / 1e9, 3),
        "side_where_a_cut_moves_as_much_as_a_sum": round(8192 * (parameter_bytes / max(cuts)) ** 0.5),
        "step_seconds": {
            count: {
                "tile": round(count * (step_seconds / ranks + link.seconds(halo_bytes)) + gradients, 2),
                "data": round(-(-count // ranks) * step_seconds + (gradients if count > 1 else 0), 2),
                "pipeline": round(
                    step_seconds + (ranks - 1) * cut_seconds + (count - 1) * max(step_seconds / ranks, cut_seconds), 2
                ),
            }
            for count in images
        },
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    result: dict[str, Any] = {"pipedream": pipedream(), "as_their_program_prints": free_cuts()}
    result["unet"] = [whole_images(8, step_seconds, (1, 8, 64)) for step_seconds in (362.0, 0.362)]
    print(*result["unet"], sep="\n", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
