"""A page reads a run's numbers as they are written."""

import json

import pytest

from gigagrad.errors import ConfigError
from gigagrad.view import plans
from gigagrad.view.plans import read_curves


def line(step, **values):
    return json.dumps({"event": "metrics", "split": "train", "epoch": 0, "step": step, "values": values}) + "\n"


def test_numbers_are_read_from_where_they_were_read_last(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert read_curves(metrics, 0) == {"points": [], "next": 0, "begins": True, "more": False}
    metrics.write_text(line(1, loss=0.5) + '{"event": "step"}\n[]\nno json\n' + line(2, loss=float("nan"))[:-9])
    first = read_curves(metrics, 0)
    assert first["points"] == [["train", "loss", 1, 0.5]]
    metrics.write_text(line(1, loss=0.5) + '{"event": "step"}\n[]\nno json\n' + line(2, loss=float("nan")))
    second = read_curves(metrics, first["next"])
    assert second["points"] == [["train", "loss", 2, None]]
    assert not second["begins"]
    assert read_curves(metrics, second["next"])["points"] == []


def test_a_run_that_begins_anew_is_read_anew(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(1, loss=0.25))
    again = read_curves(metrics, 10**6)
    assert again["begins"]
    assert again["points"] == [["train", "loss", 1, 0.25]]


def test_a_long_file_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "_MOST_BYTES", 200)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line(step, loss=1.0) for step in range(10)))
    found, start, more = [], 0, True
    while more:
        piece = read_curves(metrics, start)
        found += piece["points"]
        start, more = piece["next"], piece["more"]
    assert [point[2] for point in found] == list(range(10))


def test_a_link_is_not_read(tmp_path):
    (tmp_path / "secret").write_text(line(1, loss=0.5))
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="has become a link"):
        read_curves(tmp_path / "metrics.jsonl", 0)


def test_the_server_gives_them(serve, jpeg_slide, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(3, loss=0.75))
    client = serve(tmp_path)
    assert client.get("catalog").json()["runs"] == ["/".join(tmp_path.parts[-2:])]
    assert client.get("runs/0/0").json()["points"] == [["train", "loss", 3, 0.75]]
    assert client.get("runs/1/0").status_code == 404
