"""Check whether ranks that compute an image together were given the same: digests go with the message that begins a
step.

Images and dense targets are compared by their pixels: all of them up to a few megabytes, more in memory by strips, more
in files by boxes. Weights are compared whole at first, then some numbers of each, other ones at every step, so that a
single number that differs is met after some hundred steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import imagecodecs
import torch

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.execution.sources import Source
from gigagrad.graphs import Graph, LossModule
from gigagrad.images import Image
from gigagrad.images.bag import Bag
from gigagrad.images.views import ArrayImage, TensorImage
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import as_bytes, named

_crc32: Any = imagecodecs.deflate_crc32  # takes any buffer; its type stubs name only three kinds
_WHOLE_BYTES = {True: 2**24, False: 2**20}
"""Images of so many bytes in memory, or in files, are compared whole."""
_STRIPS, _BOXES, _BOX_PX = 64, 4, 128
"""Strips of all columns in which a larger image in memory is compared; boxes down and across, and their side, in a
file."""
_NUMBERS = 2**15
"""Numbers of all weights that are compared at a step, about."""

Facts = Mapping[str, Any]
"""The inputs of a rank, by name."""


class Agreement:
    """Compares what the ranks of one engine were given; its `settings` are those that all ranks must have in common."""

    def __init__(self, ranks: Ranks, composite: LossModule, settings: Mapping[str, object]) -> None:
        self._ranks, self._composite = ranks, composite
        self._settings = {name: repr(value) for name, value in settings.items()}
        self._nodes = lru_cache(maxsize=8)(_node_digests)
        self._step = 0
        self.drift = False
        """True where weights may drift apart in their last bits, as some ranks' processors round otherwise."""

    def all_gather_object(
        self, word: Any, graph: Graph, sources: Mapping[str, Source], *, backward: bool, content: bool
    ) -> list[Any]:
        """Return each rank's `word`, by rank. Ranks compare what they were given, the `content` of images and weights,
        too.

        Raises ConfigError, on every rank, where it is not the same on all.
        """
        if self._ranks.count == 1:
            return [word]
        facts: dict[str, Any] = {name: repr(source.spec) for name, source in sources.items()}
        weights = self._weights(graph) if content else {}
        if content:
            facts = {name: f"{spec} {_content(sources[name])}" for name, spec in facts.items()}
            facts |= {"step": self._step, "weights": _digest(weights, self._step)}
        modes = _crc([bytes(module.training for module in self._composite.modules())])
        more = {"settings": self._settings, "direction": backward, "modes": modes, "graph": self._nodes(graph)[-1]}
        words, told = zip(*self._ranks.all_gather_object([word, facts | more]), strict=True)
        self._check(told, graph, sorted({name for one in told for name in one if name.startswith(("image", "target"))}))
        if content:
            self._check_weights(told, weights)
        return [*words]

    def _check(self, told: Sequence[Facts], graph: Graph, inputs: Sequence[str]) -> None:
        if others := _others(told, inputs):
            names = " and another ".join(name for name in inputs if _others(told, [name]))
            raise ConfigError(
                f"{_were(others)} given another {names} than rank 0, and ranks of a mesh compute one image together; "
                "give all of them the same (a DistributedSampler deals out different ones), or leave mesh= out. For "
                'several images at a time, deal them out over "data" of init_device_mesh("cpu", (D, T), '
                'mesh_dim_names=("data", "tile")); in fit, --accumulate D --mesh DxT'
            )
        settings = [one["settings"] for one in told]
        if others := _others(settings, settings[0]):
            names = " and another ".join(name for name in settings[0] if _others(settings, [name]))
            raise ConfigError(f"{_were(others)} compiled with another {names} than rank 0; give all ranks the same")
        if others := _others(told, ["direction"]):
            raise ConfigError(f"{named(others)} and rank 0 were asked for different things; call the same on all ranks")
        if others := _others(told, ["graph"]):
            if _others(told, ["modes"]):
                raise ConfigError(
                    f"the model is in another mode on {named(others)} than on rank 0; call .train() or .eval() alike "
                    "on all ranks"
                )
            first = self._first(others[0], self._nodes(graph)[:-1])
            raise ConfigError(
                f"{named(others)} would compute something else than rank 0{_place(graph, first)}; give all ranks the "
                "same model and the same loss"
            )

    def _check_weights(self, told: Sequence[Facts], weights: Mapping[str, torch.Tensor]) -> None:
        steps, digests = [one["step"] for one in told], [one["weights"] for one in told]
        step = steps[0]
        if _others(told, ["step"]):  # an engine of one of them is new
            step, digests = 0, self._ranks.all_gather_object(_digest(weights, 0))
        self._step = max(steps) + 1
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others and not (self.drift and step):
            first = self._first(others[0], [_crc([torch.cat([some])]) for some in _some(weights, step)])
            raise ConfigError(
                f"{named(others)} {'has' if len(others) == 1 else 'have'} other weights than rank 0, the first of them "
                f"{_own([*weights][first])}; begin with the same on all ranks (torch.manual_seed, load_state_dict) "
                "and step with the same optimizer"
            )

    def _first(self, other: int, digests: Sequence[str]) -> int:
        """Return the place of the first of these that a rank has otherwise than rank 0."""
        told = self._ranks.all_gather_object([*digests])
        pairs = itertools.zip_longest(told[0], told[other])
        return next(place for place, (one, two) in enumerate(pairs) if one != two)

    def _weights(self, graph: Graph) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that a graph reads."""
        there = {**graph.closed, **self._composite.named_tensors()}
        names = [node.arguments["name"] for node in graph.nodes if node.op in ("parameter", "buffer")]
        return {name: there[name].detach() for name in names}


def _others(told: Sequence[Facts], names: Iterable[str]) -> list[int]:
    """Return the ranks that differ from the first under one of these names."""
    names = [*names]
    return [rank for rank, one in enumerate(told) if any(one.get(name) != told[0].get(name) for name in names)]


def _place(graph: Graph, node: int) -> str:
    """Say where a node is from."""
    found = graph[min(node, len(graph.nodes) - 1)]
    where = _own(found.arguments["name"]) if found.is_source else found.origin.source or found.origin.module_path
    return where and f", first at {where}"


def _own(name: str) -> str:
    """Return the name of a parameter or buffer as the model has it."""
    return name.removeprefix("model.")


def _were(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def _crc(chunks: Iterable[torch.Tensor | bytes]) -> str:
    found = 0
    for one in chunks:
        found = _crc32(as_bytes(one).numpy() if isinstance(one, torch.Tensor) else one, found)
    return f"{found:08x}"


def _content(source: Source) -> str:
    if source.image is None:
        return _crc([] if source.tensor is None else [source.tensor])
    return _crc(source.read(box) for box in _looked_at(source.image, source.spec.dtype.itemsize))


def _looked_at(image: Image | Bag, value_bytes: int) -> list[Box]:
    """Return the boxes on which images are compared, or the patches of a bag."""
    if isinstance(image, Bag):
        at_once = max(1, _WHOLE_BYTES[False] // _BOXES // (prod(image.shape[1:]) * value_bytes))
        return [Box(start, 0, stop, 1) for start, stop in _spread(len(image), at_once, _BOXES)]
    in_memory = isinstance(image, ArrayImage | TensorImage)
    row_bytes = image.channels * image.width * value_bytes
    if image.height * row_bytes <= _WHOLE_BYTES[in_memory]:
        return [Box.whole(image.height, image.width)]
    if in_memory:
        down, across, size = _STRIPS, 1, (max(1, _WHOLE_BYTES[True] // _STRIPS // row_bytes), image.width)
    else:
        down, across, size = _BOXES, _BOXES, (_BOX_PX, _BOX_PX)
    rows, columns = _spread(image.height, size[0], down), _spread(image.width, size[1], across)
    return [Box(y0, x0, y1, x1) for y0, y1 in rows for x0, x1 in columns]


def _spread(length: int, size: int, count: int) -> list[tuple[int, int]]:
    """Return so many spans, in the middle of equal shares."""
    size = min(size, length)
    starts = [(length - size) * (2 * i + 1) // (2 * count) for i in range(count)]
    return [(start, start + size) for start in starts]


def _some(weights: Mapping[str, torch.Tensor], step: int) -> Iterator[torch.Tensor]:
    """Yield what of each is compared at a step: at the first all of it, then numbers at equal distances, others each
    time.
    """
    stride = max(1, sum(weight.numel() for weight in weights.values()) // _NUMBERS) if step else 1
    for weight in weights.values():
        first = step % max(1, min(stride, weight.numel()))
        if weight.is_contiguous() or stride == 1:
            yield weight.reshape(-1)[first::stride]
        else:  # without a copy of all of it
            places = torch.arange(first, weight.numel(), stride, device=weight.device)
            yield weight[torch.unravel_index(places, weight.shape)]


def _digest(weights: Mapping[str, torch.Tensor], step: int) -> str:
    """Digest what is compared of them at a step; all of them one by one, a few numbers of each together."""
    some, together = _some(weights, step), dict[tuple[torch.dtype, torch.device], list[torch.Tensor]]()
    if not step:
        return _crc(some)
    for one in some:
        together.setdefault((one.dtype, one.device), []).append(one)
    return _crc(map(torch.cat, together.values()))


def _node_digests(graph: Graph) -> tuple[str, ...]:
    """Digest each node, and all of them."""
    found = []
    for node in graph.nodes:
        # Where it was traced is each rank's own, as are the names of what it closes over.
        arguments = {name: value for name, value in node.arguments.items() if name != "device"}
        form = f"{node.shape} {node.dtype} {node.axes} {node.patches} {node.differentiable}"
        told = f"{node.op} {arguments} {form}".encode()
        found.append(_crc([told, graph.constants[node.arguments["name"]]] if node.op == "constant" else [told]))
    return *found, _crc(["".join(found).encode(), repr((graph.outputs, *graph.updates.items())).encode()])
