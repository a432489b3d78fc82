"""One case of `bench/peers.py`, in a process of its own: a step of one method on one image, and what it took.

    python bench/peers_case.py '{"method": "plain", "network": "paper-unet", "image": "image.tif", ...}'

Prints one JSON line last: the seconds of the step, which step it was, the highest resident memory of the process, the
loss; the gradients go to the file `gradients`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg  # before PyTorch in every process, so that all of them may have huge pages

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.peers import NETWORKS
from gigagrad.boxes import Box
from gigagrad.devices.heap import peak_resident_bytes
from gigagrad.errors import BudgetError
from gigagrad.losses import bce
from gigagrad.models import torchvision_operators  # noqa: F401

_STRIP_PX = 512
Step = Callable[[], Tensor]


def main() -> None:
    warnings.simplefilter("ignore")
    case = json.loads(sys.argv[1])
    try:
        print(json.dumps(run(case)))
    except BudgetError as error:
        print(json.dumps({"refused": str(error)}))


def run(case: dict[str, Any]) -> dict[str, Any]:
    model = network(case)
    begun = time.perf_counter()
    step = METHODS[case["method"].partition(":")[0]](case, model)
    prepared = time.perf_counter() - begun
    for _ in range(case["steps"]):
        model.zero_grad()
        begun = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begun
    peak = peak_resident_bytes()
    gradients: dict[str, Any] = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    np.savez(case["gradients"], **gradients)
    return {
        "seconds": round(seconds, 4),
        "step": case["steps"],
        "prepared_seconds": round(prepared, 2),
        "peak_rss_bytes": peak,
        "loss": value.item(),
    }


def network(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    told = NETWORKS[case["network"]]
    model = gg.models.resolve(told.model).train(told.train)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not told.train:
            module.requires_grad_(False)  # frozen, which is all that lightstream can do with one
    return model


def loss_of(case: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return bce if NETWORKS[case["network"]].dense else F.cross_entropy


def pair(case: dict[str, Any], layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """The image and its target in memory, as one needs them who has no way of reading a part of them."""
    image = whole(case["image"], layout)
    return image, whole(case["mask"], layout) if NETWORKS[case["network"]].dense else torch.tensor([1])


def whole(path: str, layout: torch.memory_format) -> Tensor:
    with gg.open_image(path) as image:
        pixels = torch.empty((1, image.channels, image.height, image.width), dtype=torch.uint8, memory_format=layout)
        for top in range(0, image.height, _STRIP_PX):
            bottom = min(top + _STRIP_PX, image.height)
            strip = image.read(Box(top, 0, bottom, image.width))
            pixels[0, :, top:bottom] = torch.from_numpy(strip)
    return pixels


def gigagrad(case: dict[str, Any], model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # as the others: nothing beside the gradients
    engine = gg.compile(model, loss_of(case), memory=case["budget"], optimizer=optimizer)
    target = case["mask"] if NETWORKS[case["network"]].dense else torch.tensor([1])
    engine.plan(case["image"], target)
    return lambda: engine.backward(case["image"], target)


def plain(
    case: dict[str, Any],
    model: nn.Module,
    forward: Callable[[Tensor], Tensor] | None = None,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    """Autograd over the whole image, in the layout in which PyTorch's convolutions are fastest."""
    layout = torch.channels_last
    model.to(memory_format=layout)  # type: ignore[call-overload]
    image, target = pair(case, layout)
    loss = loss_of(case)

    def step() -> Tensor:
        with within():
            value = loss((forward or model)(image), target)
            value.backward()
        return value.detach()

    return step


def float64(case: dict[str, Any], model: nn.Module) -> Step:
    return plain(case, model.double())


def save_on_cpu(case: dict[str, Any], model: nn.Module) -> Step:
    return plain(case, model, within=torch.autograd.graph.save_on_cpu)


def checkpointed(case: dict[str, Any], model: nn.Module) -> Step:
    forward = checkpointed_unet if NETWORKS[case["network"]].dense else checkpointed_resnet
    return plain(case, model, forward=lambda image: forward(model, image))


def again(part: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """`part`, of which only what it was given is kept; backward computes the rest once more."""
    result: Tensor = checkpoint(part, *given, use_reentrant=False)
    return result


def checkpointed_resnet(model: Any, image: Tensor) -> Tensor:
    """Stem and every residual block by themselves; timm's own switch leaves the stem as it is."""
    net = model.network
    x = again(nn.Sequential(model.preprocess, net.conv1, net.bn1, net.act1, net.maxpool), image)
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in layer:
            x = again(block, x)
    logits: Tensor = net.forward_head(x)
    return logits


def checkpointed_unet(model: Any, image: Tensor) -> Tensor:
    """The paper's network (`gigagrad/models/networks.py`), every level by itself, the head with the last one."""
    net, size = model.network, image.shape[-2:]
    at8 = again(lambda x: net.down8(model.preprocess(x)).relu(), image)
    at40 = again(lambda x: net.down40(x).relu(), at8)
    at160 = again(lambda x: net.down160(x).relu(), at40)
    up40 = again(lambda x, skip: (net.up40(x, output_size=skip.shape[-2:]) + skip).relu(), at160, at40)
    up8 = again(lambda x, skip: (net.up8(x, output_size=skip.shape[-2:]) + skip).relu(), up40, at8)
    return again(lambda x: net.head(net.up1(x, output_size=size).relu()), up8)


def lightstream(case: dict[str, Any], model: Any) -> Step:
    """Its trunk streamed, the head in plain PyTorch, as its `ImageNetClassifier` does it; contiguous.

    Its `StreamingResNet` downloads weights and moves the trunk to a GPU, so this is what stands behind it, with the
    same settings. In `channels_last` it takes wrong borders for granted.
    """
    streaming = importlib.import_module("lightstream.core.constructor").StreamingConstructor
    freeze = importlib.import_module("lightstream.core.utils").freeze_normalization_layers
    net, front = model.network, model.preprocess
    trunk = nn.Sequential(net.conv1, net.bn1, net.act1, net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4)
    image, target = pair(case, torch.contiguous_format)
    tile = min(case["tile"], *image.shape[-2:])
    deviation = 1 / (255 * front.scale)
    settings = {"mean": (-front.shift * deviation)[0], "std": deviation[0], "add_keep_modules": [nn.BatchNorm2d]}
    constructor = streaming(trunk, tile, verbose=False, deterministic=True, **settings)
    constructor.statistics_on_cpu = False  # they are made where the trunk is, and it stays there
    stream = constructor.prepare_streaming_model()
    freeze(stream)
    parts = zip("conv1 bn1 act1 maxpool layer1 layer2 layer3 layer4".split(), stream.stream_module, strict=True)
    for name, part in parts:  # its convolutions are new modules with new parameters
        setattr(net, name, part)
    loss = loss_of(case)

    def step() -> Tensor:
        features = stream(image).requires_grad_()
        value: Tensor = loss(net.forward_head(features), target)
        value.backward()
        stream.backward(image, features.grad)
        return value.detach()

    return step


METHODS: dict[str, Callable[[dict[str, Any], nn.Module], Step]] = {
    "float64": float64,
    "plain": plain,
    "gigagrad": gigagrad,
    "checkpoint": checkpointed,
    "save_on_cpu": save_on_cpu,
    "lightstream": lightstream,
}


if __name__ == "__main__":
    main()
