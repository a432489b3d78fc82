"""The fit, on timings that are made up: what is known is found again."""

import random

import pytest

from gigagrad.errors import ConfigError
from gigagrad.execution.calibration import fit as fitting
from gigagrad.execution.calibration.fit import Compared, Sample, achieved, fit, fit_rates, fit_sharing, held_out_error
from gigagrad.plans.machine import Sharing, TimeModel, typical_rate

TRUE = {"dense.f.flops": 2e-11, "norm.f.hot": 3e-10, "tile.calls": 4e-4}


@pytest.fixture
def samples():
    """Steps of two passes, of twelve networks, that take exactly what the true rates say."""
    pytest.importorskip("sklearn")
    draw, made = random.Random(0), []
    for network in range(12):
        for step in (2 * network, 2 * network + 1):
            for _ in range(2):
                work = {kind: 10 ** draw.uniform(-4, -1) / rate for kind, rate in TRUE.items()}
                made.append(Sample(network, step, work, TimeModel(TRUE, 0.0).seconds(work)))
    return made


def test_true_rates_are_found(samples):
    model = fit(samples)
    assert model.rates == pytest.approx(TRUE, rel=0.05)
    assert model.error < 0.05


def test_noise_does_not_hurt_much(samples):
    draw = random.Random(1)
    noisy = [Sample(s.network, s.step, s.work, s.seconds * draw.uniform(0.8, 1.25)) for s in samples]
    assert fit(noisy).rates == pytest.approx(TRUE, rel=0.3)


def test_rates_are_never_negative(samples):
    """A kind of work that only ever makes passes shorter costs nothing."""
    odd = [Sample(s.network, s.step, s.work | {"odd.calls": 1 / s.seconds}, s.seconds) for s in samples]
    assert min(fit_rates(odd).values()) >= 0


def test_what_hardly_occurs_stays_typical(samples):
    rare = [*samples, Sample(99, 99, samples[0].work | {"rare.calls": 1e-6}, samples[0].seconds)]
    assert fit_rates(rare)["rare.calls"] == pytest.approx(typical_rate("rare.calls"), rel=0.01)


def test_errors_are_of_whole_steps_of_unseen_networks(samples):
    """A predictor that remembers what it has seen gains nothing."""

    def remembering(seen):
        known = {id(sample.work): sample.seconds for sample in seen}
        return lambda work: known.get(id(work), 0.0)

    assert held_out_error(samples, remembering) == 1.0
    # Errors of passes that cancel in a step are none.
    turned = {id(a.work): 2 * a.seconds for a in samples[::2]} | {id(b.work): 0.0 for b in samples[1::2]}
    halves = [Sample(s.network, s.step, s.work, 1.0) for s in samples]
    assert held_out_error(halves, lambda seen: lambda work: 2.0 if turned[id(work)] else 0.0) == 0.0


def test_what_is_achieved_counts_all_the_time_of_a_kind():
    work = {"dense.f.calls": 2.0, "dense.f.flops": 1e9, "dense.f.hot": 1e6, "copy.b.hot": 3e6, "copy.b.cold": 1e6}
    rates = {"dense.f.calls": 0.1, "dense.f.flops": 2e-10, "dense.f.hot": 1e-7, "copy.b.hot": 1e-6, "copy.b.cold": 1e-6}
    found = achieved([Sample(0, 0, work, 1.0)], TimeModel(rates, 0.0))
    assert found == pytest.approx({"dense.f": 1e9 / (0.2 + 0.2 + 0.1), "copy.b": 1e6})


def test_without_scikit_learn_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    with pytest.raises(ConfigError, match=r"pip install 'gigagrad\[calibrate\]'"):
        fitting.fit_rates([Sample(0, 0, {"tile.calls": 1.0}, 1.0)])


@pytest.mark.parametrize(("shared", "side_by_side", "waiting"), [(0.4, 0.7, 0.3), (1.0, 1.0, 0.0), (0.0, 0.1, 2.0)])
def test_how_threads_share_is_found_again(shared, side_by_side, waiting):
    """From steps of many and few tiles whose times follow the formulas of the machine."""
    model = TimeModel({"dense.f.flops": 1e-9, "dense.f.calls": 1e-3}, 0.0)
    sharing = Sharing(shared, side_by_side, waiting)
    draw, steps = random.Random(0), []
    for _ in range(12):
        passes = [({"dense.f.flops": draw.uniform(1e8, 1e9), "dense.f.calls": 20.0}, draw.choice((16, 20, 40)))] * 3
        walls = (sum(sharing.wall_seconds(model.split(w), 4, n, count) for w, count in passes) for n in (1, 4))
        steps.append(Compared(tuple(passes), *walls))
    found = fit_sharing(steps, model, 4)
    assert found.shared_efficiency == pytest.approx(shared, abs=1e-6)
    assert found.side_by_side_efficiency == pytest.approx(side_by_side, abs=1e-6)
    assert found.waiting_tiles == pytest.approx(waiting, abs=1e-6)
