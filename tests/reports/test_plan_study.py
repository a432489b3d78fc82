"""A plan for people: readable at 100 columns, in plain ASCII where it must be, and as a picture."""

import dataclasses
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from gigagrad.errors import ConfigError, WriteError
from gigagrad.events import Preparing
from gigagrad.plans import (
    Advice,
    Amount,
    KeptField,
    Placement,
    Plan,
    Point,
    Segment,
    SegmentPlan,
    Tiles,
    estimate,
    make_plan,
)
from gigagrad.reports import charts
from gigagrad.reports.charts import check_picture, draw_plan
from gigagrad.reports.plan_study import PlanStudy, advice_in_words, describe_study, make_study, plan_page
from gigagrad.units import format_seconds
from tests.plans.networks import MIB, graph_of, problem_of, residual

GIB = 2**30


def study_of(segments=3, fields=4, **changes):
    described = tuple(
        SegmentPlan(
            computes=Segment(i, (100 + i,), (50 + i,), None, tuple(range(20 + i)), (), ()),
            tile=(256, 512),
            tiles=(1000, 2000),
            crop=(1160, 1416),
            computed_ratio=12.5,
            tile_peak_bytes=(i + 1) << 26,
            forward_seconds=i + 1,
            backward_seconds=2 * segments - i,
        )
        for i in range(segments)
    )
    passes = tuple(Tiles(i, "forward") for i in range(segments)) + tuple(
        Tiles(i, "backward") for i in reversed(range(segments))
    )
    names = [f"encoder.very_long_name_of_a_layer.{i}.conv[0]" for i in range(fields)]
    shape = (1, 64, 16000, 64000)
    kept = tuple(KeptField(i, "memory", "aten.conv2d.default", name, shape, GIB) for i, name in enumerate(names[::2]))
    plan = Plan(
        image_shape=(3, 16000, 64000),
        device="cpu",
        memory_format="channels_last",
        workers=2,
        threads=1,
        segments=described,
        steps=passes,
        kept=kept,
        whole_field=(),
        budget_bytes=8 * GIB,
        fixed=(
            Amount(estimate.PROCESS, 400 << 20),
            Amount(estimate.GRADIENTS, 300 << 20),
            Amount(estimate.FIELDS, 5 * GIB),
            Amount(estimate.READERS, 96 << 20),
            Amount(estimate.STEP, 160 << 20),
            Amount(estimate.TILES, 7 * GIB - 5 * GIB - (956 << 20)),
        ),
        timed_seconds=tuple(
            10
            * (described[p.segment].forward_seconds if p.phase == "forward" else described[p.segment].backward_seconds)
            for p in passes
        ),
    )
    found = tuple(
        Placement(
            i,
            "aten.conv2d.default",
            name,
            shape,
            GIB,
            None if i % 2 else "memory",
            "exact",
            (i,),
            tuple(range(i + 1, i + 6)),
            2 + i,
        )
        for i, name in enumerate(names)
    )
    moments = tuple(
        (
            Amount(estimate.PROCESS, 560 << 20),
            Amount(estimate.READERS, 96 << 20),
            Amount(estimate.GRADIENTS, 300 << 20),
            Amount(estimate.FIELDS, min(i, 6 - i) * GIB // 2),
            Amount(estimate.COTANGENTS, GIB // 3),
            Amount(estimate.TILES, GIB),
        )
        for i in range(len(passes))
    )
    points = tuple(Point(2**i * GIB, 2**i * GIB, 10000.0 / 3**i, i, i * GIB) for i in range(1, 7))
    made = PlanStudy("smp:Unet", plan, "by typical rates", found, moments, points)
    return dataclasses.replace(made, **changes)


def shown(study, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    console.print(plan_page(study))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_is_said_within_100_columns():
    text = shown(study_of())
    assert max(map(len, text.splitlines())) <= 100
    for said in (
        "Training step of smp:Unet",
        "16000 x 64000 px (1.02 Gpx)",
        "7 GiB (budget 8 GiB)",
        "2 GiB would work",
        "about 3 min 30 s a step (from tiles that were timed)",
        "forward 0 to 2, backward 2 to 0",
        "Most of the time: segment 0 backward 29 %, segment 1 backward 24 %, segment 2 backward 19 %",
        "tiles read 12.5 times the pixels they are for",
        "conv2d 64x16000x64000",
        "made in 3 passes",
        "All together: 2 kept (2 GiB), 2 made more than once, 0 made once and forgotten.",
        "tiles being computed",
        "<- this plan",
        "55 min 33 s",
    ):
        assert said in text, said


ADVICE = (Advice("memory", 12 * GIB, 100.0), Advice("memory", 33 * GIB, 60.0), Advice("disk", 28 * GIB, 120.0))


def test_what_would_help_is_said_in_a_line_each():
    text = shown(study_of(advice=ADVICE))
    assert "what would help       12 GiB of memory: 1 min 40 s a step instead of 3 min 30 s" in text
    assert "33 GiB of memory: 1 min 00 s" in text
    assert "28 GiB of scratch: 2 min 00 s" in text
    assert advice_in_words(study_of(advice=(Advice("host", GIB, 1.0),)))[0].startswith("1 GiB of host memory: 1.0 s")


def test_nothing_would_help_where_nothing_does():
    study = study_of()
    assert advice_in_words(study) == ("neither memory nor scratch: twice as much would save less than 5 % of the time",)
    free = dataclasses.replace(study, plan=dataclasses.replace(study.plan, budget_bytes=None))
    assert advice_in_words(free) == ("nothing: no budget holds this plan back",)


def test_the_rates_behind_a_predicted_time_are_named():
    study = study_of(rates="by the rates in epyc.json")
    study = dataclasses.replace(study, plan=dataclasses.replace(study.plan, timed_seconds=None))
    assert "(by the rates in epyc.json)" in shown(study)


def test_a_study_is_in_the_seconds_of_timed_tiles_and_tells_how_far_it_is():
    problem = problem_of(graph_of(residual(2), size=2048), 400 * MIB)
    plan = make_plan(problem)
    timed = dataclasses.replace(plan, timed_seconds=tuple(10 * s * plan.modelled_seconds for s in plan.pass_shares))
    heard: list[Preparing] = []
    study = make_study("net", problem, timed, listeners=(heard.append,))  # type: ignore[arg-type]
    plain = make_study("net", problem, plan, rates="by guesses")
    assert plain.advice
    assert [each.seconds for each in study.advice] == pytest.approx([10 * each.seconds for each in plain.advice])
    assert [p.seconds for p in study.points] == pytest.approx([10 * p.seconds for p in plain.points])
    assert study.advice[0].seconds < study.plan.predicted_seconds
    assert format_seconds(study.plan.predicted_seconds) in advice_in_words(study)[0]
    assert study.rates.startswith("by typical rates; 'gigagrad calibrate'")
    assert plain.rates == "by guesses"
    assert [event.tried for event in heard[:-1]] == list(range(len(heard) - 1))
    assert heard[-1].over


def test_names_that_are_too_long_take_another_line():
    study = study_of()
    (fields,) = [table for table in describe_study(study).tables if table.title == "Fields"]
    assert fields.rows[0][2:] == (study.placements[0].module, "kept in memory from segment 0 for 1, 2 ...")
    lines = shown(study).partition("\nFields")[2].splitlines()[2:4]
    parts = [line[len("1 GiB  conv2d 64x16000x64000  ") :].split("  ")[0].strip() for line in lines]
    assert "".join(parts) == study.placements[0].module


def test_of_much_the_largest_is_shown():
    text = shown(study_of(segments=40, fields=60))
    assert "Segments: the 10 of 40 that take longest" in text
    assert "Fields: the largest of 60, kept and not kept" in text
    assert text.count("kept in memory from segment") == text.count("made in") == 6
    assert max(map(len, text.splitlines())) <= 100


def test_bars_are_as_long_as_what_they_stand_for():
    curve = shown(study_of()).split("Memory against time")[1]
    rows = [line for line in curve.splitlines() if " GiB" in line and "this plan" not in line]
    lengths = [row.count("\u2588") for row in rows]
    assert lengths == [30, 10, 3, 1, 0, 0]


def test_markup_in_a_name_is_text():
    assert "smp:[bold]Unet" in shown(study_of(model="smp:[bold]Unet"))


@pytest.mark.parametrize("width", [40, 100, 200])
def test_columns_that_do_not_fit_are_left_out_and_none_is_cut(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_page(study_of()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "1000 x 2000" in text
    assert ("operators" in text) == (width >= 100)
    assert ("backward\n" in text) == (width == 200)


def test_a_terminal_without_unicode_gets_ascii():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=100)
    console.print(plan_page(study_of()))
    console.file.flush()
    assert b"####" in raw.getvalue()


def test_a_plan_without_segments_or_time():
    empty = study_of(segments=0, fields=0)
    empty = dataclasses.replace(
        empty, points=empty.points[:1], plan=dataclasses.replace(empty.plan, timed_seconds=None)
    )
    assert "Fields" in shown(empty)
    assert "Most of the time" not in shown(empty)


@pytest.mark.parametrize("segments", [0, 1, 40])
def test_the_picture(tmp_path, segments):
    study = study_of(segments=segments)
    draw_plan(study, tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[0] > 400
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    draw_plan(study, tmp_path / "plan.svg")
    first = (tmp_path / "plan.svg").read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    draw_plan(study, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_bytes() == first


def test_no_line_crosses_the_legend_wherever_the_budget_is(tmp_path, monkeypatch):
    drawn, draw = [], charts.draw_curve

    def draw_curve(ax, study):
        drawn.append(ax)
        draw(ax, study)

    monkeypatch.setattr(charts, "draw_curve", draw_curve)
    draw_plan(study_of(), tmp_path / "plan.png")
    (ax,) = drawn
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["this plan", "budget 8 GiB"]
    assert ax.get_legend().get_window_extent().y1 < ax.get_window_extent().y0


def test_the_picture_says_what_would_help_within_its_width(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    written, save = [], Figure.savefig

    def savefig(figure, *args, **more):
        save(figure, *args, **more)
        label = figure._supxlabel
        dots = more["dpi"]
        written.append(label and (label.get_text(), label.get_window_extent(dpi=dots).width / dots))
        assert figure.get_figwidth() == 11

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw_plan(study_of(advice=ADVICE), tmp_path / "plan.png")
    draw_plan(study_of(), tmp_path / "plan.png")
    (told, width), silent = written
    assert "28 GiB of scratch: 2 min 00 s" in told
    assert 7 < width < 10
    assert silent is None


def test_a_picture_of_another_kind_is_refused(tmp_path):
    for name in ("plan.jpg", "plan", "."):
        with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
            check_picture(tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(WriteError):
        draw_plan(study_of(), tmp_path / "file" / "plan.svg")
