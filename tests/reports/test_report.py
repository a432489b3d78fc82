"""A report is one record of plain types with all that a run and a prediction folder hold, in one file that stands alone
and trusts no name that it is given. `test_report_page.py` looks at it in a browser.
"""

import base64
import dataclasses
import hashlib
import io
import json
import math
import re
import zlib
from itertools import chain

import numpy as np
import pytest
from PIL import Image as Pillow

from gigagrad.cohorts.records import MadeWith, SlideResult, summary
from gigagrad.errors import ConfigError, WriteError
from gigagrad.events import StepMeasured
from gigagrad.images import write_pyramid
from gigagrad.reports import pictures, report
from gigagrad.reports.report import embedded, gather, own_peaks, write_report
from tests.pages import ROOT
from tests.plans.test_description import PLAN

EVIL = "</script><script>alert('x')</script> $x_1$ & \"y\""
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
PAGE = {
    "index.html": (ROOT / "web" / "index.html").read_bytes(),
    "page.js": b"'</script>'",
    "page.css": b"p{}",
    "icon.svg": b"",
    "licences.txt": b"BSD",
}
MADE_WITH = MadeWith("best.pt", "0" * 64, 0.5, (), 0)


@pytest.fixture(autouse=True)
def page(monkeypatch):
    """Stand in for the built page, which needs Node.js."""
    monkeypatch.setattr(report, "read_page", lambda: PAGE)


def words(record):
    """Return all texts and numbers of a record, one behind the other, but for pictures."""
    if isinstance(record, dict):
        return " ".join(words(value) for key, value in record.items() if key not in ("picture", "layers"))
    return " ".join(map(words, record)) if isinstance(record, (list, tuple)) else str(record)


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


def done(name, **more):
    known = {"slide": f"/nowhere/{name}.svs", "slide_bytes": 1, "made_with": MADE_WITH, "status": "done"}
    return SlideResult(name=name, **{**known, "height": 4000, "width": 6000, "regions": 3, **more})


def write_records(folder, *records):
    (folder / "predictions.json").write_text(summary(records))


@pytest.fixture
def predictions(tmp_path):
    """Predictions of slides that are gone, with the pictures that were drawn of them."""
    folder = tmp_path / "predicted"
    (folder / "overlays").mkdir(parents=True)
    Pillow.fromarray(np.full((40, 60, 3), 200, np.uint8)).save(folder / "overlays" / "a.png")
    (folder / "overlays" / "damaged.png").write_bytes(b"\x89PNG nothing")
    Pillow.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "secret.png")
    (folder / "overlays" / "outside.png").symlink_to(tmp_path / "secret.png")
    drawn = [done(name, files={"overlay": f"overlays/{name}.png"}) for name in ("a", "damaged", "outside")]
    drawn[0] = dataclasses.replace(drawn[0], dice=0.97)
    write_records(folder, *drawn, done(EVIL.replace("/", ""), status="failed", error="b.svs is truncated"))
    (folder / "records").mkdir()
    (folder / "records" / "a.json").write_text(json.dumps(dataclasses.asdict(drawn[0]) | {"seconds": 12.0}))
    return folder


def unpacked(uri):
    kind, _, data = uri.partition(";base64,")
    return kind, Pillow.open(io.BytesIO(base64.b64decode(data)))


def levels_of(data, told):
    """Return what a record holds of a layer, which is told."""
    (shape,) = told["levels"]
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), np.uint8).reshape(shape)


def test_everything_there_is(run, predictions):
    record = gather(run, predictions, STEP)
    said = words(record)
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
        "A picture of damaged cannot be read.",
        "b.svs is truncated",
        "not a finite number in 1 of 60 steps, first at step 7",
        "on <cpu>, channels last, one tile at a time",
        "690 MiB (no budget set)",
        "Most of the time: segment 0 one pass 100 %",
        "25 x 125",
        "freed blocks of tiles",
    ):
        assert wanted in said, wanted
    assert [slide["info"]["name"] for slide in record["slides"]] == ["a"], "no picture from outside the folder"
    kind, picture = unpacked(record["slides"][0]["picture"])
    assert (kind, picture.size) == ("data:image/jpeg", (60, 40))
    assert picture.getpixel((30, 20)) == pytest.approx((200, 200, 200), abs=2)
    assert record["slides"][0]["info"]["levels"] == [(40, 60)]
    assert len(record["loss"]["train"]) == 59
    assert record["settings"] == {"model": "paper-unet", "epochs": 6}
    assert record["environment"] == {"torch": "2.13", "machine": {"memory_bytes": 24 << 30}}
    assert record["loss"]["val"][0] == (10, pytest.approx(0.8 * 0.9**10))
    assert record["memory"] == {
        "step": 1,
        "measured": [600 << 20, *[None] * 59],
        "predicted": [700 << 20] * 60,
        "budget": [1 << 30] * 60,
    }
    assert record["plan"]["tables"][-1]["bars"], "a bar for each part of the memory"


def test_a_slide_that_is_there_comes_with_its_label_the_prediction_and_the_errors(
    predicted, jpeg_slide, jpeg_label, run, tmp_path
):
    """As `predict` wrote it; the run's settings name the cohort that has the label."""
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(f"slide,mask,split\n{jpeg_slide},{jpeg_label},test\n")
    (run / "config.yaml").write_text(f"model: paper-unet\nslides: {cohort}\n")
    (slide,) = gather(run, predicted)["slides"]
    info = slide["info"]
    assert (info["name"], info["height"], info["width"], info["mpp"]) == ("small", 700, 900, 0.5)
    assert [layer["name"] for layer in info["layers"]] == ["Label", "Prediction", "Probabilities", "Errors"]
    label, prediction, shares, errors = (
        levels_of(data, told) for (data,), told in zip(slide["layers"], info["layers"], strict=True)
    )
    assert shares.shape == (398, 512)
    assert label.shape == prediction.shape == (700, 900)
    assert set(np.unique(label)) == {0, 1}
    assert set(np.unique(errors)) <= {0, 1, 2, 3}
    np.testing.assert_array_equal(errors == 2, (label == 1) & (prediction == 0))
    assert unpacked(slide["picture"])[1].size == (900, 700)


def test_a_slide_that_was_replaced_is_not_shown_as_the_one_that_was_predicted(predicted, run, monkeypatch):
    assert len(gather(run, predicted)["slides"]) == 1
    monkeypatch.setattr(pictures, "size_of", lambda path: 1)
    assert gather(run, predicted)["slides"] == []


def test_all_pictures_together_are_bounded(run, tmp_path, monkeypatch):
    """Noise, which no picture format makes small."""
    folder = tmp_path / "noisy"
    (folder / "masks").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    records = []
    for name in ("a", "b"):
        slide = tmp_path / f"{name}.tif"
        write_pyramid(slide, iter([noise]), shape=noise.shape, dtype=np.uint8, nearest=True)
        mask = folder / "masks" / f"{name}.tif"
        write_pyramid(mask, iter([noise[..., 0] & 1]), shape=(300, 400, 1), dtype=np.uint8, nearest=True)
        size = slide.stat().st_size
        records.append(done(name, slide=str(slide), slide_bytes=size, files={"mask": f"masks/{name}.tif"}, dice=0.5))
    write_records(folder, *records)
    sizes = []
    for most in (300_000, 90_000):
        monkeypatch.setattr(pictures, "_BYTES", most)
        slides = gather(run, folder)["slides"]
        assert [len(slide["layers"]) for slide in slides] == [1, 1]
        sizes.append(sum(len(uri) for slide in slides for uri in (slide["picture"], *chain(*slide["layers"]))))
        assert sizes[-1] < 4 / 3 * most + 1000
    assert sizes[1] < sizes[0]
    assert 100 < slides[0]["info"]["levels"][0][1] < 400, "no smaller than it must be"


@pytest.mark.parametrize(("most", "side"), [(3_000_000, 256), (100_000, 64)])
def test_probabilities_of_several_classes_are_pictures_of_the_likeliest(run, tmp_path, monkeypatch, most, side):
    monkeypatch.setattr(pictures, "_BYTES", most)
    folder = tmp_path / "classes"
    for name in ("masks", "probabilities"):
        (folder / name).mkdir(parents=True)
    slide = tmp_path / "a.tif"
    write_pyramid(slide, [np.full((256, 192, 3), 200, np.uint8)], shape=(256, 192, 3), dtype=np.uint8, nearest=False)
    shares = np.random.default_rng(0).integers(0, 100, (256, 192, 14), np.uint8)
    shares[..., 3] //= 4
    shares[..., 8] //= 4
    shares[64:, :96, 5] = 255
    ids = np.full((256, 192, 1), 1, np.uint8)
    files = {"mask": "masks/a.tif", "probabilities": "probabilities/a.tif"}
    for pixels, file in ((ids, files["mask"]), (shares, files["probabilities"])):
        write_pyramid(folder / file, [pixels], shape=pixels.shape, dtype=np.uint8, nearest=True)
    made_with = dataclasses.replace(MADE_WITH, classes=tuple(f"c{number}" for number in range(1, 14)))
    size = slide.stat().st_size
    write_records(folder, done("a", slide=str(slide), slide_bytes=size, files=files, made_with=made_with))
    (found,) = gather(run, folder)["slides"]
    (_, layer), (_, held) = found["info"]["layers"], found["layers"]
    names = ["Background", *(f"c{number}" for number in range(1, 14) if number not in (3, 8))]
    assert [kind["name"] for kind in layer["classes"]] == names
    assert len(held) == len(names) == 12
    levels = levels_of(held[names.index("c5")], layer)
    assert len(levels) == side
    assert (levels[side // 4 :, : levels.shape[1] // 2] == 255).all()
    assert levels[: side // 4].max() < 100


def test_long_curves_are_drawn_by_means(run):
    lines = [
        {"event": "metrics", "split": "train", "epoch": 0, "step": step, "values": {"loss": float(step % 3)}}
        for step in range(1, 9001)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    points = gather(run)["loss"]["train"]
    assert len(points) == 1800
    assert points[0] == (5, pytest.approx((1 + 2 + 0 + 1 + 2) / 5))
    steps = [StepMeasured("backward", 1, 1.0, 10 + step, 5, 0, 0) for step in range(4001)]
    memory = report._memory(steps)
    assert memory["step"] == 3
    assert memory["measured"][:2] == [12, 15]
    assert memory["budget"] == [None] * 1334


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
        done("p", patches=1234, files={"attention": "attention/p"}),
        done("outside", patches=1, files={"attention": ".."}),
    ]
    write_records(folder, entries[0])
    record = gather(run, folder)
    captions = [slide["caption"] for slide in record["slides"]]
    assert captions == ["attention in s0, 1,234 patches", "most and least attention, 1,234 patches"]
    assert record["attended"]
    write_records(folder, *entries)
    record = gather(run, folder)
    assert "The predictions cannot be read" in words(record["notes"])
    assert not record["slides"]


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
    record = gather(run)
    for wanted in (
        "Accuracy 0.5000 over 2 slides",
        "accuracy 0.5000 0.2500 to 1.0000",
        "area under the ROC curve - -",
        "tumour against the rest 0.8125",
        "C-index -",
        "normal 17 1 tumour 0 19",
        "normal 0.1250, x -",
    ):
        assert wanted in words(record), wanted
    assert record["labelled"][0]["tones"] == ("", "wrong")
    assert "no test scores" not in words(record)
    assert not record["dice"]


@pytest.mark.parametrize(
    "evaluation", [5, [], {"accuracy": 3}, {"accuracy": {"low": []}, "classes": 3, "confusion": [4], "slides": []}]
)
def test_a_damaged_evaluation_is_left_out(run, tmp_path, evaluation):
    (run / "summary.json").write_text(json.dumps({"evaluation": evaluation}))
    assert len(gather(run)["loss"]["val"]) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 3},
        {"fixed": [{"name": "x", "size_bytes": "x"}]},
        {"fixed": [{"name": "x", "size_bytes": 1e999}]},
        {"budget_bytes": 1e999},
        {"elsewhere": [{"name": "disk", "size_bytes": math.nan}]},
        {"elsewhere": [{"name": "disk", "size_bytes": "x"}]},
        {"image_shape": []},
        {"kept": [{"node": 1, "tier": "disk", "operator": 5, "module": 7, "shape": [1], "size_bytes": 3}]},
        {"passes": [{"segment": 9, "phase": "forward"}]},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_read_is_shown_as_it_was_printed(run, tmp_path, changes):
    (run / "plan.json").write_text(json.dumps({**PLAN.to_dict(), **changes}))
    (run / "plan.txt").write_text("as <printed>")
    record = gather(run)
    assert record["plan_text"] == "as <printed>"
    assert record["plan"] is None


def test_it_loads_nothing_and_runs_only_the_page_s_script(run, predictions, tmp_path):
    path = write_report(run, tmp_path / "out" / "report.html", predictions_dir=predictions, step=STEP)
    text = path.read_text()
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', text)
    (style,), (script,) = re.findall("<style>(.*?)</style>", text), re.findall("<script>(.*?)</script>", text)
    assert policy.startswith("default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; ")
    for name, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert text.index(policy) < text.index("<style>"), "before anything that it is about"
    assert script == "'<\\/script>'"
    assert not re.search(r"src=|href=\"(?!data:)", text)
    assert text.count("<script") == text.count("</script") == 2, "a name has closed a tag"
    (data,) = re.findall('<script type="application/json" id="report-data">(.*?)</script>', text)
    record = json.loads(data)
    assert EVIL in record["dice"]
    assert record["licences"] == "BSD"
    assert record == json.loads(json.dumps(gather(run, predictions, STEP) | {"licences": "BSD"}))


def test_without_the_page_nothing_is_read(tmp_path, monkeypatch):
    def missing():
        raise ConfigError("run 'make page'")

    monkeypatch.setattr(report, "read_page", missing)
    with pytest.raises(ConfigError, match="make page"):
        write_report(tmp_path / "nothing", tmp_path / "report.html")


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", '{"dice": 3, "segments": 4}'])
def test_missing_and_damaged_files_are_left_out(tmp_path, content):
    folder = tmp_path / "empty"
    folder.mkdir()
    if content is not None:
        names = ("metrics.jsonl", "summary.json", "plan.json", "config.yaml", "environment.json", "predictions.json")
        for name in names:
            (folder / name).write_text(content)
    record = gather(folder, folder)
    assert "No metrics were recorded" in words(record["notes"])
    assert not [*record["loss"]["train"], *record["dice"], *record["slides"], *record["memory"]["measured"]]


def test_a_loss_that_is_never_finite(tmp_path):
    folder = tmp_path / "lost"
    folder.mkdir()
    lines = [
        json.dumps({"event": "metrics", "split": split, "epoch": 1, "step": 1, "values": {"loss": value}})
        for split, value in (("train", math.nan), ("train", None), ("val", math.inf))
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    record = gather(folder)
    assert "not a finite number in 2 of 2 steps" in words(record["notes"])
    assert record["loss"] == {"train": [], "val": []}


def test_an_unfinished_run_without_a_budget(tmp_path):
    folder = tmp_path / "unfinished"
    folder.mkdir()
    step = {"event": "step", "phase": "backward", "pixels": 10, "seconds": 1.0, "peak_bytes": 5, "budget_bytes": 0}
    metric = {"event": "metrics", "split": "train", "epoch": 0, "step": 1, "values": {"loss": 0.5}}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(step), json.dumps(metric)]))
    record = gather(folder)
    assert "no test scores" in words(record["notes"])
    assert "no budget set" in words(record["cards"])
    assert record["loss"]["train"] == [(1, 0.5)]
    assert record["memory"]["budget"] == [None]


def test_the_scores_of_predictions_stand_in_for_missing_ones(predictions, tmp_path):
    (tmp_path / "empty").mkdir()
    assert ("Dice", "0.9700", "over 1 slide") in gather(tmp_path / "empty", predictions)["cards"]


def test_the_worst_pictures_are_shown_when_there_are_many(run, predictions, tmp_path):
    for index in range(40, 0, -1):
        Pillow.new("RGB", (8, 8)).save(predictions / "overlays" / f"{index}.png")
    records = [done(str(n), dice=n / 100, files={"overlay": f"overlays/{n}.png"}) for n in range(40, 0, -1)]
    write_records(predictions, *records)
    record = gather(run, predictions)
    assert [slide["info"]["name"] for slide in record["slides"]] == [str(n) for n in range(1, 25)]
    assert record["not_shown"] == 17  # and the one that has a record of its own


def test_a_step_of_another_size_is_not_compared(run, tmp_path):
    assert "published" not in words(gather(run, step={"pixels": 1 << 26, "seconds_per_step": 2.0})["step_cards"])


def test_wrong_folders(run, tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(tmp_path / "nothing", tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no folder of predictions"):
        write_report(run, tmp_path / "report.html", predictions_dir=tmp_path / "nothing")
    (run.parent / "labels").mkdir(exist_ok=True)  # as beside a demo's run
    with pytest.raises(ConfigError, match=r"holds runs and is none itself; .* such as .*first"):
        write_report(run.parent, tmp_path / "report.html")
    with pytest.raises(ConfigError, match="print it as PDF"):
        write_report(run, tmp_path / "report.pdf")
    assert f"{run} holds no predictions." in gather(run, run)["notes"]
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
        ("predictions.json", "[" * 100_000),
        ("predictions.json", '{"slides": [{"name": {"a": 1}, "overlay": {"a": 1}, "status": "failed"}]}'),
    ],
)
def test_a_stranger_s_folder_makes_a_page_or_leaves_things_out(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    record = gather(tmp_path, tmp_path)
    text = embedded(PAGE, record)
    assert text.count("<script") == 2
    assert len(text) < 200_000
    assert record["slides"] == []


def test_a_picture_that_would_fill_the_memory_is_no_picture(predictions):
    Pillow.new("1", (30_000, 30_000)).save(predictions / "overlays" / "a.png")
    record = gather(predictions, predictions)
    assert record["slides"] == []
    assert "A picture of a cannot be read." in record["notes"]


def test_settings_that_are_lists_are_shown_and_others_are_bounded(run):
    text = "model: paper-unet\nclasses: [Tumour=1, Stroma=2]\nbands: [B08, 4]\nfrozen: []\n"
    text += "odd: &many [1, 2]\nodder: [*many, *many]\nepochs: &more [[1], [2]]\n"
    (run / "config.yaml").write_text(text)
    listed = {"classes": ["Tumour=1", "Stroma=2"], "bands": ["B08", 4], "frozen": []}
    assert gather(run)["settings"] == {"model": "paper-unet", **listed}


def test_classes_of_masks_with_their_scores(run, tmp_path):
    classes = {
        "Background": {"dice": 0.75, "iou": 0.6, "pixels": 1000},
        EVIL: {"dice": 0.5, "iou": 0.25, "pixels": 4_000_000},
        "absent": {"dice": None, "iou": None, "pixels": 0},
    }
    evaluation = {"classes": classes, "confusion": [[900, 100, 0], [1_000_000, 3_000_000, 0], [0, 0, 0]]}
    (run / "summary.json").write_text(json.dumps({"dice": {"a": 0.9}, "evaluation": evaluation}))
    (table,) = gather(run)["classes"]
    said = words(table)
    assert "as Background" in said
    assert "Background 1 kpx 0.7500 0.6000 90.0% 10.0% 0.0%" in said
    assert f"{EVIL} 4 Mpx 0.5000 0.2500 25.0% 75.0% 0.0%" in said
    assert "absent 0 px - - - - -" in said
    assert table["numeric"] == (False, *[True] * 6)


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
    assert gather(run)["classes"]


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
    record = gather(run)
    assert ("Training steps", "6", "of 3 slides, in 2 epochs") in record["cards"]
    assert "after 14 slides" in words(record["cards"])
    assert record["accumulated"] == 3


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


def test_the_peak_at_the_top_is_a_step_s_own(run, tmp_path):
    steps = [measured_step(900, 900), measured_step(910, 905), measured_step(910, 910)]
    (run / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"event": "step", **dataclasses.asdict(step)}) for step in steps)
    )
    assert ("Peak memory", "910 MiB", "budget 1 GiB") in gather(run)["cards"]


def test_predictions_by_other_weights_than_the_run_s_are_told(run, predictions):
    assert not any(
        "file of weights" in note for note in gather(run, predictions)["notes"]
    )  # nobody knows the run's own
    (run / "best.pt").write_bytes(b"weights")
    (note,) = (note for note in gather(run, predictions)["notes"] if "file of weights" in note)
    assert note == "All predictions are by another file of weights (best.pt) than this run's best.pt."
    own = dataclasses.replace(MADE_WITH, model_sha256=hashlib.sha256(b"weights").hexdigest())
    for path in (predictions / "records").iterdir():
        path.unlink()
    write_records(predictions, done("a", made_with=own), done("b"))
    (note,) = (note for note in gather(run, predictions)["notes"] if "file of weights" in note)
    assert note.startswith("1 of 2 predictions are by another file of weights")
    write_records(predictions, done("a", made_with=own))
    assert not any("file of weights" in note for note in gather(run, predictions)["notes"])
