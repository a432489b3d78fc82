"""The cheapest mix of machines is that of trying all; the command plans, tabulates, and refuses in one line."""

import itertools
import json
import sys
from math import inf, isfinite

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.cli import main
from gigagrad.mix import START_SECONDS, buckets, cheapest_mix, least_deadline

scipy = pytest.importorskip("scipy", reason="the mix extra brings it")


def tried(slides, seconds, prices, most, deadline):
    """Return the least cost of all ways to give each slide to one machine; None where no way is in time."""
    machines = [kind for kind, count in enumerate(most) for _ in range(count)]
    each = [row for row, count in zip(seconds, slides, strict=True) for _ in range(count)]
    costs = []
    for choice in itertools.product(range(len(machines)), repeat=len(each)):
        loads = [0.0] * len(machines)
        for row, j in zip(each, choice, strict=True):
            loads[j] += row[machines[j]]
        paid = [START_SECONDS + load if load else 0.0 for load in loads]
        if all(seconds <= deadline for seconds in paid):
            costs.append(sum(prices[kind] * seconds / 3600 for kind, seconds in zip(machines, paid, strict=True)))
    return min(costs, default=None)


@st.composite
def cases(draw):
    """Draw up to 5 slides of up to 3 sizes, up to 4 machines of up to 3 kinds; no load meets the deadline exactly."""
    kinds = draw(st.integers(1, 3))
    most = draw(st.lists(st.integers(0, 2), min_size=kinds, max_size=kinds).filter(lambda most: sum(most) <= 4))
    slides = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda slides: sum(slides) <= 5))
    second = st.one_of(st.just(inf), st.integers(1, 100).map(lambda n: 10.0 * n))
    seconds = [draw(st.lists(second, min_size=kinds, max_size=kinds)) for _ in slides]
    prices = draw(st.lists(st.integers(1, 50).map(float), min_size=kinds, max_size=kinds))
    return slides, seconds, prices, most, START_SECONDS + 10.0 * draw(st.integers(5, 150)) + 5


@given(cases())
def test_the_mix_costs_what_the_best_of_all_ways_costs(case):
    slides, seconds, _, most, deadline = case
    mix, best = cheapest_mix(*case), tried(*case)
    if best is None:
        assert mix is None
        return
    assert mix is not None
    assert mix.cost == pytest.approx(best)
    assert not mix.gap
    assert [sum(m.slides[b] for m in mix.machines) for b in range(len(slides))] == slides
    for kind, count in enumerate(most):
        assert sum(m.kind == kind for m in mix.machines) <= count
    for m in mix.machines:
        assert m.seconds <= deadline
        assert m.seconds == pytest.approx(
            START_SECONDS + sum(n * seconds[b][m.kind] for b, n in enumerate(m.slides) if n)
        )
    assert least_deadline(slides, seconds, most) <= deadline


def test_sizes_that_are_cheapest_on_other_kinds_make_a_mix_cheaper_than_each_kind():
    """The headline at small size: a large card for large slides, a small one for small slides."""
    slides, seconds, prices, most = [4, 40], [[9000.0, 600.0], [120.0, 60.0]], [1.0, 8.0], [8, 8]
    mix = cheapest_mix(slides, seconds, prices, most, 24 * 3600)
    assert mix is not None
    for kind in (0, 1):
        alone = cheapest_mix(slides, [[row[kind]] for row in seconds], prices[kind : kind + 1], [8], 24 * 3600)
        assert alone is not None
        assert mix.cost < 0.75 * alone.cost
    assert [(m.kind, m.slides) for m in mix.machines] == [(0, (0, 40)), (1, (4, 0))]


def test_a_machine_for_each_slide_of_more_than_half_the_deadline():
    mix = cheapest_mix([3], [[600.0]], [1.0], [9], 1000.0 + START_SECONDS)
    assert mix is not None
    assert [m.slides for m in mix.machines] == [(1,)] * 3


def test_slides_that_take_no_time_beside_the_deadline_are_counted():
    mix = cheapest_mix([1], [[0.05, 0.001]], [1.0, 50.0], [1, 1], 1e6)
    assert mix is not None
    assert [m.kind for m in mix.machines] == [0]


def test_slides_of_about_one_size_are_a_bucket():
    assert buckets([100, 400, 110, 390, 81, 50]) == [[1, 3], [2, 0], [4], [5]]
    assert buckets([]) == []


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a cohort of three empty slides of two sizes, and two kinds of machines."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", (640, 800)), ("b", (640, 800)), ("c", (3200, 4000))):
        zarr.create_array(f"{name}.zarr", shape=(3, *size), chunks=(3, 256, 256), dtype="uint8")
    (tmp_path / "cohort.csv").write_text("slide,split\na.zarr,train\nb.zarr,train\nc.zarr,test\n")
    (tmp_path / "machines.yaml").write_text(
        "- {name: small, price: 1, memory: 2GiB, cores: 2}\n"
        "- {name: large, price: 50, memory: 8GiB, device: cuda, card: H100, most: 2}\n"
    )
    return tmp_path


COMMAND = ["plan", "--model", "paper-unet", "--cohort", "cohort.csv", "--machines", "machines.yaml", "--deadline"]


@pytest.mark.usefixtures("place")
def test_plan_of_a_cohort(capsys):
    assert main([*COMMAND, "24h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(size["largest"], size["slides"]) for size in found["sizes"]] == [([3200, 4000], 1), ([640, 800], 2)]
    assert all(isfinite(seconds) and seconds > 0 for size in found["sizes"] for seconds in size["seconds"].values())
    best = min(cost for cost in found["single"].values() if cost is not None)
    assert found["cost"] <= best * (1 + 1e-9)
    assert found["saving"] == pytest.approx(1 - found["cost"] / best)
    assert sum(sum(machine["slides"]) for machine in found["machines"]) == 3

    assert main([*COMMAND, "24h", "--split", "train", "--predict"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Cheapest machines for a prediction of paper-unet on each slide, in 24 h 00 min" in text
    assert "640x800 2 " in text
    assert "3200x4000" not in text
    assert "waited" not in text


def test_a_slide_of_several_stains_is_planned_with_all_of_them(place, capsys):
    """The first image alone was, which a network of both stains refuses."""
    (place / "stains.csv").write_text("slide,slide:ihc\na.zarr,b.zarr\n")
    both = {"cohort.csv": "stains.csv", "paper-unet": "multi-stain"}
    assert main([both.get(word, word) for word in [*COMMAND, "24h", "--json", "--predict"]]) == 0
    assert [size["slides"] for size in json.loads(capsys.readouterr().out)["sizes"]] == [1]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("what", [["--size", "640x800"], [*COMMAND[3:], "24h"]])
def test_a_model_of_patches_is_not_planned_on_slides(what, capsys):
    """A slide was planned as if it were one patch."""
    assert main(["plan", "--model", "mil:encoder=timm:resnet18", *what]) == 2
    assert "takes patches, not slides; plan one bag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machines", "more", "said"),
    [
        ("- {name: a, price: 1}", ["1h"], "machines.yaml, machine 1: memory is missing; give its name, price, memory"),
        ("- {name: a, price: 1, memory: 1GiB}", ["1h"], "give its rates or its cores"),
        ("- {name: a, price: 1, memory: 1GiB, device: cuda}", ["1h"], "give its rates or its card"),
        ("- {name: a, price: 1, memory: 1GiB, core: 2}", ["1h"], "did you mean 'cores'"),
        ("- {name: a, price: 1, memory: 1GiB, cores: 2, rates: no.json}", ["1h"], "no.json cannot be read"),
        ("- {name: a, price: 1, memory: 1GiB, device: cuda, card: H1000}", ["1h"], "no data sheet is listed"),
        ("- {name: a, price: -1, memory: 1GiB, cores: 2}", ["1h"], "price must be at least 0"),
        ("- {name: a, price: 1, memory: 20MiB, cores: 2}", ["1h"], "fits on no machine; a: "),
        ("- &a {name: a, price: 1, memory: 1GiB, cores: 2}\n- *a", ["1h"], "several machines 'a'"),
        ("{}", ["1h"], "is no list of machines"),
        ("[", ["1h"], "cannot read the machines"),
        ("- {name: a, price: 1, memory: 8GiB, cores: 1}", ["60100ms"], "raise the --deadline"),
        ("- {name: a, price: 1, memory: 8GiB, cores: 1}", ["soon"], "--deadline: cannot read 'soon'"),
        ("- {name: a, price: 1, memory: 8GiB, cores: 1}", ["1h", "--size", "5x5"], "--size is of one image"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(machines, more, said, place, capsys):
    (place / "machines.yaml").write_text(machines)
    assert main([*COMMAND, *more]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert said in told


@pytest.mark.usefixtures("place")
def test_flags_that_belong_together(monkeypatch, capsys):
    assert main(["plan", "--model", "paper-unet"]) == 2
    assert "give --size HEIGHTxWIDTH, or --cohort" in capsys.readouterr().err
    assert main(["plan", "--model", "paper-unet", "--cohort", "cohort.csv"]) == 2
    assert "give all three" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert main([*COMMAND, "1h"]) == 2
    assert "pip install 'gigagrad[mix]'" in capsys.readouterr().err
