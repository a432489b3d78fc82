"""What is said of a plan: all of it, in people's units, with the columns that matter least at the end."""

import dataclasses

import pytest

from gigagrad.plans import Amount, KeptField, Plan, Segment, SegmentPlan, Tiles, WholeField, estimate
from gigagrad.plans.description import Table, describe
from gigagrad.plans.program import Allocate, Buffer

MIB = 2**20
SEGMENT = SegmentPlan(
    computes=Segment(0, (50,), (40, 41), None, tuple(range(20, 43)), (0,), (1, 2)),
    tile=(640, 512),
    tiles=(25, 125),
    crop=(760, 632),
    computed_ratio=1.1234567,
    tile_peak_bytes=118 * MIB,
    memory=(Amount(estimate.TILES, 118 * MIB), Amount(estimate.FRAGMENTATION, 75 * MIB)),
    beside_bytes=3 * MIB,
    forward_seconds=2.0,
    backward_seconds=6.0,
)
PLAN = Plan(
    image_shape=(3, 16000, 64000),
    device="cpu",
    memory_format="channels_last",
    workers=1,
    threads=2,
    segments=(SEGMENT,),
    steps=(Tiles(0, "one pass"),),
    kept=(),
    whole_field=(),
    budget_bytes=None,
    fixed=(Amount(estimate.PROCESS, 400 * MIB), Amount(estimate.READERS, 96 * MIB), Amount(estimate.GRADIENTS, MIB)),
    timed_seconds=(32.4,),
)


def changed(**changes):
    return describe(dataclasses.replace(PLAN, **changes))


def _buffer(tier, size):
    return Buffer(size, False, tier, size, (), (), False)


def cells(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_all_that_is_known_of_a_plan_is_said():
    description = describe(PLAN)
    assert description.title == "Training step as planned"
    assert dict(description.facts) == {
        "image": "16000 x 64000 px (1.02 Gpx), channels: 3",
        "runs": "on cpu, channels last, one tile at a time",
        "passes over segments": "one pass 0",
        "predicted peak": "690 MiB (no budget set)",
        "predicted time": "about 32.4 s a step (from tiles that were timed)",
    }
    segments, kept, memory = description.tables
    assert cells(segments) == [
        {
            "segment": "0",
            "passes": "one pass",
            "tiles": "25 x 125",
            "tile px": "640 x 512",
            "crop px": "760 x 632",
            "read": "1.12x",
            "per tile": "118 MiB",
            "time": "32.4 s",
            "share": "100 %",
            "operators": "23",
            "sums": "1",
            "keeps": "2",
            "beside": "3 MiB",
            "forward": "2.0 s",
            "backward": "6.0 s",
        }
    ]
    assert (
        segments.note
        == "Most of the time: segment 0 one pass 100 %; on average tiles read 1.12 times the pixels they are for."
    )
    assert kept == Table("Fields kept between segments: none (each segment computes from the image)")
    assert memory.rows[0] == ("process before the run", "400 MiB")
    assert len(memory.rows) == len(memory.bars) == len(PLAN.memory_parts())
    assert memory.bars[0] == 1.0


def test_other_tiers_whole_fields_and_predictions():
    description = changed(
        steps=(Allocate((_buffer("host", 2**30), _buffer("disk", 2**31))), Tiles(0, "forward")),
        budget_bytes=2**30,
        workers=2,
        whole_field=(WholeField("aten.fft_fft2.default", "mixer", 5 * MIB), WholeField("aten.mul.Tensor", "", 9 * MIB)),
        timed_seconds=None,
        whole_seconds=0.5,
    )
    facts = dict(description.facts)
    assert description.title == "Prediction as planned"
    assert facts["runs"].endswith("2 tiles at a time")
    assert facts["predicted peak"] == "690 MiB (budget 1 GiB)"
    assert facts["kept in host memory"] == "1 GiB at most"
    assert facts["kept in scratch files"] == "2 GiB at most"
    assert facts["predicted time"] == "about 2.5 s a step (by the cost model), 500 ms of it for whole fields"
    whole = description.tables[2]
    assert whole.title == "Operators that run on whole fields: 2"
    assert whole.rows == (("9 MiB", "aten.mul.Tensor", "the loss"), ("5 MiB", "aten.fft_fft2.default", "mixer"))


def test_passes_are_told_as_runs():
    order = [(i, "forward") for i in range(3)] + [(2, "one pass"), (1, "backward"), (0, "backward")]
    segments = tuple(
        dataclasses.replace(SEGMENT, computes=dataclasses.replace(SEGMENT.computes, index=i)) for i in range(3)
    )
    description = changed(
        segments=segments, steps=tuple(Tiles(*one) for one in order), timed_seconds=(1.0,) * len(order)
    )
    assert dict(description.facts)["passes over segments"] == "forward 0 to 2, one pass 2, backward 1 to 0"
    assert [row["passes"] for row in cells(description.tables[0])] == ["both", "both", "both"]


def test_of_many_kept_fields_the_largest_are_shown():
    kept = tuple(KeptField(i, "disk", f"op{i}", "", (1, 3, 5, 7), i * MIB, "float16") for i in range(40))
    table = changed(kept=kept).tables[1]
    assert table.title == "Fields kept between segments: 40, 780 MiB in all"
    assert [row["operator"] for row in cells(table)] == [f"op{i}" for i in range(39, 27, -1)]
    assert table.rows[0] == ("39 MiB", "disk", "float16", "op39", "1 x 3 x 5 x 7", "the loss", "39")
    assert table.note == "and 28 smaller ones"


def test_a_plan_without_segments_or_time():
    description = changed(segments=(), steps=(), timed_seconds=None)
    assert dict(description.facts)["passes over segments"] == "none"
    assert description.tables[0].rows == ()
    assert str(description).startswith("Prediction as planned\n\nimage ")


@pytest.mark.parametrize(("width", "columns"), [(100, 3), (13, 3), (12, 2), (7, 2), (6, 1), (0, 1)])
def test_the_last_columns_go_where_there_is_no_room(width, columns):
    table = Table("", ("n", "abc", "size"), (("1", "2 x", "10 B"), ("22", "-", "9")))
    assert table.fitting(width).columns == table.columns[:columns]
    assert {len(row) for row in table.fitting(width).rows} == {columns}


def test_words_make_room_before_a_column_goes():
    table = Table("", ("module", "n"), (("a" * 90, "1"),))
    assert table.numeric == (False, True)
    assert table.fitting(20).columns == ("module", "n")


def test_numbers_stand_on_the_right():
    text = str(changed())
    memory = text.partition("Memory at the peak\n")[2].splitlines()
    assert memory[0].split() == ["part", "bytes"]
    assert len(set(map(len, memory))) == 1
