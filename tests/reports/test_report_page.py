"""The report in a real browser, from a file: what a person sees, does and prints."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator

import pytest
from torch import nn

from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError
from gigagrad.models import Normalise, save_model
from gigagrad.prediction import predict
from gigagrad.reports.report import write_report
from gigagrad.view.page import read_page
from tests.view.browser import AXE, PROGRAM, Browser

try:
    read_page()
    BUILT = True
except ConfigError:
    BUILT = False
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BUILT, reason="the page is not built; make page"),
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium"),
]


class FourClasses(nn.Sequential):
    def __init__(self):
        super().__init__(Normalise(), nn.Conv2d(3, 4, 1))


EVIL = "</script><img src=x onerror=alert(1)>"
LAYERS = "document.querySelectorAll('.picture .stack img:nth-child(n+2):not([hidden])')"


@pytest.fixture(scope="module")
def report(predicted, jpeg_slide, jpeg_label, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report") / EVIL.replace("/", "")
    folder.mkdir()
    cohort = folder / "cohort.csv"
    cohort.write_text(f"slide,mask,split\n{jpeg_slide},{jpeg_label},test\n")
    settings = (
        f"model: paper-unet\nslides: '{cohort}'\nlearning_rate: 1.0e-4\nbands: [B08, 4]\nfrozen: []\npretrained: true\n"
    )
    (folder / "config.yaml").write_text(settings)
    machine = {"memory_bytes": 24 << 30, "cores": 1200, "patience_seconds": 2.5, "name": None}
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13", "machine": machine}))
    lines = []
    for step in range(1, 101):
        sizes = {"peak_bytes": (600 + step) << 20, "predicted_peak_bytes": 700 << 20, "budget_bytes": 1 << 30}
        lines.append({"event": "step", "phase": "backward", "pixels": 4096, "seconds": 2.0, **sizes})
        lines.append({"event": "metrics", "split": "train", "epoch": 0, "step": step, "values": {"loss": 0.9**step}})
    lines.append({"event": "metrics", "split": "val", "epoch": 0, "step": 100, "values": {"loss": 0.01}})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "summary.json").write_text(json.dumps({"dice": {EVIL: 0.25, "small": 0.5}}))
    path = write_report(folder, folder.parent / "report.html", predictions_dir=predicted)
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(report) -> Iterator[Browser]:
    with Browser(1280, 900) as opened:
        opened.open(report)
        opened.wait(f"{LAYERS}.length === 2 && [...{LAYERS}].every((each) => each.complete && each.naturalWidth)")
        yield opened
        assert not opened.problems
        assert {answer["url"].partition(":")[0] for answer in opened.answers} <= {"file", "data"}


def test_the_class_of_probabilities_is_chosen_for_all_slides_and_close_up(jpeg_slide, tmp_path):
    save_model(tmp_path / "best.pt", "tests.reports.test_report_page:FourClasses", FourClasses())
    out = tmp_path / "predicted"
    trust = ("tests.reports.test_report_page:FourClasses",)
    config = PredictConfig(run=tmp_path / "best.pt", slides=(jpeg_slide,), out=out, trust=trust)
    predict(dataclasses.replace(config, outputs=("probabilities",), classes=("one", "two", "three")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("patch_size: 224\n")
    path = write_report(tmp_path / "run", tmp_path / "report.html", predictions_dir=out)
    drawn = f"[...{LAYERS}].map((each) => each.src)"
    with Browser(1280, 900) as browser:
        browser.open(path.as_uri())
        browser.wait(f"{LAYERS}.length === 1")
        assert "on all patches of each slide" in texts(browser, "#report header")[0]
        assert browser.evaluate("[...document.querySelectorAll('#report fieldset > div')].map((each) => "
                                "each.querySelectorAll('.ramp').length)") == [0, 1]  # fmt: skip
        browser.evaluate("document.querySelectorAll('#report fieldset input')[1].click()")
        select = "document.querySelector('#report fieldset select')"
        assert browser.evaluate(f"[{select}.value, ...{select}.options].map((each) => each.value ?? each)") == [
            *("one", "Background", "one", "two", "three"),
        ]
        browser.wait(f"({drawn})[1] !== ''")  # it is inflated beside the page
        first = browser.evaluate(drawn)[1]
        browser.evaluate(f"{select}.value = 'three'; {select}.dispatchEvent(new Event('change'))")
        browser.wait(f"({drawn})[1] !== {first!r}")
        browser.evaluate("document.querySelector('.picture a').click()")
        browser.wait("document.getElementById('channel-1')?.options.length === 4")
        assert not browser.problems


def texts(browser, found):
    return browser.evaluate(f"[...document.querySelectorAll({found!r})].map((each) => each.textContent)")


def test_it_says_everything_and_takes_no_name_for_html(browser):
    assert texts(browser, "#report h1") == [EVIL.replace("/", "")]
    assert texts(browser, "#report h2") == ["Training", "Predictions", "Memory", "The run"]
    assert texts(browser, ".dots li > span:first-child") == [EVIL, "small"]
    assert browser.evaluate("document.querySelector('img[src=x]')") is None
    assert texts(browser, "#report figure h3") == ["Loss", "Dice by slide", "Peak memory by step"]
    assert browser.evaluate("document.querySelectorAll('#report .uplot canvas').length") == 2
    rows = dict(zip(texts(browser, "#report details th[scope=row]"), texts(browser, "#report details td"), strict=True))
    told = {"learning_rate": "0.0001", "bands": "B08, 4", "frozen": "-", "pretrained": "yes", "torch": "2.13"}
    told |= {"memory_bytes": "24 GiB", "cores": "1,200", "patience_seconds": "2.5 s", "name": "-"}
    inside = ("memory_bytes", "cores", "patience_seconds", "name")
    assert {name: rows[f"machine: {name}" if name in inside else name] for name in told} == told
    assert "OpenSeadragon" in texts(browser, "#licences")[0]


def test_the_loss_of_a_single_step_is_a_dot(tmp_path):
    (tmp_path / "config.yaml").write_text("model: paper-unet\n")
    lines = [
        {"event": "metrics", "split": split, "epoch": 0, "step": 1, "values": {"loss": loss}}
        for split, loss in (("train", 0.6), ("val", 0.7))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    drawn = """(() => {
      const canvas = document.querySelector('#report .uplot canvas'), { width, height } = canvas;
      const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
      const holds = (rgb) => pixels.some((_, at) => !(at % 4) && rgb.every((c, i) => pixels[at + i] === c));
      return [[0, 114, 178], [213, 94, 0]].map(holds);
    })()"""
    with Browser(1280, 900) as page:
        page.open(write_report(tmp_path, tmp_path / "report.html").as_uri())
        page.wait("document.querySelector('#report .uplot canvas') !== null")
        assert page.wait(f"{drawn}.every(Boolean)", 20)
        assert not page.problems


def test_everything_has_a_name_and_stands_in_the_page_s_width(browser):
    named = """[...document.querySelectorAll('#report :is(a, button, input, [role], section)')].filter((each) =>
      !each.getAttribute('aria-label') && !each.textContent.trim() && !each.labels?.length).length"""
    assert browser.evaluate(named) == 0
    for width in (1280, 400):
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.wait("document.documentElement.scrollWidth <= innerWidth")
    browser.ask("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core; make page")
def test_it_keeps_the_rules_of_accessibility(browser):
    assert browser.faults() == browser.faults("dark") == []


def test_layers_are_switched_for_all_slides_and_errors_take_the_place_of_predictions(browser):
    boxes = "[...document.querySelectorAll('#report fieldset input')].map((each) => each.checked)"
    assert texts(browser, "#report fieldset label") == ["Label", "Prediction", "Probabilities", "Errors"]
    assert browser.evaluate(boxes) == [True, True, False, False]
    browser.evaluate("document.querySelectorAll('#report fieldset input')[3].click()")
    assert browser.evaluate(boxes) == [True, False, False, True]
    assert browser.evaluate(f"{LAYERS}.length") == 2
    browser.evaluate("document.querySelectorAll('#report fieldset input')[3].click()")
    assert browser.evaluate(boxes) == [True, True, False, False]


def test_a_picture_opens_closely_by_keyboard_and_esc_leads_back(browser):
    drawn = "document.querySelector('#stage canvas')?.getContext('2d').getImageData(500, 400, 1, 1).data[3] === 255"
    browser.evaluate("document.querySelector('.picture a').focus()")
    browser.key("Enter", ("rawKeyDown", "char", "keyUp"))
    browser.wait("location.hash.startsWith('#slide=0')")
    browser.wait(drawn)
    assert texts(browser, "#layers h1") == ["small"]
    assert browser.evaluate("document.getElementById('report').inert")
    assert browser.evaluate("document.activeElement.ariaLabel") == "Back to the report"
    browser.key("e")
    browser.wait("document.getElementById('layer-3').checked && !document.getElementById('layer-1').checked")
    assert "µm" in browser.wait("document.getElementById('place').textContent")
    browser.key("Escape")
    browser.wait("!document.body.classList.contains('closely')")
    assert browser.evaluate("document.activeElement === document.querySelector('.picture a')")
    scrolled = browser.evaluate("scrollY")
    browser.key("e")
    assert browser.evaluate("document.getElementById('layer-3').checked"), "a key of the page that is closed"
    assert browser.evaluate("scrollY") == scrolled


def test_charts_follow_the_colour_scheme_and_paper_is_white_with_finer_lines(browser):
    ink = "getComputedStyle(document.querySelector('#report .card dd')).color"
    for scheme, bright in (("dark", True), ("light", False)):
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.wait(f"(Number({ink}.match(/\\d+/)[0]) > 128) === {str(bright).lower()}")
    width = "document.querySelector('#report .uplot canvas').width"
    fits = f"{width} === document.querySelector('#report .uplot').parentElement.clientWidth * devicePixelRatio"
    browser.ask("Emulation.setEmulatedMedia", media="print")
    after = "getComputedStyle(document.querySelector('#report .u-legend th'), '::after').content"
    assert browser.evaluate(after) == "none", "a colon, and no value behind it"
    browser.ask("Emulation.setEmulatedMedia", media="")
    browser.wait(fits)
    browser.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {width}; }})")
    paper = base64.b64decode(browser.ask("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    assert 1 <= paper.count(b"/Type /Page\n") <= 12
    assert browser.evaluate("window.printed") == 3 * 660
    browser.wait(fits)
