"""Kept fields of real slides through codecs and roundings: ratio, rate, gradient error against its prediction, Dice.

    python bench/codecs.py [--slides DIR] [--side 2048] [--errors 0.01 0.1] [--draws 8] [--train [--steps 300]]

DIR holds `slides/` and `masks/` with files of the same stem; without it the script says so and measures nothing. From
every slide it takes one square, about half tissue and half glass. Fields are those that a convolution reads and a plan
may keep: the first of paper-unet, the one after the stem of a ResNet-34 (needs timm), and there one in front of a norm
and a ReLU, with true cotangents of a loss against the mask. Rates count bytes of the field as the network made it, for
one thread and processor time, encoding (rounding included) and decoding. The error of the weight's gradient is the root
mean square over `--draws` keys of the dither, divided by the prediction of stores/bounds.py. Its scatter is the same
about the mean of the draws: behind a norm and a ReLU errors have a mean, which is of second order and not predicted.

`--train` measures no fields: it trains a small network with batch normalisation, whose fields are kept, once without
and once with lossy storage for each of three seeds, and compares Dice on pixels that it has not seen; of weights
averaged over the last steps, with statistics of all training images. It trains on bands that hold tissue and glass:
with small squares, statistics of glass alone blow noise up, and chance takes two trainings apart by 0.005. What chance
does is told by a training from weights that differ by a millionth. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from gigagrad.boxes import Box, tiles
from gigagrad.models import PaperUNet, Preprocess
from gigagrad.stores import Blosc, Half, Quantised, Rounding
from gigagrad.stores.rounding import gradient_error, noisy_shares, noisy_squares

AXES = (-2, -1)
BRICK_PX = 128
SEEDS = (0, 1, 2)
_AVERAGED = 0.98
"""Weights are averaged over the last 50 steps or so."""
_BANDS = 4
_DISTURBED = "exact, disturbed"
"""The same training from weights that differ by a millionth in one layer: what chance alone does."""


@dataclass(frozen=True)
class Case:
    """A stored field `(1, C, H, W)`, the convolution that reads it, and the cotangent of what that convolution makes.

    `norm`, in training mode, and a ReLU may stand between the two.
    """

    name: str
    field: Tensor
    layer: nn.Conv2d
    cotangent: Tensor
    norm: nn.BatchNorm2d | None = None

    @torch.no_grad()
    def read(self, stored: Tensor) -> Tensor:
        if self.norm is None:
            return stored
        norm = self.norm
        return F.batch_norm(stored, None, None, norm.weight, norm.bias, training=True, eps=norm.eps).relu()

    def gain(self) -> Tensor | None:
        if self.norm is None:
            return None
        variance = self.field.var((0, 2, 3), correction=0)
        return self.norm.weight.detach() / (variance + self.norm.eps).sqrt()

    def weight_gradient(self, read: Tensor) -> Tensor:
        """Linear in what is read, so that of an error is the error of the gradient."""
        layer = self.layer
        return conv2d_weight(
            read.double(), layer.weight.shape, self.cotangent.double(), layer.stride, layer.padding, layer.dilation
        )

    def tile_squares(self) -> torch.Tensor:
        """Tile by tile, as a run would add them up; what a tile reads is taken without its halo."""
        height, width = self.cotangent.shape[-2:]
        stride = self.layer.stride[0]
        total, gain, read = torch.zeros(self.cotangent.shape[1]).double(), self.gain(), self.read(self.field)
        for box in tiles(height, width, 32, 32):
            crop = read[..., box.y0 * stride : box.y1 * stride, box.x0 * stride : box.x1 * stride]
            total += noisy_squares(noisy_shares(crop, gain), self.cotangent[..., box.y0 : box.y1, box.x0 : box.x1])
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--slides", type=Path, default=default)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--errors", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--storage",
        nargs="+",
        default=["bfloat16", "float16", "error 0.001", "error 0.01"],
        help="what --train compares with exact storage",
    )
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws must be at least 2, got {args.draws}")
    torch.set_num_threads(1)
    crops = list(tissue(args.slides, args.side))
    if not crops:
        print(json.dumps({"skipped": f"no slides with masks in {args.slides}"}))
        return
    if args.train:
        print(json.dumps({"side": args.side, **compare_training(crops, args.steps, args.storage)}))
        return
    roundings: list[Rounding | None] = [None, Half(torch.float16), Half(torch.bfloat16)]
    roundings += [Quantised(bound) for bound in args.errors]
    fields = []
    for slide, image, mask in crops:
        for case in cases(image, mask):
            for rounding in roundings:
                row: dict[str, Any] = {"slide": slide, "field": case.name, "storage": str(rounding or "exact")}
                row |= measure(case, rounding, args.draws)
                fields.append(row)
                print(row, flush=True)
    quantised = [row for row in fields if "gradient_error_over_predicted" in row]
    direct = [row["gradient_error_over_predicted"] for row in quantised if not row["before_norm"]]
    before_norm = [row["gradient_error_over_predicted"] for row in quantised if row["before_norm"]]
    scatter = [row["scatter_over_predicted"] for row in quantised]
    result: dict[str, Any] = {
        "side": args.side,
        "gradient_error_over_predicted": [min(direct), max(direct)],
        "within_1.2": all(1 / 1.2 <= ratio <= 1.2 for ratio in direct),
        "before_norm": [min(before_norm), max(before_norm)] if before_norm else None,
        "scatter_over_predicted": [min(scatter), max(scatter)],
        "fields": fields,
    }
    print(json.dumps(result))


def tissue(folder: Path, side: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`(name, image (1, 3, side, side) uint8, mask (1, 1, side, side) float)` of one square of every slide."""
    for path in sorted((folder / "slides").glob("*")):
        masks = sorted((folder / "masks").glob(f"{path.stem}*.tif"))
        if not masks:
            continue
        with gg.open_image(path) as slide, gg.open_image(masks[0]) as mask:
            _, height, width = slide.shape
            boxes = [box for box in tiles(height, width, side, side) if box.shape == (side, side)]
            shares = {box: float((np.asarray(mask.read(box)) > 0).mean()) for box in boxes}
            if not shares:
                continue
            box = min(boxes, key=lambda box: abs(shares[box] - 0.5))
            target = torch.from_numpy((np.asarray(mask.read(box)) > 0).astype(np.float32))
            yield path.stem, torch.from_numpy(np.array(slide.read(box)))[None], target[None]


def cases(image: Tensor, mask: Tensor) -> Iterator[Case]:
    torch.manual_seed(0)
    paper = PaperUNet()
    yield capture("paper-unet down8", paper.down40, lambda: paper(Preprocess()(image)), mask)
    try:
        import gigagrad.models.torchvision_operators  # noqa: F401, I001

        import timm
    except ImportError:
        print("timm is not installed: no ResNet-34", flush=True)
        return
    # Blocks that begin as the identity (timm's default) would have no gradient inside.
    resnet = timm.create_model("resnet34", features_only=True, out_indices=(1,), zero_init_last=False)
    head = nn.Conv2d(64, 1, 1)
    shrunk = F.adaptive_avg_pool2d(mask, (mask.shape[-2] // 4, mask.shape[-1] // 4))
    normalised = gg.models.Normalise()(image)
    block = resnet.layer1[0]
    yield capture("resnet34 stem", block.conv1, lambda: head(resnet(normalised)[0]), shrunk)
    yield capture("resnet34 before norm", block.conv2, lambda: head(resnet(normalised)[0]), shrunk, block.bn1)


def capture(
    name: str, layer: nn.Conv2d, forward: Callable[[], Tensor], target: Tensor, norm: nn.BatchNorm2d | None = None
) -> Case:
    """Run forward and backward once; catch what `norm` or else `layer` reads, and the cotangent of `layer`'s output."""
    caught: dict[str, Tensor] = {}

    def at_field(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        caught["field"] = inputs[0].detach().clone(memory_format=torch.channels_last)

    def at_output(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda cotangent: caught.update(cotangent=cotangent.detach().clone()))

    handles = [(norm or layer).register_forward_pre_hook(at_field), layer.register_forward_hook(at_output)]
    F.binary_cross_entropy_with_logits(forward(), target).backward()
    for handle in handles:
        handle.remove()
    assert caught["cotangent"].any(), f"nothing depends on {name}"
    return Case(name, caught["field"], layer, caught["cotangent"], norm)


def half_gradient_error(dtype: torch.dtype, field_norm: float, cotangent_norm: float) -> float:
    """Return the largest error that a field stored in float16 or bfloat16 can cause in one weight's gradient.

    By the Cauchy-Schwarz inequality, for values that are not subnormal in `dtype`; `field_norm` is the 2-norm of the
    input channel. There is no dither and errors of equal values are equal, so an expectation that assumed otherwise
    would be wrong exactly on the flat parts of a slide.
    """
    return torch.finfo(dtype).eps / 2 * field_norm * cotangent_norm


def measure(case: Case, rounding: Rounding | None, draws: int) -> dict[str, Any]:
    field = case.field
    height, width = field.shape[-2:]
    row: dict[str, Any] = {
        "shape": list(field.shape),
        "before_norm": case.norm is not None,
        "share_nonzero": round((field != 0).double().mean().item(), 3),
        "rms": round(field.double().square().mean().sqrt().item(), 4),
        "codecs": {"none": throughput(field, rounding, None), "Blosc": throughput(field, rounding, Blosc())},
    }
    if rounding is None:
        return row
    box, exact = Box.whole(height, width), case.read(field)
    errors = [
        case.weight_gradient(case.read(rounding.keyed(key).round(field, box, AXES)) - exact)
        for key in range(draws if isinstance(rounding, Quantised) else 1)
    ]
    measured = root_mean_square(errors)
    gradient = case.weight_gradient(exact)
    row["relative_gradient_error"] = measured.norm().item() / gradient.norm().item()
    if isinstance(rounding, Quantised):
        taps = math.prod(case.layer.weight.shape[1:])
        norms = case.tile_squares().sqrt().tolist()
        predicted = [gradient_error(rounding.error_bound, 1.0, norm, taps) for norm in norms]
        used = [(got, said) for got, said in zip(measured.tolist(), predicted, strict=True) if said > 0]
        row["gradient_error_over_predicted"] = math.hypot(*measured.tolist()) / math.hypot(*predicted)
        ratios = sorted(got / said for got, said in used)
        row["by_output_channel"] = [ratios[0], ratios[-1]]
        mean = sum(errors) / draws
        scatter = root_mean_square([error - mean for error in errors]).norm().item() * math.sqrt(draws / (draws - 1))
        row["scatter_over_predicted"] = scatter / math.hypot(*predicted)
    elif isinstance(rounding, Half) and case.norm is None:
        largest = max(
            error / half_gradient_error(rounding.dtype, read.norm().item(), cotangent.norm().item())
            for cotangent, by_output in zip(case.cotangent[0], errors[0].abs().amax((2, 3)), strict=True)
            for read, error in zip(field[0], by_output.tolist(), strict=True)
            if cotangent.any() and read.any()
        )
        row["gradient_error_over_largest"] = largest
    return row


def root_mean_square(errors: list[Tensor]) -> Tensor:
    """Over draws, of the norm of a weight's `(O, C, h, w)` error: one number for each output channel."""
    return torch.stack([error.square().sum((1, 2, 3)) for error in errors]).mean(0).sqrt()


def throughput(field: Tensor, rounding: Rounding | None, codec: Blosc | None) -> dict[str, float]:
    """Ratio, and megabytes of the field per second of processor time; in bricks, as a store on disk has them."""
    height, width = field.shape[-2:]
    encode_seconds = decode_seconds = 0.0
    field_bytes = encoded_bytes = 0
    for box in tiles(height, width, BRICK_PX, BRICK_PX):
        crop = field[..., box.y0 : box.y1, box.x0 : box.x1].contiguous(memory_format=torch.channels_last)
        start = time.thread_time()
        packed = rounding.pack(crop, box, AXES) if rounding else crop
        stored = packed.permute(0, 2, 3, 1).contiguous()
        data = stored.view(torch.uint8).numpy().reshape(-1)
        encoded: Any = codec.encode(data, stored.itemsize) if codec else data
        encode_seconds += time.thread_time() - start
        out = torch.empty_like(stored)
        start = time.thread_time()
        if codec:
            codec.decode(encoded, out.view(torch.uint8).numpy().reshape(-1))
        else:
            out.copy_(stored)
        read = out.permute(0, 3, 1, 2)
        read = rounding.unpack(read, box, AXES, field.dtype) if rounding else read
        decode_seconds += time.thread_time() - start
        assert torch.equal(read, rounding.round(crop, box, AXES) if rounding else crop)
        field_bytes += crop.nbytes
        encoded_bytes += len(encoded)
    return {
        "ratio": round(field_bytes / encoded_bytes, 3),
        "encode_mb_per_second": round(field_bytes / encode_seconds / 1e6),
        "decode_mb_per_second": round(field_bytes / decode_seconds / 1e6),
    }


class Normed(nn.Module):
    """A small segmentation network that keeps fields: batch normalisation after every convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare = Preprocess()
        self.down = nn.Sequential(*self._block(1, 8, 2), *self._block(8, 16, 2), *self._block(16, 16, 2))
        self.head = nn.Conv2d(16, 1, 1)

    @staticmethod
    def _block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 5, stride, 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    def forward(self, image: Tensor) -> Tensor:
        logits = self.head(self.down(self.prepare(image)))
        return F.interpolate(logits, scale_factor=8.0, mode="bilinear", align_corners=False)


def compare_training(crops: list[tuple[str, Tensor, Tensor]], steps: int, storages: list[str]) -> dict[str, Any]:
    """Train on every other band of the squares, score on those between; all kept fields in files."""
    torch.set_num_threads(2)
    height = crops[0][1].shape[-1] // _BANDS // 8 * 8
    seen, unseen = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for _, image, mask in crops:
        for index in range(_BANDS):
            image_band, mask_band = (value.narrow(-2, index * height, height) for value in (image, mask))
            (unseen if index % 2 else seen).append((image_band, mask_band))
    scores: dict[str, list[float]] = {kind: [] for kind in ("exact", _DISTURBED, *storages)}
    rounded: dict[str, int] = {}
    for seed in SEEDS:
        for kind, collected in scores.items():
            torch.manual_seed(seed)
            model = Normed().train()
            storage = kind
            if kind == _DISTURBED:
                storage = "exact"
                with torch.no_grad():
                    model.head.weight.mul_(1 + 1e-6)
            with tempfile.TemporaryDirectory() as scratch:
                engine = gg.compile(model, F.binary_cross_entropy_with_logits, storage=storage, scratch=scratch)
                engine.load_state_dict(in_files(model, seen[0]))
                rounded[kind] = sum(field.storage == storage != "exact" for field in engine.plan(*seen[0]).kept)
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
                order = torch.Generator().manual_seed(seed)
                average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_AVERAGED))
                for _ in range(steps):
                    optimizer.zero_grad()
                    engine.backward(*seen[int(torch.randint(len(seen), (), generator=order))])
                    optimizer.step()
                    schedule.step()
                    average.update_parameters(model)
            collected.append(dice(settled(average.module, seen), unseen))
            print({"seed": seed, "storage": kind, "fields": rounded[kind], "dice": collected[-1]}, flush=True)
    means = {kind: sum(values) / len(values) for kind, values in scores.items()}
    return {
        "steps": steps,
        "dice": scores,
        "fields_rounded": rounded,
        "mean_difference": {kind: abs(means[kind] - means["exact"]) for kind in (_DISTURBED, *storages)},
        "largest_difference": {
            kind: max(abs(a - b) for a, b in zip(scores[kind], scores["exact"], strict=True))
            for kind in (_DISTURBED, *storages)
        },
    }


@torch.no_grad()
def settled(model: nn.Module, seen: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """With statistics of all training images, not of the last few: what is compared is weights, not luck."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a mean over all that follow
    model.train()
    for image, _ in seen:
        model(image)
    return model.eval()


def in_files(model: nn.Module, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """An engine's own choice of what to keep, with all of it in files."""
    engine = gg.compile(model, F.binary_cross_entropy_with_logits)
    engine.plan(*pair)
    state = engine.state_dict()
    for choice in state["choices"].values():
        choice["kept"] = [[node, "disk"] for node, _ in choice["kept"]]
    return state


@torch.no_grad()
def dice(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> float:
    overlap = total = 0.0
    for image, mask in pairs:
        predicted = model(image) > 0
        overlap += (predicted & (mask > 0)).sum().item()
        total += predicted.sum().item() + (mask > 0).sum().item()
    return 2 * overlap / total


if __name__ == "__main__":
    main()
