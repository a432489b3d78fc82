"""Networks that take a slide as its patches: an encoder makes a vector of each patch, a head one answer of all vectors.

Multiple-instance learning, in its published forms. Features are `(N, D)`, a row for each of the `N` patches of a bag,
and a head gives `(1, classes)`:

    mean, max    embedding-level pooling (Ilse, Tomczak and Welling, 2018, eqs. 2 and 3), then a linear layer
    abmil        gated attention (the same, eqs. 7 and 9)
    clam         CLAM-SB: gated attention and classifiers of the patches with most and least of it (Lu et al., 2021)
    transmil     two layers of Nystrom attention with convolutions between them (Shao et al., 2021)

Shapes depend on `N` and on no value, so that `torch.export` traces all of them. An encoder has to see each patch by
itself, along the first axis; only a head mixes patches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.errors import ModelError

ClamOutput: TypeAlias = tuple[Tensor, Tensor]
"""Output of a `Clam` in training, for the loss `clam`: logits `(1, classes)`, and `(classes, 2 k, 2)` logits of each
class's own classifier for the `k` patches of most attention and then the `k` of least: of no evidence for the class,
and of some. A plain tuple, since engines do not follow the attributes of a named one from call to call.
"""


class Head(nn.Module, ABC):
    """Base of heads: `(N, D)` features of patches -> `(1, classes)`."""

    @abstractmethod
    def forward(self, features_ND: Tensor) -> Tensor | ClamOutput: ...

    @abstractmethod
    def attention(self, features_ND: Tensor) -> Tensor:
        """Return how much each patch counts, `(N,)`, to look at."""


class BagNetwork(nn.Module):
    """A bag `(N, C, h, w)` of floats, preprocessed -> what `head` makes of the features of its patches.

    An encoder without a parameter that is trained stays in eval mode: its features are then those that it always has,
    without dropout, and with the running statistics of its norms.
    """

    def __init__(self, encoder: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def train(self, mode: bool = True) -> BagNetwork:
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.encoder.parameters()):
            self.encoder.eval()
        return self

    def forward(self, x_NCHW: Tensor) -> Tensor | ClamOutput:
        output: Tensor | ClamOutput = self.head(self._features(x_NCHW))
        return output

    def attention(self, x_NCHW: Tensor) -> Tensor:
        """Return how much each patch counts, `(N,)`."""
        return self.head.attention(self._features(x_NCHW))

    def _features(self, x_NCHW: Tensor) -> Tensor:
        features_ND: Tensor = self.encoder(x_NCHW)
        if features_ND.ndim != 2:
            raise ModelError(
                f"the encoder gives {tuple(features_ND.shape)} for {len(x_NCHW)} patches; expected one vector each, "
                "(N, D): choose an encoder that pools over its pixels"
            )
        return features_ND


class MeanPool(Head):
    """Mean of the features, then a linear layer."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)

    def forward(self, features_ND: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features_ND.mean(0, keepdim=True))
        return logits

    def attention(self, features_ND: Tensor) -> Tensor:
        """Return `1 / N` for each patch."""
        return torch.full_like(features_ND[:, 0], 1 / len(features_ND))


class MaxPool(Head):
    """Largest value of each feature, then a linear layer. Patches that share a maximum share its gradient."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)

    def forward(self, features_ND: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features_ND.amax(0, keepdim=True))
        return logits

    def attention(self, features_ND: Tensor) -> Tensor:
        """Return the share of the features that each patch has the maximum of."""
        highest_ND = (features_ND == features_ND.amax(0)).to(features_ND.dtype)
        return (highest_ND / highest_ND.sum(0)).mean(1)


class GatedAttention(nn.Module):
    """`(N, width)` -> `(N, 1)` scores `w^T (tanh(V h) * sigmoid(U h))`, eq. 9 of Ilse et al. before its softmax."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden)
        self.score = nn.Linear(hidden, 1)
        self.dropout = _dropout(dropout)

    def forward(self, h_NW: Tensor) -> Tensor:
        value_NH, gate_NH = torch.tanh(self.value(h_NW)), torch.sigmoid(self.gate(h_NW))
        scores_N1: Tensor = self.score(self.dropout(value_NH) * self.dropout(gate_NH))
        return scores_N1


class AttentionPool(Head):
    """Gated attention pooling: features to `width` with a ReLU, their mean by attention, then a linear layer.

    With `width=0` the features are pooled as they are. Ilse et al. take 128 for `hidden`, and 512 for `width` on
    histopathology.
    """

    def __init__(
        self, features: int, classes: int, *, width: int = 512, hidden: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ReLU(), _dropout(dropout)) if width else nn.Identity()
        self.scores = GatedAttention(width or features, hidden, dropout)
        self.classifier = nn.Linear(width or features, classes)

    def forward(self, features_ND: Tensor) -> Tensor:
        h_NW = self.embed(features_ND)
        logits: Tensor = self.classifier(_weights(self.scores(h_NW)) @ h_NW)
        return logits

    def attention(self, features_ND: Tensor) -> Tensor:
        return _weights(self.scores(self.embed(features_ND)))[0]


def _dropout(share: float) -> nn.Module:
    """Make dropout that does not ask for the mode where there is none, so that one graph serves both modes."""
    return nn.Dropout(share) if share else nn.Identity()


def _weights(scores_N1: Tensor) -> Tensor:
    """Make `(1, N)` weights that add up to 1 of the patches' scores."""
    return scores_N1.transpose(0, 1).softmax(1)


class Clam(Head):
    """CLAM with a single attention branch: gated attention, and in training classifiers of patches for the loss `clam`.

    The published network is `width` 512, `hidden` 256 and dropout 0.25 behind the embedding and both of the attention's
    layers. A bag of fewer patches than `k` gives as many as it has.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        width: int = 512,
        hidden: int = 256,
        dropout: float = 0.25,
        k: int = 8,
    ) -> None:
        super().__init__()
        if classes < 2 or k < 1:
            raise ValueError(f"clam takes two classes or more and k of one or more; got classes={classes}, k={k}")
        self.k = k
        self.pool = AttentionPool(features, classes, width=width, hidden=hidden, dropout=dropout)
        self.instances = nn.ModuleList(nn.Linear(width or features, 2) for _ in range(classes))

    def forward(self, features_ND: Tensor) -> Tensor | ClamOutput:
        h_NW = self.pool.embed(features_ND)
        scores_N1 = self.pool.scores(h_NW)
        logits_1C: Tensor = self.pool.classifier(_weights(scores_N1) @ h_NW)
        if not self.training:
            return logits_1C
        k, scores_N = min(self.k, len(h_NW)), scores_N1.flatten()
        chosen_2K = torch.cat([scores_N.topk(k).indices, scores_N.topk(k, largest=False).indices])
        chosen_2KW = h_NW.index_select(0, chosen_2K)
        return logits_1C, torch.stack([each(chosen_2KW) for each in self.instances])

    def attention(self, features_ND: Tensor) -> Tensor:
        return self.pool.attention(features_ND)


_RESIDUAL_KERNEL: Final = 33
"""Tokens that the convolution of values in Nystrom attention spans, as in its published code."""


class NystromAttention(nn.Module):
    """`(T, width)` tokens -> the same; attention of several heads by landmarks (Xiong et al., 2021, eqs. 13 to 15).

    Each landmark is the mean of a run of tokens. `softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V`, with
    `iterations` steps towards the pseudo-inverse, and a convolution over tokens of each head's values added. Tokens are
    zero in front to fill the runs, as in the published code, and take part. With a landmark for each token and an exact
    pseudo-inverse it is softmax attention.
    """

    def __init__(
        self, width: int, *, heads: int = 8, landmarks: int = 256, iterations: int = 6, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.scale = (width // heads) ** -0.5
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), _dropout(dropout))
        self.residual = nn.Conv2d(
            heads, heads, (_RESIDUAL_KERNEL, 1), padding=(_RESIDUAL_KERNEL // 2, 0), groups=heads, bias=False
        )

    def forward(self, x_TW: Tensor) -> Tensor:
        left_HTL, inverse_HLL, right_HLT, v_HTE = self._kernels(x_TW)
        y_HTE = (left_HTL @ inverse_HLL) @ (right_HLT @ v_HTE) + self.residual(v_HTE[None])[0]
        y_TW: Tensor = self.to_out(y_HTE.transpose(0, 1).flatten(1)[-len(x_TW) :])
        return y_TW

    def row(self, x_TW: Tensor, token: int) -> Tensor:
        """Return how much attention `token` gives to each token, `(T,)`, the mean over heads. Some may be below 0."""
        left_HTL, inverse_HLL, right_HLT, _ = self._kernels(x_TW)
        padding = left_HTL.shape[1] - len(x_TW)
        given_HT = ((left_HTL[:, padding + token, None] @ inverse_HLL) @ right_HLT)[:, 0]
        return given_HT.mean(0)[padding:]

    def _kernels(self, x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = math.ceil(len(x_TW) / self.landmarks)
        x_TW = F.pad(x_TW, (0, 0, run * self.landmarks - len(x_TW), 0))
        qkv_3HTE = self.to_qkv(x_TW).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q_HTE, k_HTE, v_HTE = qkv_3HTE[0] * self.scale, qkv_3HTE[1], qkv_3HTE[2]
        q_HLE, k_HLE = (each.unflatten(1, (self.landmarks, run)).mean(2) for each in (q_HTE, k_HTE))
        left_HTL = (q_HTE @ k_HLE.transpose(1, 2)).softmax(2)
        middle_HLL = (q_HLE @ k_HLE.transpose(1, 2)).softmax(2)
        right_HLT = (q_HLE @ k_HTE.transpose(1, 2)).softmax(2)
        return left_HTL, pseudo_inverse(middle_HLL, self.iterations), right_HLT, v_HTE


def pseudo_inverse(a_HLL: Tensor, iterations: int) -> Tensor:
    """Approach the Moore-Penrose inverse of square matrices by matrix products (Razavi et al., 2014)."""
    sizes = a_HLL.abs()
    z_HLL = a_HLL.transpose(1, 2) / (sizes.sum(1).amax() * sizes.sum(2).amax())
    one_LL = torch.eye(a_HLL.shape[-1], dtype=a_HLL.dtype, device=a_HLL.device)
    for _ in range(iterations):
        az_HLL = a_HLL @ z_HLL
        z_HLL = 0.25 * z_HLL @ (13 * one_LL - az_HLL @ (15 * one_LL - az_HLL @ (7 * one_LL - az_HLL)))
    return z_HLL


class TransLayer(nn.Module):
    """Nystrom attention of normalised tokens, added to the tokens."""

    def __init__(self, width: int, heads: int, landmarks: int, iterations: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = NystromAttention(width, heads=heads, landmarks=landmarks, iterations=iterations, dropout=dropout)

    def forward(self, x_TW: Tensor) -> Tensor:
        y_TW: Tensor = x_TW + self.attn(self.norm(x_TW))
        return y_TW


class PositionEncoding(nn.Module):
    """Pyramid position encoding generator (PPEG): tokens behind the first as a square, with convolutions added.

    Each channel has a 7 x 7, a 5 x 5 and a 3 x 3 convolution of its own.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, side, padding=side // 2, groups=width) for side in (7, 5, 3)
        )

    def forward(self, x_TW: Tensor) -> Tensor:
        side = math.isqrt(len(x_TW) - 1)
        square_1WSS = x_TW[1:].transpose(0, 1).reshape(1, -1, side, side)
        encoded_1WSS = square_1WSS + sum(each(square_1WSS) for each in self.convolutions)
        return torch.cat([x_TW[:1], encoded_1WSS[0].flatten(1).transpose(0, 1)])


class TransMil(Head):
    """TransMIL: patches in file order as a square, a class token, and Nystrom attention before and behind a PPEG.

    The square is filled up with the first patches once more. Published are a `width` of 512, 8 heads, landmarks of half
    the width, 6 iterations, and dropout 0.1.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        width: int = 512,
        heads: int = 8,
        landmarks: int | None = None,
        iterations: int = 6,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        landmarks = width // 2 if landmarks is None else landmarks
        if heads < 1 or width % heads or landmarks < 1:
            raise ValueError(
                "transmil takes a width that its heads divide, and one landmark or more; "
                f"got width={width}, heads={heads}, landmarks={landmarks}"
            )
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.token = nn.Parameter(torch.randn(1, width))
        self.layer1 = TransLayer(width, heads, landmarks, iterations, dropout)
        self.positions = PositionEncoding(width)
        self.layer2 = TransLayer(width, heads, landmarks, iterations, dropout)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, features_ND: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(self.layer2(self._encoded(features_ND)))[:1])
        return logits

    def attention(self, features_ND: Tensor) -> Tensor:
        """Return how much the class token attends to each patch in the second layer; some may be below 0."""
        count = len(features_ND)
        given_S = self.layer2.attn.row(self.layer2.norm(self._encoded(features_ND)), 0)[1:]
        return given_S[:count] + F.pad(given_S[count:], (0, 2 * count - len(given_S)))

    def _encoded(self, features_ND: Tensor) -> Tensor:
        h_NW = self.embed(features_ND)
        missing = (math.isqrt(len(h_NW) - 1) + 1) ** 2 - len(h_NW)
        x_TW: Tensor = self.positions(self.layer1(torch.cat([self.token, h_NW, h_NW[:missing]])))
        return x_TW


HEADS: Final[dict[str, type[Head]]] = {
    "abmil": AttentionPool,
    "clam": Clam,
    "max": MaxPool,
    "mean": MeanPool,
    "transmil": TransMil,
}
