"""The code of docs/operators.md: a custom operator runs whole without a rule and tile by tile with one, exactly."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.graphs import op_rules
from tests.exactness.comparison import compare
from tests.pages import DOCS, blocks

*PAGE, PROOF = [block.text for block in blocks((DOCS / "operators.md").read_text(encoding="utf-8")) if block.is_run]
NAMES: dict[str, Any] = {"torch": torch, "F": F}
for number, code in enumerate(PAGE):
    exec(compile(code, f"docs/operators.md, block {number + 1}", "exec"), NAMES)
blur_rows = NAMES["blur_rows"]
RULE = op_rules._RULES.pop("mylib.blur_rows.default")  # as the page registers it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.b(blur_rows(self.a(x), 3))


@pytest.fixture(params=["without a rule", "with a rule"])
def has_rule(request, monkeypatch):
    if request.param == "with a rule":
        monkeypatch.setitem(op_rules._RULES, "mylib.blur_rows.default", RULE)
    return request.param == "with a rule"


def test_ones_own_operator(has_rule):
    torch.manual_seed(0)
    image, target = torch.randn(2, 23, 37, dtype=torch.float64), torch.rand(1, 23, 37, dtype=torch.float64)
    model = Net().double()
    plan = gg.compile(model, F.mse_loss, tile=(7, 5)).plan(image, target)
    whole = [entry.operator for entry in plan.whole_field]
    assert whole == ([] if has_rule else ["mylib.blur_rows.default"])
    exec(PROOF, {"compare": compare, "model": model, "loss": F.mse_loss, "image": image, "target": target})
