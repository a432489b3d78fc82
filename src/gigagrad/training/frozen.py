"""Train the head of a bag network alone, on features that its frozen encoder has made of all patches once.

That is exact where the features are those that every step would compute: no parameter of the encoder is trained, it is
in eval mode, it sees each patch by itself and draws nothing, as its graph shows, and patches are the same in every
epoch. Then a step reads `(N, D)` numbers from a file, and no pixels (docs/decisions/0068-features-once.md).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from gigagrad.cohorts import Cohort, Row
from gigagrad.cohorts.patches import Bags
from gigagrad.config.fit import FitConfig
from gigagrad.errors import CaptureError, ConfigError, UnsupportedOperatorError
from gigagrad.events import Events, Notice
from gigagrad.execution.seeds import drawing
from gigagrad.execution.sources import image_source
from gigagrad.graphs import GATHER, LossModule, trace
from gigagrad.images.bag import ArrayBag, Bag
from gigagrad.images.views import AS_STORED
from gigagrad.models.mil import BagNetwork, ClamOutput, Head
from gigagrad.prediction.encoding import Encoder
from gigagrad.prediction.features import features_of, made_of_file, open_features
from gigagrad.ranks import Ranks


class OfFeatures(nn.Module):
    """Computes what a bag network makes of its patches from their features, `(N, D, 1, 1)`. The head is its own."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, features_ND11: Tensor) -> Tensor | ClamOutput:
        output: Tensor | ClamOutput = self.head(features_ND11.flatten(1))
        return output


def head_of(model: nn.Module) -> OfFeatures:
    """Return a model with a frozen encoder without it: the same head, which takes features."""
    return OfFeatures(_network(model).head)


def features_once(
    config: FitConfig, model: nn.Module, bags: Bags | None, largest: Row, folder: Path, events: Events
) -> FeatureBags | None:
    """Return the features of all patches where they are to be computed once, in `folder` unless the settings name
    another; `largest` is a slide to look at. Raises `ConfigError` where they cannot be, and a folder was named.
    """
    reason: str | None = ""
    if bags is not None:
        with bags.open(largest) as bag:
            reason = _why_not(config, model, bag)
    if reason is None and bags is not None:
        found = FeatureBags(bags, folder if config.features is None else Path(config.features), config, model)
        events.emit(Notice(f"the encoder is frozen: its features are computed once, and kept in {found.folder}"))
        return found
    if config.features is not None:
        said = reason or "no encoder of patches is frozen as a whole (--frozen network.encoder)"
        raise ConfigError(f"features cannot be computed once: {said}; leave out --features")
    if reason:
        events.emit(Notice(f"the encoder is frozen, and computes its features in every step: {reason}"))
    return None


def _why_not(config: FitConfig, model: nn.Module, bag: Bag) -> str | None:
    """Say what keeps features from being computed once, though the encoder is frozen; "" where it is not."""
    if not isinstance(model, nn.Sequential) or not isinstance(model[-1], BagNetwork):
        return ""
    encoder = _encoder(model)
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        return ""
    if config.augment or config.stain_jitter or config.colour_jitter:
        return "patches are turned or coloured anew in each epoch (--no-augment, without jitter)"
    if find_spec("h5py") is None:
        return "h5py is not installed (pip install 'gigagrad[bags]')"
    return None if _sees_each_alone(encoder, bag) else "it draws at random, or does not see each patch by itself"


def _network(model: nn.Module) -> BagNetwork:
    assert isinstance(model, nn.Sequential)
    network = model[-1]
    assert isinstance(network, BagNetwork)
    return network


def _encoder(model: nn.Sequential) -> nn.Module:
    """Return the encoder with what stands in front of it, as `resolve_encoder` makes them."""
    parts = [*model.named_children()]
    return nn.Sequential(OrderedDict([*parts[:-1], (parts[-1][0], _network(model).encoder)])).eval()


def _sees_each_alone(encoder: nn.Module, bag: Bag) -> bool:
    """Tell whether features of a patch follow from the patch alone, by the graph of two patches."""
    spec = replace(image_source(bag).spec, shape=(2, *bag.shape[1:]))
    try:
        captured = trace(LossModule(encoder, None), spec, None)
    except (CaptureError, UnsupportedOperatorError):
        return False
    graph = captured.graph
    mixing = drawing(graph) or any(node.is_reduction or node.whole for node in graph.nodes[:-1])
    apart = len(graph.outputs) == 1 and graph[graph.output].op == GATHER and graph.output == len(graph.nodes) - 1
    leaves = captured.effects or captured.left_out or graph.updates or captured.guard.unfollowed
    return apart and not leaves and not mixing


class FeatureBags:
    """Features of all patches of slides, kept in a folder: computed once by an encoder, then read."""

    def __init__(self, bags: Bags, folder: Path, config: FitConfig, model: nn.Module) -> None:
        """Copy the encoder, which computes until it is `done`."""
        assert isinstance(model, nn.Sequential)
        self._made_of: dict[str, dict[str, Any] | None] = {}
        self._bags, self.folder = bags, folder
        self._as_stored = config.input_view == AS_STORED
        self._encoder: Encoder | None = Encoder(
            copy.deepcopy(_encoder(model)), memory=config.memory, device=config.device, precision=config.precision
        )

    def compute(self, cohort: Cohort, events: Events, ranks: Ranks) -> None:
        """Compute what is not there yet, each slide's features by one rank; then forget the encoder. Emits the job
        `features`. Raises `WriteError`, and as `Bags.open` and `Encoder.features`.
        """
        rows, encoder = cohort.rows, self._encoder
        assert encoder is not None

        def of_row(row: Row) -> tuple[int, dict[str, Any]]:
            with cohort.telling(row):
                count = sum(self._of_slide(part, encoder) for part in row.members)
                return count, {part.name: made_of_file(self._path(part)) for part in row.members}

        with events.job("features", len(rows)) as advance:
            found = ranks.map(
                rows, of_row, lambda done, made: advance(done, f"{rows[done - 1].name}: {made[0]} patches")
            )
        self._made_of = {name: made for _, each in found for name, made in each.items()}
        self._encoder = None

    def _of_slide(self, row: Row, encoder: Encoder) -> int:
        with self._bags.open(row) as bag:
            self.folder.mkdir(parents=True, exist_ok=True)
            files = row.files if self._as_stored else ()  # channels that are chosen are told by their pixels
            return len(features_of(bag, encoder, self.folder, name=row.name, files=files))

    def _path(self, row: Row) -> Path:
        return self.folder / f"{row.name}.h5"

    def blank(self, row: Row) -> Bag:
        """Return zeros in the place of features, before there are any. Raises as `Bags.open` and `Encoder.length`."""
        assert self._encoder is not None
        with self._bags.open(row) as bag:
            shape = len(bag), self._encoder.length(bag), 1, 1
            return ArrayBag(np.broadcast_to(np.zeros((), np.float32), shape), name=row.name)

    @contextmanager
    def open(self, row: Row) -> Iterator[Bag]:
        """Open the features of a row as a bag `(N, D, 1, 1)`. Raises `ImageError`, also for those of another encoder
        that somebody has written in their place since.
        """
        found = [open_features(self._path(part), self._made_of[part.name]).features for part in row.members]
        features_ND = found[0] if len(found) == 1 else np.concatenate(found)
        with ExitStack() as opened:
            yield opened.enter_context(ArrayBag(features_ND[..., None, None], name=row.name))
