"""The report is one file that stands alone, shows what there is, and trusts no name it is given."""

import dataclasses
import html.parser
import json
import math
import re

import numpy as np
import pytest
from PIL import Image as Pillow

from gigagrad.errors import ConfigError, WriteError
from gigagrad.events import StepMeasured
from gigagrad.reports.charts import dice_chart, loss_chart, memory_chart, own_peaks
from gigagrad.reports.report import read_run, write_report
from tests.plans.test_description import PLAN

EVIL = "<script>alert('x')</script> $x_1$ & \"y\""
STEP = {
    "pixels": 16000 * 64000,
    "seconds_per_step": 31.8,
    "peak_rss_bytes": 850 << 20,
    "budget_bytes": 1 << 30,
    "predicted_peak_bytes": 930 << 20,
    "loss": 0.691234,
    "height": 16000,
    "width": 64000,
}
VOID = {"meta", "link", "img", "input", "br", "hr"}


class Page(html.parser.HTMLParser):
    """Text and tags of a page, and whether the tags nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.words, self.ids = [], [], [], [], []  # type: ignore[var-annotated]
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    records = []
    for step in range(1, 61):
        records.append(
            {
                "event": "step",
                "phase": "backward",
                "pixels": 1 << 26,
                "seconds": 2.0,
                "peak_bytes": 600 << 20,
                "predicted_peak_bytes": 700 << 20,
                "budget_bytes": 1 << 30,
            }
        )
        loss = math.nan if step == 7 else 0.7 * 0.9**step
        records.append(
            {"event": "metrics", "split": "train", "epoch": step // 10, "step": step, "values": {"loss": loss}}
        )
        if step % 10 == 0:
            values = {"loss": 0.8 * 0.9**step}
            records.append({"event": "metrics", "split": "val", "epoch": step // 10, "step": step, "values": values})
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "metr']))
    (folder / "summary.json").write_text(json.dumps({"dice": {"a": 0.99, EVIL: 0.95, "broken": None}}))
    (folder / "plan.json").write_text(json.dumps(dataclasses.replace(PLAN, device="<cpu>").to_dict()))
    (folder / "plan.txt").write_text("as printed")
    (folder / "config.yaml").write_text("model: paper-unet\nepochs: 6\n")
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13", "machine": {"memory_bytes": 24 << 30}}))
    return folder


@pytest.fixture
def predictions(tmp_path):
    folder = tmp_path / "predicted"
    (folder / "overlays").mkdir(parents=True)
    Pillow.fromarray(np.full((40, 60, 3), 200, np.uint8)).save(folder / "overlays" / "a.png")
    (folder / "overlays" / "damaged.png").write_bytes(b"\x89PNG nothing")
    Pillow.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "secret.png")
    base = {"status": "done", "height": 4000, "width": 6000, "regions": 3}
    (folder / "records").mkdir()
    (folder / "records" / "a.json").write_text(json.dumps({"name": "a", "seconds": 12.0}))
    slides = [
        {**base, "name": "a", "overlay": "overlays/a.png", "dice": 0.97},
        {**base, "name": "damaged", "overlay": "overlays/damaged.png", "dice": None},
        {**base, "name": "outside-the-folder", "overlay": "../secret.png"},
        {"name": EVIL, "status": "failed", "error": "b.svs is truncated"},
    ]
    (folder / "predictions.json").write_text(json.dumps({"format": 1, "slides": slides}))
    return folder


def page_of(path):
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_everything_there_is(run, predictions, tmp_path):
    text, page = page_of(write_report(run, tmp_path / "out" / "report.html", predictions_dir=predictions, step=STEP))
    for wanted in (
        "paper-unet",
        "0.9700 ± 0.0283 over 2 slides",
        "after step 60",
        "1.02 Gpx",
        "16000 x 64000 px",
        "31.8 s",
        "published: 81 s",
        "published: 103.61 GB",
        "600 MiB",
        "0.691234",
        "Dice 0.9700, 4000 x 6000 px, 3 regions, 12.0 s",
        "4000 x 6000 px, 3 regions, the picture cannot be read",
        "b.svs is truncated",
        "not a finite number in 1 of 60 steps, first at step 7",
        "on <cpu>, channels last, one tile at a time",
        "690 MiB (no budget set)",
        "Most of the time: segment 0 one pass 100 %",
        "25 x 125",
        "freed blocks of tiles",
        "machine: memory_bytes 24 GiB",
    ):
        assert wanted in page.text, wanted
    assert page.tags.count("svg") == 3
    assert "width: 100.0%" in text, "a bar for the largest part of the memory"
    assert page.tags.count("img") == 1
    assert "as printed" not in page.text, "said twice"
    assert "outside-the-folder" not in text, "a picture from outside the prediction folder"


def measured(value, low=0.25):
    return {"value": value, "low": low, "high": None if low is None else 1.0}


def test_attention_of_bags_and_the_patches_with_most_of_it(run, tmp_path):
    folder = tmp_path / "bags"
    (folder / "attention" / "p").mkdir(parents=True)
    for name in ("s0", "patches"):
        Pillow.fromarray(np.full((40, 60, 3), 200, np.uint8)).save(folder / "attention" / "p" / f"{name}.png")
    Pillow.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "secret.png")
    (folder / "attention" / "p" / "linked.png").symlink_to(tmp_path / "secret.png")
    entries = [
        {"name": "p", "status": "done", "patches": 1234, "files": {"attention": "attention/p"}},
        {"name": "outside", "status": "done", "patches": 1, "files": {"attention": ".."}},
    ]
    (folder / "predictions.json").write_text(json.dumps({"format": 1, "slides": entries}))
    text, _ = page_of(write_report(run, tmp_path / "report.html", predictions_dir=folder))
    assert "attention in s0, 1,234 patches" in text
    assert "most and least attention, 1,234 patches" in text
    assert text.count("data:image/webp") == 2
    assert "upper half by their attention" in text
    assert "Outlines of" not in text


def test_scores_of_slides_with_their_intervals(run, tmp_path):
    evaluation = {
        "slides": {
            EVIL: {"label": "normal", "predicted": "normal", "scores": {"probability_normal": 0.75}},
            "low": {"label": "normal", "predicted": "tumour", "scores": {"probability_normal": 0.125, "x": None}},
        },
        "accuracy": measured(0.5),
        "auc": measured(None, None),
        "auc_tumour": measured(0.8125),
        "c_index": measured("0.6"),
        "classes": ["normal", "tumour"],
        "confusion": [[17, 1], [0, 19]],
        "bootstrap": {"resamples": 1000, "seed": 0},
    }
    (run / "summary.json").write_text(json.dumps({"metric": "loss", "loss": {"a": 1.0}, "evaluation": evaluation}))
    text, page = page_of(write_report(run, tmp_path / "report.html"))
    for wanted in (
        "Accuracy 0.5000 over 2 slides",
        "accuracy 0.5000 0.2500 to 1.0000",
        "area under the ROC curve - -",
        "tumour against the rest 0.8125",
        "C-index -",
        "normal 17 1 tumour 0 19",
        "normal 0.1250, x -",
    ):
        assert wanted in page.text, wanted
    assert re.findall('<tr class="wrong"><td>(.*?)</td>', text) == ["low"]
    assert "no test scores" not in page.text
    assert "Dice" not in page.text


@pytest.mark.parametrize(
    "evaluation", [5, [], {"accuracy": 3}, {"accuracy": {"low": []}, "classes": 3, "confusion": [4], "slides": []}]
)
def test_a_damaged_evaluation_is_left_out(run, tmp_path, evaluation):
    (run / "summary.json").write_text(json.dumps({"evaluation": evaluation}))
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "Loss" in page.text


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 3},
        {"fixed": [{"name": "x", "size_bytes": "x"}]},
        {"fixed": [{"name": "x", "size_bytes": 1e999}]},
        {"budget_bytes": 1e999},
        {"elsewhere": [{"name": "disk", "size_bytes": math.nan}]},
        {"image_shape": []},
        {"kept": [{"node": 1, "tier": "disk", "operator": 5, "module": 7, "shape": [1], "size_bytes": 3}]},
        {"passes": [{"segment": 9, "phase": "forward"}]},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_read_is_shown_as_it_was_printed(run, tmp_path, changes):
    (run / "plan.json").write_text(json.dumps({**PLAN.to_dict(), **changes}))
    (run / "plan.txt").write_text("as <printed>")
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "as <printed>" in page.text
    assert "Memory at the peak" not in page.text


def test_it_loads_nothing_and_runs_nothing(run, predictions, tmp_path):
    text, page = page_of(write_report(run, tmp_path / "report.html", predictions_dir=predictions, step=STEP))
    assert "script" not in page.tags
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert len(page.ids) == len(set(page.ids))
    assert EVIL in page.text


def test_charts_take_the_colours_of_the_page(run):
    data = read_run(run)
    for svg in (loss_chart(data), dice_chart(data.dice), memory_chart(data.steps)):
        assert svg.startswith('<svg role="img" aria-label="')
        assert not re.search(r"#[0-9a-f]{6}\b", svg), "a colour that does not follow the scheme"  # type: ignore[arg-type]
        assert "var(--" in svg  # type: ignore[operator]
        assert "DejaVu" not in svg  # type: ignore[operator]


def test_many_slides_and_long_names_still_make_a_chart():
    assert "sd 0.0" in dice_chart({f"slide-{index}": 0.9 for index in range(500)})  # type: ignore[operator]
    assert "a-very-long..." in dice_chart({"a-very-long-name-of-a-slide-that-goes-on": 1.0})  # type: ignore[operator]
    assert dice_chart({"one": 0.0}) is not None
    assert ">$x_1$<" in dice_chart({"$x_1$": 0.5}), "a name is no formula"  # type: ignore[operator]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", '{"dice": 3, "segments": 4}'])
def test_missing_and_damaged_files_are_left_out(tmp_path, content):
    folder = tmp_path / "empty"
    folder.mkdir()
    if content is not None:
        names = ("metrics.jsonl", "summary.json", "plan.json", "config.yaml", "environment.json", "predictions.json")
        for name in names:
            (folder / name).write_text(content)
    _, page = page_of(write_report(folder, tmp_path / "report.html", predictions_dir=folder))
    assert "No metrics were recorded" in page.text
    assert "svg" not in page.tags


def test_a_loss_that_is_never_finite(tmp_path):
    folder = tmp_path / "lost"
    folder.mkdir()
    lines = [
        json.dumps({"event": "metrics", "split": split, "epoch": 1, "step": 1, "values": {"loss": value}})
        for split, value in (("train", math.nan), ("train", None), ("val", math.inf))
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    _, page = page_of(write_report(folder, tmp_path / "report.html"))
    assert "not a finite number in 2 of 2 steps" in page.text
    assert "svg" not in page.tags


def test_an_unfinished_run_without_a_budget(tmp_path):
    folder = tmp_path / "unfinished"
    folder.mkdir()
    step = {"event": "step", "phase": "backward", "pixels": 10, "seconds": 1.0, "peak_bytes": 5, "budget_bytes": 0}
    metric = {"event": "metrics", "split": "train", "epoch": 0, "step": 1, "values": {"loss": 0.5}}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(step), json.dumps(metric)]))
    _, page = page_of(write_report(folder, tmp_path / "report.html"))
    assert "no test scores" in page.text
    assert "no budget set" in page.text
    assert page.tags.count("svg") == 2


def test_the_scores_of_predictions_stand_in_for_missing_ones(predictions, tmp_path):
    (tmp_path / "empty").mkdir()
    _, page = page_of(write_report(tmp_path / "empty", tmp_path / "report.html", predictions_dir=predictions))
    assert "0.9700 over 1 slide" in page.text


def test_the_worst_pictures_are_shown_when_there_are_many(run, predictions, tmp_path):
    base = {"status": "done", "overlay": "overlays/a.png"}
    slides = [{**base, "name": f"slide-{index}", "dice": index / 100} for index in range(40, 0, -1)]
    (predictions / "predictions.json").write_text(json.dumps({"slides": slides}))
    _, page = page_of(write_report(run, tmp_path / "report.html", predictions_dir=predictions))
    assert page.tags.count("img") == 16
    assert "The other 24 are in the prediction folder" in page.text
    assert page.text.index("slide-1 ") < page.text.index("slide-16 ")
    assert "slide-17 " not in page.text


def test_a_step_of_another_size_is_not_compared(run, tmp_path):
    _, page = page_of(write_report(run, tmp_path / "report.html", step={"pixels": 1 << 26, "seconds_per_step": 2.0}))
    assert "published: 81 s" not in page.text


def test_wrong_folders(run, tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(tmp_path / "nothing", tmp_path / "report.html")
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"report\.html"):
        write_report(run, tmp_path / "file" / "report.html")


_BOMB = "".join(f"x{n}: &x{n} [{f'*x{n - 1},' * 9 if n else 0}]\n" for n in range(30))
_DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", _BOMB),
        ("config.yaml", "model: 2001-99-99\n"),
        ("config.yaml", f"seed: 0x{'f' * 5000}\nmodel: '{EVIL.replace(chr(39), '')}'\n"),
        ("config.yaml", 'model: "\\uD800"\n'),
        ("config.yaml", "[" * 5000),
        ("plan.json", '{"passes": [3], "segments": [{"size_bytes": "x"}]}'),
        ("plan.json", '{"segments": [' + '{"size_bytes": "x"},' * 20 + '{"size_bytes": 1}]}'),
        ("plan.json", '{"budget_bytes": 1e999, "a_bytes": ' + "9" * 4000 + "}"),
        ("plan.json", '{"a": ' * 900 + "1" + "}" * 900),
        ("plan.json", "[" * 5000),
        ("environment.json", '{"a": ' * 900 + "1" + "}" * 900),
        ("environment.json", '{"a": ' + _DEEP + "}"),
        ("environment.json", '{"a_bytes": 1e999, "b": "\\ud800"}'),
        ("summary.json", '{"dice": {"\\ud800<script>": 0.5, "b": 1e999, "c": ' + "9" * 400 + "}}"),
        ("metrics.jsonl", '{"event": "metrics", "epoch": 1e999, "step": ' + "9" * 400 + ', "values": {"loss": 1}}'),
        ("metrics.jsonl", '{"event": "step", "pixels": NaN, "peak_bytes": 1e999, "seconds": "x"}'),
        ("predictions.json", '{"slides": [{"name": "a", "overlay": "' + "x" * 5000 + '"}]}'),
        ("predictions.json", '{"slides": [{"name": "a", "overlay": "a\\u0000b", "height": 1e999}]}'),
        ("predictions.json", '{"slides": [{"name": {"a": 1}, "overlay": {"a": 1}, "status": "failed"}]}'),
    ],
)
def test_a_stranger_s_folder_makes_a_page_or_leaves_things_out(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    text, page = page_of(write_report(tmp_path, tmp_path / "report.html", predictions_dir=tmp_path))
    assert "script" not in page.tags
    assert len(text) < 200_000


def test_a_picture_is_a_small_png_or_no_picture(predictions, tmp_path):
    wide = predictions / "overlays" / "a.png"
    Pillow.new("1", (30_000, 30_000)).save(wide)
    _, page = page_of(write_report(predictions, tmp_path / "report.html", predictions_dir=predictions))
    assert "img" not in page.tags
    Pillow.new("RGB", (8, 8)).save(wide, format="TIFF")
    _, page = page_of(write_report(predictions, tmp_path / "report.html", predictions_dir=predictions))
    assert "img" not in page.tags


def test_settings_that_are_lists_are_shown_and_others_are_bounded(run, tmp_path):
    text = "model: paper-unet\nclasses: [Tumour=1, Stroma=2]\nbands: [B08, 4]\nfrozen: []\n"
    text += "odd: &many [1, 2]\nodder: [*many, *many]\nepochs: &more [[1], [2]]\n"
    (run / "config.yaml").write_text(text)
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "classes Tumour=1, Stroma=2" in page.text
    assert "bands B08, 4" in page.text
    assert "frozen -" in page.text
    assert "odd" not in page.text
    assert "epochs [" not in page.text


def test_classes_of_masks_with_their_scores(run, tmp_path):
    classes = {
        "Background": {"dice": 0.75, "iou": 0.6, "pixels": 1000},
        EVIL: {"dice": 0.5, "iou": 0.25, "pixels": 4_000_000},
        "absent": {"dice": None, "iou": None, "pixels": 0},
    }
    evaluation = {"classes": classes, "confusion": [[900, 100, 0], [1_000_000, 3_000_000, 0], [0, 0, 0]]}
    (run / "summary.json").write_text(json.dumps({"dice": {"a": 0.9}, "evaluation": evaluation}))
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "as Background" in page.text
    assert "Background 1 kpx 0.7500 0.6000 90.0% 10.0% 0.0%" in page.text
    assert "4 Mpx 0.5000 0.2500 25.0% 75.0% 0.0%" in page.text
    assert "absent 0 px - - - - -" in page.text
    assert EVIL in page.text


@pytest.mark.parametrize(
    "evaluation",
    [
        {"classes": {"a": 3}, "confusion": [[1]]},
        {"classes": {"a": {"pixels": "x"}, "b": {}}, "confusion": [[1, 2], [3]]},
        {"classes": {"a": {"pixels": 2}}, "confusion": [["x"]]},
        {"classes": {"a": {}}, "confusion": 7},
    ],
)
def test_damaged_scores_of_classes_are_shown_as_far_as_they_go(run, tmp_path, evaluation):
    (run / "summary.json").write_text(json.dumps({"dice": {"a": 0.9}, "evaluation": evaluation}))
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "Test slides by class" in page.text


def test_steps_are_those_of_the_optimizer(run, tmp_path):
    """Seven slides an epoch, three to a step: three steps, of which the last one has seen one."""
    (run / "config.yaml").write_text("model: paper-unet\naccumulate: 3\n")
    records = [
        {"event": "metrics", "split": "train", "epoch": epoch, "step": 7 * (epoch - 1) + slide, "values": {"loss": 0.5}}
        for epoch in (1, 2)
        for slide in range(1, 8)
    ]
    records.append({"event": "metrics", "split": "val", "epoch": 2, "step": 14, "values": {"loss": 0.25}})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "Training steps 6 of 3 slides, in 2 epochs" in page.text
    assert "after 14 slides" in page.text
    assert "slides seen" in page.text


def measured_step(peak, earlier=0, predicted=700):
    return StepMeasured("backward", 10, 1.0, peak << 20, predicted << 20, 1 << 30, earlier << 20)


def test_a_process_s_old_peak_is_no_peak_of_later_steps():
    steps = [
        measured_step(600, 500),
        measured_step(600, 600, predicted=200),  # far below, as its plan said
        measured_step(650, 620),
        measured_step(400, 300),  # another process, which went on
        measured_step(400, 400),
    ]
    assert own_peaks(steps) == [600 << 20, None, 650 << 20, 400 << 20, None]
    without = [measured_step(600), measured_step(600), measured_step(700)]  # as earlier versions wrote them
    assert own_peaks(without) == [600 << 20, None, 700 << 20]
    assert memory_chart([measured_step(600, 700)]) is None
    assert "where it is the highest so far" in memory_chart(steps)  # type: ignore[operator]


def test_the_peak_at_the_top_is_a_step_s_own(run, tmp_path):
    steps = [measured_step(900, 900), measured_step(910, 905), measured_step(910, 910)]
    (run / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"event": "step", **dataclasses.asdict(step)}) for step in steps)
    )
    _, page = page_of(write_report(run, tmp_path / "report.html"))
    assert "Peak memory 910 MiB budget 1 GiB" in page.text
