"""Blocks of attention: among all positions, among a few of them, inside windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import as_tokens, resized
from .recipe import Shapes


class AttentionPool(nn.Module):
    """Gated attention over all positions (multiple-instance learning), back as a gate for each channel."""

    def __init__(self, shapes: Shapes, heads: int, gated: bool) -> None:
        super().__init__()
        c = shapes[0][0]
        self.value, self.gate = nn.Linear(c, 4), nn.Linear(c, 4) if gated else None
        self.score = nn.Linear(4, heads)
        self.back = nn.Linear(heads * c, c)

    def forward(self, x: Tensor) -> Tensor:
        tokens = as_tokens(x)
        hidden = self.value(tokens).tanh()
        if self.gate is not None:
            hidden = hidden * self.gate(tokens).sigmoid()
        attention = self.score(hidden).transpose(1, 2).softmax(-1)
        pooled = torch.bmm(attention, tokens).flatten(1)
        return x * (1 + self.back(pooled).tanh())[:, :, None, None]


class SelfAttention(nn.Module):
    """Multi-head attention among the tokens of a coarse copy of the field, added to it."""

    def __init__(self, shapes: Shapes, kind: str, factor: int, heads: int, mode: str) -> None:
        super().__init__()
        c, d = shapes[0][0], 2 * heads
        self.kind, self.factor, self.heads, self.mode = kind, factor, heads, mode
        self.norm, self.inside, self.outside = nn.LayerNorm(d), nn.Conv2d(c, d, 1), nn.Conv2d(d, c, 1)
        if kind == "module":
            self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        else:
            self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.inside(F.avg_pool2d(x, self.factor, ceil_mode=True))
        tokens = self.norm(as_tokens(coarse))
        if self.kind == "module":
            mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        else:
            n = tokens.shape[1]
            q, k, v = self.qkv(tokens).reshape(1, n, 3, self.heads, 2).permute(2, 0, 3, 1, 4)
            if self.kind == "fused":
                mixed = F.scaled_dot_product_attention(q, k, v)
            else:
                mixed = (q @ k.transpose(-2, -1) * 0.7).softmax(-1) @ v
            mixed = mixed.transpose(1, 2).reshape(1, n, -1)
        y = (tokens + mixed).transpose(1, 2).reshape(coarse.shape)
        return x + resized(self.outside(y), x.shape[-2:], self.mode)


class LinearAttention(nn.Module):
    """Keys are normalised over positions, queries over channels; no table of all pairs."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        c = shapes[0][0]
        self.qkv, self.back = nn.Conv2d(c, 9, 1), nn.Conv2d(3, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        context = torch.einsum("bdn,ben->bde", k.softmax(-1), v)
        y = torch.einsum("bde,bdn->ben", context, q.softmax(1))
        return x + self.back(y.reshape(1, 3, *x.shape[-2:]))


class Regions(nn.Module):
    """Soft regions: their mean features by attention over positions, handed back to every position."""

    def __init__(self, shapes: Shapes, count: int) -> None:
        super().__init__()
        c = shapes[0][0]
        self.assign, self.mix = nn.Conv2d(c, count, 1), nn.Conv2d(2 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.assign(x).flatten(2)
        centres = logits.softmax(2) @ x.flatten(2).transpose(1, 2)
        back = (logits.softmax(1).transpose(1, 2) @ centres).transpose(1, 2).reshape(x.shape)
        return self.mix(torch.cat([x, back], 1))


class CrossAttention(nn.Module):
    """Every position of the first field asks a small grid of the second."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int]) -> None:
        super().__init__()
        (ca, *_), (cb, *_) = shapes
        self.grid = grid
        self.q, self.k, self.v = nn.Linear(ca, 3), nn.Linear(cb, 3), nn.Linear(cb, ca)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        memory = as_tokens(F.adaptive_avg_pool2d(b, self.grid))
        weights = (self.q(as_tokens(a)) @ self.k(memory).transpose(1, 2)).softmax(-1)
        return a + (weights @ self.v(memory)).transpose(1, 2).reshape(a.shape)


class Windows(nn.Module):
    """Windows that partition the field (padded until they do): attention inside each, or a mix of its positions."""

    def __init__(self, shapes: Shapes, kind: str, window: tuple[int, int], shift: bool) -> None:
        super().__init__()
        c = shapes[0][0]
        self.kind, self.window, self.shift = kind, window, shift
        n = window[0] * window[1]
        self.mix = nn.Linear(n, n) if kind == "mix" else nn.Linear(c, 3 * c)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (wh, ww), c = x.shape[-2:], self.window, x.shape[1]
        y = F.pad(x, (0, -w % ww, 0, -h % wh))
        if self.shift:
            y = torch.roll(y, (-(wh // 2), -(ww // 2)), (2, 3))
        rows, columns = y.shape[2] // wh, y.shape[3] // ww
        y = y.permute(0, 2, 3, 1).reshape(1, rows, wh, columns, ww, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(rows * columns, wh * ww, c)
        if self.kind == "mix":
            y = self.mix(y.transpose(1, 2)).transpose(1, 2)
        else:
            q, k, v = self.mix(y).chunk(3, -1)
            y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        y = y.reshape(1, rows, columns, wh, ww, c).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(1, rows * wh, columns * ww, c).permute(0, 3, 1, 2)
        if self.shift:
            y = torch.roll(y, (wh // 2, ww // 2), (2, 3))
        return x + y[:, :, :h, :w]


class Transformer(nn.Module):
    """Patches as tokens behind a class token, two transformer layers, and back; the class token gates the field."""

    def __init__(self, shapes: Shapes, patch: int, first: bool, activation: str) -> None:
        super().__init__()
        c, h, w = shapes[0]
        self.embed = nn.Conv2d(c, 4, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, 4))
        self.position = nn.Parameter(torch.empty(1, 1 + (h // patch) * (w // patch), 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation=activation, batch_first=True)
        layer.norm_first = first
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.back, self.gate = nn.Conv2d(4, c, 1), nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x)
        tokens = self.layers(torch.cat([self.token, as_tokens(patches)], 1) + self.position)
        y = tokens[:, 1:].transpose(1, 2).reshape(patches.shape)
        gate = self.gate(tokens[:, 0]).sigmoid()[:, :, None, None]
        return x * gate + resized(self.back(y), x.shape[-2:], "bilinear", False)
