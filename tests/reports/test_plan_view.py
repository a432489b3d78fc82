"""A plan's numbers in people's units, whatever fields it has."""

import io
import json

from rich.console import Console

from gigagrad.plans.plan import Pass, Plan, StagePlan
from gigagrad.reports.plan_view import plan_renderable, plan_view

STAGE = StagePlan(
    index=0,
    operators=23,
    reductions=1,
    keeps=0,
    tile=(640, 512),
    tiles=(25, 125),
    crop=(760, 632),
    computed_ratio=1.1234567,
    tile_peak_bytes=118 << 20,
)
PLAN = Plan(
    image_shape=(3, 16000, 64000),
    device="cpu",
    memory_format="channels_last",
    workers=1,
    stages=(STAGE,),
    passes=(Pass(0, "one pass"),),
    kept=(),
    whole_field=(),
    budget_bytes=None,
    base_bytes=400 << 20,
    parameter_bytes=1 << 20,
    kept_bytes=0,
    whole_field_bytes=0,
    reader_bytes=96 << 20,
    runtime_bytes=60 << 20,
    predicted_peak_bytes=690 << 20,
    host_bytes=0,
    scratch_bytes=0,
    timed_seconds=32.4,
)


def test_units_come_from_the_names():
    view = plan_view(json.loads(json.dumps(PLAN.to_dict())))
    facts = dict(view.facts)
    assert facts["Image shape"] == "3 x 16000 x 64000"
    assert facts["Budget"] == "-"
    assert facts["Predicted peak"] == "690 MiB"
    assert facts["Predicted time"] == "32.4 s"
    assert facts["Passes"] == "one pass 0"
    (stages,) = view.tables
    row = dict(zip(stages.columns, stages.rows[0], strict=True))
    assert row["Tile"] == "640 x 512"
    assert row["Computed ratio"] == "1.123"
    assert row["Tile peak"] == "118 MiB"
    assert dict(zip(stages.columns, stages.numeric, strict=True))["Operators"]


def test_rows_may_differ_and_values_may_be_anything():
    plan = {
        "kept": [{"name": "f1", "halo_px": 12}, {"name": "f2", "lossy": True}],
        "tiers": {"host": {"peak_bytes": 5}},
        "ratio": float("nan"),
        "notes": [],
        "pixels": 1_024_000_000,
    }
    view = plan_view(plan)
    assert view.tables[0].columns == ("Name", "Halo", "Lossy")
    assert view.tables[0].rows == (("f1", "12 px", "-"), ("f2", "-", "yes"))
    assert dict(view.facts) == {"Tiers: Host: Peak": "5 B", "Ratio": "nan", "Notes": "-", "Pixels": "1.02 Gpx"}
    assert plan_view({}).facts == ()


def test_in_the_terminal():
    console = Console(file=io.StringIO(), width=140)
    console.print(plan_renderable({**PLAN.to_dict(), "device": "cpu [bold]"}))
    shown = console.file.getvalue()
    for text in ("cpu [bold]", "640 x 512", "25 x 125", "690 MiB", "one pass"):
        assert text in shown


def test_passes_are_told_as_runs():
    passes = [{"stage": i, "phase": "forward"} for i in range(3)] + [{"stage": 2, "phase": "one pass"}]
    passes += [{"stage": i, "phase": "backward"} for i in (1, 0)]
    assert dict(plan_view({"passes": passes}).facts)["Passes"] == "forward 0 to 2, one pass 2, backward 1 to 0"


def test_of_many_kept_fields_the_largest_are_shown():
    kept = [{"operator": f"op{i}", "size_bytes": i * 2**20} for i in range(40)]
    (table,) = plan_view({"kept": kept}).tables
    assert table.title == "Kept: the largest 12 of 40"
    assert [row[0] for row in table.rows] == [f"op{i}" for i in range(39, 27, -1)]
    assert table.rows[0][1] == "39 MiB"
