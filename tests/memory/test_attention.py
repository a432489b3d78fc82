"""Attention over very many tokens: no matrix of all pairs is ever in memory."""

from __future__ import annotations

import json
import subprocess
import sys

_RUN = """
import json
import torch
import torch.nn.functional as F
from torch import nn
import gigagrad as gg

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.qkv, self.head = nn.Conv2d(3, 16, 2, 2), nn.Linear(16, 48), nn.Conv2d(16, 1, 1)

    def forward(self, x):
        x = self.stem(x)
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.head(x + y.transpose(2, 3).reshape(x.shape))

torch.manual_seed(0)
model, image, target = Attention(), torch.rand(3, 256, 256), torch.rand(1, 128, 128)
engine = gg.compile(model, F.mse_loss, tile=(64, 64))
small = image[:, :64, :64], target[:, :32, :32]
engine.backward(*small)
before = engine.last_run.peak_bytes
planned = engine.plan(image, target).predicted_peak_bytes - engine.plan(*small).predicted_peak_bytes
engine.backward(image, target)
print(json.dumps({"above": engine.last_run.peak_bytes - before, "planned": planned}))
"""

_PAIRS_BYTES = 2 * 4 * (128 * 128) ** 2  # two heads, float32


def test_attention_needs_memory_in_proportion_to_its_tokens() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["above"] < _PAIRS_BYTES / 20
    assert result["planned"] < _PAIRS_BYTES / 20
