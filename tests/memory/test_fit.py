"""Every step of a training run stays below what was predicted for it and below the budget.

`fit` does more in its process than a step: it makes labels, turns slides, validates. All of that lies under a step's
peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_RUN = """
import sys
from pathlib import Path
from gigagrad.images import make_cohort
from gigagrad.training import fit

folder = Path(sys.argv[1])
make_cohort(folder / "cohort", 3, height=2000, width=3000)
rows = [line.split(",") for line in (folder / "cohort" / "cohort.csv").read_text().splitlines()]
(folder / "cohort" / "recipe.csv").write_text("\\n".join(",".join((slide, split)) for slide, _, split in rows) + "\\n")
fit({"slides": str(folder / "cohort" / "recipe.csv"), "out": str(folder / "run"), "memory": "900 MiB", "epochs": 1})
"""


def test_training_stays_below_prediction_and_budget(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["event"] == "step"]
    assert {step["phase"] for step in steps} == {"backward", "forward"}
    for step in steps:
        assert step["predicted_peak_bytes"] <= step["budget_bytes"], step
        # The peak is the process's own: a forward may find it where the backward before it has set it.
        assert step["peak_bytes"] <= max(step["predicted_peak_bytes"], step["earlier_peak_bytes"]), step
