"""What an installation without extras says where one is needed: the command that brings it."""

import sys

import pytest

from gigagrad.cli import main
from gigagrad.errors import ConfigError, extra

OPTIONAL = ("cv2", "h5py", "lightning", "matplotlib", "monai", "scipy", "tensorboard", "timm", "torchmetrics")


@pytest.fixture
def bare(monkeypatch):
    """As if these were not installed, by default all that no command of the core may need."""

    def hide(*modules):
        for module in modules or OPTIONAL:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


def test_the_command_and_the_name_are_told():
    with (
        pytest.raises(ConfigError, match=r"no_such_thing is not installed; .*pip install 'gigagrad\[some\]'"),
        extra("some"),
    ):
        import no_such_thing  # type: ignore[import-not-found] # noqa: F401


def test_other_errors_of_an_import_stay_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "broken_of_test_extras.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError), extra("some"):
        import broken_of_test_extras  # type: ignore[import-not-found] # noqa: F401


def test_labels_predictions_and_reports_need_no_extra(bare, jpeg_slide, run_dir, some_page, tmp_path):
    bare()
    out = tmp_path / "out"
    assert main(["label", str(jpeg_slide), "--out", str(tmp_path / "labels")]) == 0
    assert main(["predict", "--run", str(run_dir), "--slides", str(jpeg_slide), "--out", str(out)]) == 0
    assert {path.parent.name for path in out.rglob("small.*")} >= {"masks", "geojson", "overlays"}
    assert main(["report", "--run", str(run_dir), "--predictions", str(out), "--out", str(tmp_path / "a.html")]) == 0


@pytest.mark.parametrize(("argv", "missing", "name"), [
    (["demo", "--quick", "--out", "demo"], ["cv2"], "demo"),
    (["plan", "--model", "paper-unet", "--size", "160x160", "--picture", "plan.svg"], ["matplotlib"], "report"),
    (["export", "--run", "RUN", "--out", "exported"], ["onnx"], "export"),
])  # fmt: skip
def test_other_commands_name_the_extra_in_one_line(bare, argv, missing, name, run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bare(*missing)
    assert main([str(run_dir) if word == "RUN" else word for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{missing[0]} is not installed; install it with: pip install 'gigagrad[{name}]'" in said


def test_a_classifiers_scores_name_the_extra(monkeypatch):
    from gigagrad.prediction.slide_scores import _torchmetrics

    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(ConfigError, match=r"gigagrad\[train\]"):
        _torchmetrics()
