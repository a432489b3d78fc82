"""Measures of scores of slides against plain formulas, and what they are where the slides say nothing."""

import json
import math

import numpy as np
import pytest

from gigagrad.prediction.slide_scores import SlideScore, c_index, evaluate_classes, evaluate_numbers, evaluate_survival


def slides_of(p_NC, truth_N, names):
    return [
        SlideScore(f"s{i}", {}, tuple(p), names[int(np.argmax(p))], names[int(t)], float(t))
        for i, (p, t) in enumerate(zip(p_NC.tolist(), truth_N, strict=True))
    ]


def drawn(classes, count=60):
    random = np.random.default_rng(classes)
    truth_N = random.integers(classes, size=count)
    logits_NC = random.normal(size=(count, classes))
    logits_NC[np.arange(count), truth_N] += 1
    return np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True), truth_N


def auc(p_N, true_N):
    """The share of pairs in which the true slide has the higher score (Mann and Whitney, 1947)."""
    differences = p_N[true_N][:, None] - p_N[~true_N][None]
    return np.mean((differences > 0) + 0.5 * (differences == 0))


def calibration_error(p_N, right_N):
    at = np.minimum((p_N * 15).astype(int), 14)
    return sum(abs(p_N[at == b].sum() - right_N[at == b].sum()) for b in range(15)) / len(p_N)


def test_two_classes():
    p_NC, truth_N = drawn(2)
    found = evaluate_classes(slides_of(p_NC, truth_N, ("no", "yes")), ("no", "yes"))
    p_N, predicted_N = p_NC[:, 1], p_NC.argmax(1)
    recalls = [np.mean(predicted_N[truth_N == c] == c) for c in (0, 1)]
    assert list(found.measures) == ["accuracy", "balanced_accuracy", "auc", "brier", "calibration_error"]
    assert found.measures["accuracy"].value == pytest.approx(np.mean(predicted_N == truth_N))
    assert found.measures["balanced_accuracy"].value == pytest.approx(np.mean(recalls))
    assert found.measures["auc"].value == pytest.approx(auc(p_N, truth_N == 1), abs=1e-6)
    assert found.measures["brier"].value == pytest.approx(np.mean((p_N - truth_N) ** 2))
    assert found.measures["calibration_error"].value == pytest.approx(calibration_error(p_N, truth_N), abs=1e-6)
    counts = [[int(np.sum((truth_N == t) & (predicted_N == p))) for p in (0, 1)] for t in (0, 1)]
    assert found.confusion == tuple(map(tuple, counts))


def test_three_classes_each_against_the_rest():
    p_NC, truth_N = drawn(3)
    found = evaluate_classes(slides_of(p_NC, truth_N, "abc"), "abc")
    each = [auc(p_NC[:, c], truth_N == c) for c in range(3)]
    assert [found.measures[f"auc_{name}"].value for name in "abc"] == pytest.approx(each, abs=1e-6)
    assert found.measures["auc"].value == pytest.approx(np.mean(each), abs=1e-6)
    onehot_NC = np.eye(3)[truth_N]
    assert found.measures["brier"].value == pytest.approx(np.mean(((p_NC - onehot_NC) ** 2).sum(1)))
    error = calibration_error(p_NC.max(1), p_NC.argmax(1) == truth_N)
    assert found.measures["calibration_error"].value == pytest.approx(error, abs=1e-6)
    assert sum(map(sum, found.confusion)) == 60


def test_intervals_are_the_same_every_time_and_as_wide_as_a_binomial_s():
    p_NC, truth_N = drawn(2, 400)
    one, other = (evaluate_classes(slides_of(p_NC, truth_N, "ab"), "ab") for _ in range(2))
    assert one == other
    accuracy = one.measures["accuracy"]
    wide = 1.96 * math.sqrt(accuracy.value * (1 - accuracy.value) / 400)
    assert accuracy.value - accuracy.low == pytest.approx(wide, rel=0.2)
    assert accuracy.high - accuracy.value == pytest.approx(wide, rel=0.2)


def test_numbers():
    random = np.random.default_rng(0)
    truth_N = random.normal(size=50)
    found_N = truth_N + random.normal(size=50) / 2
    slides = [SlideScore(str(i), {}, (f,), "", "", t) for i, (f, t) in enumerate(zip(found_N, truth_N, strict=True))]
    found = evaluate_numbers(slides)
    assert found.measures["mse"].value == pytest.approx(np.mean((found_N - truth_N) ** 2))
    assert found.measures["mae"].value == pytest.approx(np.mean(np.abs(found_N - truth_N)))
    assert found.measures["r2"].value == pytest.approx(1 - np.mean((found_N - truth_N) ** 2) / truth_N.var())
    assert all(measure.low < measure.value < measure.high for measure in found.measures.values())
    assert "confusion" not in found.to_dict()


def test_slides_of_one_class_have_no_auc():
    p_NC, _ = drawn(2, 5)
    found = evaluate_classes(slides_of(p_NC, np.ones(5, int), "ab"), "ab")
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["auc"] == {"value": None, "low": None, "high": None}
    assert told["accuracy"]["low"] is not None


def test_one_slide_has_no_interval():
    p_NC, _ = drawn(2, 1)
    found = evaluate_classes(slides_of(p_NC, np.ones(1, int), "ab"), "ab")
    assert found.to_dict()["accuracy"]["low"] is None
    assert found.to_dict()["bootstrap"] == {"resamples": 1000, "seed": 0}


def test_the_c_index_is_the_share_of_pairs_in_order():
    random = np.random.default_rng(0)
    time_N, risk_N = random.integers(1, 9, 40).astype(float), random.integers(0, 6, 40).astype(float)
    event_N = random.random(40) < 0.6
    right = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if event_N[i] and (time_N[i] < time_N[j] or (time_N[i] == time_N[j] and not event_N[j])):
                pairs += 1
                right += 1.0 if risk_N[i] > risk_N[j] else 0.5 if risk_N[i] == risk_N[j] else 0.0
    assert c_index(risk_N, time_N, event_N) == pytest.approx(right / pairs, rel=1e-12)


def test_survival_has_an_interval_and_no_value_without_events():
    slides = [SlideScore(f"s{i}", {}, (float(-i),), "", f"{i}", float(i), i % 3 > 0) for i in range(20)]
    found = evaluate_survival(slides)
    assert found.measures["c_index"].value == 1
    assert found.measures["c_index"].low == 1
    silent = evaluate_survival([SlideScore("s", {}, (1.0,), "", "3+", 3.0, False)] * 3)
    assert math.isnan(silent.measures["c_index"].value)
