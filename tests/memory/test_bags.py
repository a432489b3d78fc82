"""Bags of any number of patches in one budget: measured <= predicted <= budget, whatever their number."""

from __future__ import annotations

import json
import subprocess
import sys

_STEPS = """
import json, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import gigagrad as gg

count, memory = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 48, 8, 8)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(self.embed(x).flatten(2).transpose(1, 2)).mean(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.scores, self.classifier = Tokens(), nn.Linear(48, 1), nn.Linear(48, 2)

    def forward(self, x):
        features = self.encoder(x.float() / 255)
        return self.classifier(torch.softmax(self.scores(features), 0).T @ features)

model = Model()
patch = np.random.default_rng(0).integers(0, 255, (1, 3, 64, 64), dtype=np.uint8)
bag, label = np.broadcast_to(patch, (count, 3, 64, 64)), torch.tensor([1])
engine = gg.compile(model, F.cross_entropy, memory=memory, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
engine.in_tiles = True
for _ in range(2):
    engine.backward(bag, label)
run = engine.last_run
print(json.dumps({"measured": run.peak_bytes, "predicted": run.predicted_peak_bytes, "budget": run.budget_bytes,
                  "tiles": engine.plan(bag, label).tile_count}))
"""


def test_the_budget_holds_whatever_the_number_of_patches() -> None:
    predicted = []
    for count in (400, 1200):
        command = [sys.executable, "-W", "ignore", "-c", _STEPS, str(count), "560 MiB"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["measured"] <= result["predicted"] <= result["budget"]
        predicted.append(result["predicted"])
        assert result["tiles"] > 4
    assert predicted[1] <= 1.1 * predicted[0]
