"""The command line: its words are frozen here, and each command does what it says."""

import argparse
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import tifffile
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gigagrad.cli import main
from gigagrad.cli.flags import build_parser
from gigagrad.devices import Machine
from gigagrad.devices.machine import Gpu, write_profile
from gigagrad.images import open_image
from gigagrad.models import save_model
from gigagrad.plans import Plan
from gigagrad.prediction import EmbedConfig, PredictConfig
from gigagrad.training import FitConfig

WORDS = {
    "demo": "--memory --out --quick --slides",
    "label": "--bands --mpp --out --overwrite --share SLIDE",
    "plan": (
        "--card --channels --cohort --deadline --device --json --link --loss --machines --memory --model --patches "
        "--picture --predict --ranks --rates --scratch --scratch-bytes --size --slides-per-step --split --storage "
        "--threads"
    ),
    "init": "--out --overwrite --schema --slides",
    "fit": (
        "--accumulate --bands --checkpoint-seconds --class-weights --classes --clip --colour-jitter --config --coords "
        "--device --ema --epochs --features --fold --folds --frozen --journal --learning-rate --least-tissue --level "
        "--loss --memory --mesh --model --no-augment --no-grey --optimizer --out --overlap --overwrite --patch-mpp "
        "--patch-size --patience --precision --rank-timeout --rates --schedule --scratch --seed --shard-optimizer "
        "--slides --stain-jitter --storage --tissue --trackers --trust --warmup --weight-decay --weights"
    ),
    "predict": (
        "--bands --classes --coords --device --format --least-tissue --level --memory --mpp --no-grey "
        "--only-tissue --out --outputs --overlap --overwrite --patch-mpp --patch-size --run --scratch --share "
        "--slides --split --target-mpp --threshold --tissue --trust"
    ),
    "export": "--int8 --out --overwrite --run --trust",
    "embed": (
        "--coords --device --encoder --least-tissue --memory --mpp --name --out --overlap --overwrite --patch-mpp "
        "--patch-size --precision --share --slides --split --tissue --weights"
    ),
    "evaluate": (
        "--classes --coords --device --json --memory --out --predictions --run --scratch --share --slides --split "
        "--trust"
    ),
    "attribute": (
        "--block --classes --device --memory --module --of --out --overwrite --run --scratch --share --slides --split "
        "--trust"
    ),
    "report": "--out --predictions --run",
    "view": ("--classes --device --host --mask --memory --model --no-browser --port --predictions --trust SOURCE"),
    "calibrate": "--device --scratch",
    "doctor": "--rates",
}


PLAN = ["plan", "--model", "paper-unet", "--size", "160x160"]
CARD_PLAN = [*PLAN, "--device", "cuda", "--memory", "1GiB", "--card"]


def subcommands():
    actions = build_parser(["fit", "predict", "embed"])._actions
    return next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices


def lines(text):
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def cohort(jpeg_slide, jpeg_label):
    """One test slide, labelled by the recipe."""
    table = jpeg_label.with_name("cohort.csv")
    table.write_text(f"slide,mask,split\n{jpeg_slide},small.tif,test\n")
    return table


def test_the_words_of_the_command_line_are_frozen():
    found = {}
    for name, parser in subcommands().items():
        words = [a.option_strings[-1] if a.option_strings else a.metavar for a in parser._actions if a.dest != "help"]
        found[name] = " ".join(sorted(words))
    assert found == WORDS


@pytest.mark.parametrize("command", ["", *WORDS])
def test_help_teaches_every_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: gigagrad {command}".strip())
    for word in WORDS.get(command, " ".join(WORDS)).split():
        assert word in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["fit", "--slide", "c.csv"], "'fit' does not take --slide c.csv, did you mean '--slides'?"),
        (
            [*PLAN, "--slides", "c.csv"],
            "'plan' does not take --slides c.csv, did you mean '--size'?; see ",
        ),
        (["plan", "--model", "paper-unet", "--size", "16000"], "HEIGHTxWIDTH"),
        (["plan", "--model", "paper-unet", "--size", "160x160", "--memory", "lots"], "'2 GiB'"),
        (["plan", "--model", "paper-unet", "--size", "0x160"], "HEIGHTxWIDTH"),
        (["plan", "--model", "paper-unett", "--size", "160x160"], "did you mean 'paper-unet'"),
        (["plan", "--model", "paper-unet", "--size", "160x160", "--memory", "1MiB"], "the smallest budget that works"),
        (["plan", "--model", "paper-unet", "--size", "160x160", "--picture", "plan.jpg"], ".svg or .png"),
        ([*PLAN, "--ranks", "0"], "8, 1,2,4 or 1..64"),
        ([*PLAN, "--ranks", "8..2"], "8, 1,2,4 or 1..64"),
        ([*PLAN, "--ranks", "1,,2"], "8, 1,2,4 or 1..64"),
        ([*PLAN, "--ranks", "2", "--link", "10Gb/s"], "'10Gbit/s', '25GB/s'"),
        ([*PLAN, "--ranks", "2", "--predict"], "slides of its own"),
        ([*PLAN, "--slides-per-step", "2"], "--ranks 1..64"),
        ([*PLAN, "--scratch-bytes", "much"], "'2 GiB'"),
        ([*PLAN, "--threads", "0"], "a whole number of 1 or more"),
        ([*PLAN, "--rates", "none.json"], "'gigagrad calibrate' saved"),
        ([*PLAN, "--threads", "8", "--device", "cuda"], "leave them out"),
        ([*PLAN, "--card", "L4"], "add --device cuda"),
        ([*CARD_PLAN, "RTX 9999"], "expected one of H200, H200 NVL, H100,"),
        ([*CARD_PLAN, "L4", "--rates", "l4.json"], "leave one out"),
        ([*PLAN, "--device", "cuda", "--memory", "1GiB", "--rates", "none.json"], "calibrate --device cuda' saved"),
        ([*PLAN, "--device", "cuda", "--card", "L4"], "--memory 40GiB"),
        pytest.param(
            ["plan", "--model", "paper-unet", "--size", "160x160", "--device", "cuda"],
            "there is no GPU here to ask; give what yours may use of its memory, e.g. --memory 40GiB",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        ([*PLAN, "--scratch", "no/such/folder", "--scratch-bytes", "1GiB"], "no/such/folder"),
        (["fit"], "--slides"),
        (["evaluate", "--slides", "c.csv"], "--run --predictions"),
        (["label", "{slide}", "--out", "masks", "--share", "0/4"], "there is no share 0/4; write I/N"),
        (["predict", "--run", "r", "--slides", "{slide}", "--out", "o", "--share", "5/4"], "there is no share 5/4"),
        (["evaluate", "--run", "r", "--slides", "{cohort}", "--out", "o", "--share", "x"], "as 2/4; got 'x'"),
        (["evaluate", "--predictions", "r", "--slides", "{cohort}", "--share", "1/2"], "name it with --out"),
        (["attribute", "--run", "{run}", "--slides", "{slide}", "--out", "o", "--share", "1/-2"], "got '1/-2'"),
    ],
)
def test_a_command_line_that_says_nothing_sensible_gets_one_line(
    argv, said, capsys, jpeg_slide, cohort, run_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(slide=jpeg_slide, cohort=cohort, run=run_dir) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines(err)) == 1
    assert err.startswith("gigagrad: error: ")
    assert said in err


def test_torchruns_summary_has_the_line(tmp_path, monkeypatch, capsys):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    assert main(["plan", "--model", "paper-unet", "--size", "100x100", "--link", "10Gbit/s"]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("gigagrad: error: ")
    failure = ProcessFailure(local_rank=1, pid=2, exitcode=2, error_file=str(told))
    assert f"traceback : {line}" in ChildFailedError("gigagrad", {1: failure}).format_msg()


def test_label_needs_no_pytorch_and_help_needs_nothing(jpeg_slide, tmp_path):
    check = (
        "import sys; from gigagrad.cli import main\n"
        "loaded = lambda: {'torch', 'cv2', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "from gigagrad.cli.flags import build_parser; build_parser(['fit', 'predict']).format_help()\n"
        "assert not loaded(), loaded()\n"
        "assert main(['label', sys.argv[1], '--out', sys.argv[2]]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check, jpeg_slide, tmp_path / "masks"], check=True, capture_output=True)
    assert (tmp_path / "masks" / "small.tif").exists()


def test_an_array_of_slurm_shares_the_slides_and_says_so(tmp_path, jpeg_slide, monkeypatch, capsys):
    slides, out = tmp_path / "slides of three", tmp_path / "masks"
    slides.mkdir()
    for name in "abc":
        (slides / f"{name}.tif").write_bytes(jpeg_slide.read_bytes())
    command = ["label", str(slides), "--out", str(out), "--mpp", "0.5"]
    for name, value in (("ID", "12"), ("MIN", "11"), ("MAX", "12"), ("COUNT", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "share 2/2 by SLURM_ARRAY_TASK_ID; --share 1/1 takes every slide" in told
    assert "label (share 2 of 2) 2/2 (100 %): c" in told
    assert sorted(path.name for path in out.iterdir()) == ["b.tif", "c.tif"]
    assert main([*command, "--share", "1/1"]) == 0
    assert "label 3/3 (100 %): c: done before" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["a.tif", "b.tif", "c.tif"]


def test_the_package_itself_can_be_run_and_its_exit_code_is_the_command_s():
    run = [sys.executable, "-m", "gigagrad"]
    told = subprocess.run([*run, "plan", "--help"], check=True, capture_output=True)
    assert told.stdout.startswith(b"usage: gigagrad plan")
    wrong = subprocess.run([*run, "plan", "--size", "0x5"], check=False, capture_output=True)
    assert wrong.returncode == 2
    assert b"Traceback" not in wrong.stderr


def test_label_keeps_what_is_there_unless_told_otherwise(jpeg_slide, tmp_path, capsys):
    command = ["label", str(jpeg_slide), "--out", str(tmp_path / "masks"), "--mpp", "0.25"]
    assert main(command) == 0
    mask = tmp_path / "masks" / "small.tif"
    assert lines(capsys.readouterr().out)[-1] == str(mask)
    with open_image(mask) as written:
        assert (written.shape, written.mpp) == ((1, 700, 900), pytest.approx(0.25))  # type: ignore[comparison-overlap]
    mask.write_bytes(b"mine")
    assert main(command) == 0
    assert mask.read_bytes() == b"mine"
    assert main([*command, "--overwrite"]) == 0
    assert mask.read_bytes() != b"mine"


def test_plan_prints_a_table_for_a_size_no_memory_could_hold(capsys):
    assert main(["plan", "--model", "paper-unet", "--size", "16000x64000", "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "16000 x 64000 px (1.02 Gpx)" in text
    assert "budget 64 GiB" in text
    for part in ("Segments", "Most of the time", "Fields", "Memory at the peak", "Memory against time", "<- this plan"):
        assert part in text
    assert max(map(len, lines(text))) <= 100


def test_plan_for_a_gpu_that_is_not_here(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["plan", "--model", "paper-unet", "--size", "16000x64000", "--device", "cuda", "--memory"]
    assert main([*command, "8GiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on cuda" in text
    assert "by typical rates of a GPU (data sheet of RTX 4090, as no card is named)" in text
    assert main([*command, "300MiB", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert 0 < made["predicted_peak_bytes"] <= 300 << 20
    assert made["device"] == "cuda"
    assert main([*command, "10MiB"]) == 2
    assert "the smallest budget that works" in capsys.readouterr().err


def test_plan_for_a_card_that_is_not_here(tmp_path, capsys):
    command = ["plan", "--model", "paper-unet", "--size", "16000x64000", "--device", "cuda", "--memory", "8GiB"]

    def seconds(*more):
        assert main([*command, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["predicted_seconds"]

    def told(*more):
        assert main([*command, *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    fast = seconds("--card", "H200")
    assert seconds("--card", "NVIDIA L4") > 2 * fast > 0
    assert "by typical rates of L4 (data sheet)" in told("--card", "L4")
    rates = tmp_path / "ours.json"
    write_profile(rates, dataclasses.replace(Gpu.typical("NVIDIA H200"), seconds_per_tile=1.0))
    assert seconds("--rates", str(rates)) > 10 * fast
    assert "by the rates in ours.json, measured on NVIDIA H200" in told("--rates", str(rates))


@pytest.fixture
def fresh_process(monkeypatch):
    """As if this process had just begun, whatever tests before this one have loaded."""
    monkeypatch.setattr("gigagrad.devices.cpu.resident_bytes", lambda: 400 << 20)


@pytest.mark.usefixtures("fresh_process")
def test_plan_draws_a_picture_and_names_the_budget_that_works(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    command = ["plan", "--model", "paper-unet", "--size", "16000x64000"]
    assert main([*command, "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert lines(text)[-1] == str(picture)
    assert picture.read_bytes().startswith(b"<?xml")
    (smallest,) = (line.split(" would work")[0].split(maxsplit=2)[2] for line in lines(text) if "would work" in line)
    assert main([*command, "--memory", smallest.replace(" ", ""), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_peak_bytes"] > 0


def test_plan_says_which_fields_are_rounded(tmp_path, monkeypatch, capsys):
    (tmp_path / "double_nets.py").write_text(
        "from torch import nn\n"
        "def normed():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)).double()\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.net = normed()\n"
        "    def forward(self, x):\n"
        "        return self.net(x.double())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    command = ["plan", "--model", "double_nets:Net", "--size", "900x800", "--storage", "bfloat16"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "kept in memory as bfloat16" in text
    assert max(map(len, lines(text))) <= 100


@pytest.mark.parametrize("size", ["1x1", "3x5", "7x200"])
def test_plan_for_an_image_smaller_than_the_network_s_stride(size, capsys):
    assert main(["plan", "--model", "paper-unet", "--size", size]) in (0, 2)
    out, err = capsys.readouterr()
    assert len(lines(err)) == (0 if out else 1)
    assert "internal" not in err


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("loss", [("--loss", "bce"), ("--predict",)])
def test_plan_for_a_bag_of_patches(loss, capsys):
    pytest.importorskip("timm")
    size = ("--patches", "3000", "--size", "64x64", "--memory", "4GiB")
    classes = 1 if "bce" in loss else 2
    model = f"mil:encoder=timm:resnet10t&head=abmil&classes={classes}"
    assert main(["plan", "--model", model, *size, *loss]) == 0
    told = capsys.readouterr().out
    assert "3,000 patches of 64 x 64 px" in told


@pytest.mark.parametrize(("classes", "loss"), [(3, "ce"), (1, "bce")])
def test_plan_for_a_model_that_answers_once_a_slide(classes, loss, capsys):
    pytest.importorskip("timm")
    model = f"timm:resnet10t?num_classes={classes}"
    assert main(["plan", "--model", model, "--size", "64x96", "--loss", loss, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["image_shape"][-2:] == [64, 96]


def test_plan_as_json_and_for_prediction(capsys):
    assert main(["plan", "--model", "paper-unet", "--size", "320x480", "--predict", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["image_shape"][-2:] == [320, 480]
    assert [each["phase"] for each in made["steps"] if each["step"] == "Tiles"] == ["forward"]


@pytest.mark.parametrize(("ranks", "rows"), [("3", [3]), ("4,1,2", [1, 2, 4]), ("3..20", [3, 4, 8, 16, 20])])
def test_plan_for_many_ranks(ranks, rows, capsys):
    assert main([*PLAN, "--ranks", ranks, "--link", "10Gbit/s", "--slides-per-step", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in printed["scaling"]] == rows
    assert Plan.from_dict(printed).ranks is None


def test_plan_for_many_ranks_as_tables(capsys):
    assert main(["plan", "--model", "paper-unet", "--size", "2000x3000", "--ranks", "1..64"]) == 0
    text = capsys.readouterr().out
    assert "efficiency" in text
    assert "Which parallelism" not in text
    assert max(map(len, lines(text))) <= 100


DEEP = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        convs = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), *convs, nn.Conv2d(8, 1, 1))
    def forward(self, x):
        return super().forward(x.float())
"""


@pytest.fixture
def deep(tmp_path, monkeypatch, fresh_process):
    """The command for a network whose fields are worth keeping in scratch, on a slow processor of 8 threads."""
    (tmp_path / "nets_to_plan.py").write_text(DEEP)
    monkeypatch.syspath_prepend(tmp_path)
    rates = tmp_path / "slow.json"
    write_profile(rates, Machine(flops_per_second=1e9))
    profile = json.loads(rates.read_text())
    profile["machine"] = {"processor": "a slow one", "threads": 8, "torch": "another"}
    rates.write_text(json.dumps(profile))
    return ["plan", "--model", "nets_to_plan:Net", "--size", "4000x4000", "--memory", "1GiB", "--rates", str(rates)]


def planned(command, capsys):
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    return Plan.from_dict(printed), printed["advice"]


def test_plan_for_another_machine(deep, tmp_path, capsys):
    plain, advice = planned(deep, capsys)
    assert (plain.elsewhere, plain.timed_seconds) == ((), None)
    (scratch,) = (each for each in advice if each["tier"] == "disk")
    assert scratch["seconds"] < 0.95 * plain.predicted_seconds
    there, _ = planned([*deep, "--scratch-bytes", str(scratch["size_bytes"])], capsys)
    assert 0 < there.bytes_in("disk") <= scratch["size_bytes"]
    assert there.predicted_seconds == pytest.approx(scratch["seconds"], rel=0.1)  # of another plan
    some, _ = planned([*deep, "--scratch", str(tmp_path), "--scratch-bytes", "1MiB"], capsys)
    assert some.bytes_in("disk") <= 2**20
    fewer, _ = planned([*deep, "--threads", "1"], capsys)
    assert (plain.workers, fewer.workers) == (8, 1)
    assert fewer.predicted_seconds > 2 * plain.predicted_seconds


def test_plan_says_what_would_help_and_by_whose_rates(deep, capsys):
    assert main(deep) == 0
    text = capsys.readouterr().out
    assert "(by the rates in slow.json)" in text
    (first,) = (line for line in lines(text) if line.startswith("what would help"))
    assert " a step instead of " in first
    assert " of scratch: " in text
    assert max(map(len, lines(text))) <= 100


def test_plan_shows_how_far_it_is_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    doing = ("capture the model", "try other budgets")
    assert main(PLAN) == 0
    assert not any(each in capsys.readouterr().out for each in doing)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, this is a terminal
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert all(each in text for each in doing)
    assert main([*PLAN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == []


def test_fit_takes_settings_from_a_file_and_flags_win(cohort, tmp_path, monkeypatch, capsys):
    from gigagrad import training

    seen = []

    def fit(config, listeners, *, overwrite):
        seen.append((config, overwrite))
        return training.FitResult(
            out=tmp_path, metric="dice", scores={"a": 0.5, "b": 0.7}, epochs=3, steps=9, best_epoch=2, best_loss=0.1
        )

    monkeypatch.setattr(training, "fit", fit)
    settings = tmp_path / "settings" / "run.yaml"
    settings.parent.mkdir()
    settings.write_text("slides: here.csv\nepochs: 7\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    argv = ["fit", "--config", str(settings), "--out", "runs/a", "--epochs", "9", "--no-augment", "--overwrite"]
    assert main(argv) == 0
    config, overwrite = seen[0]
    assert (config.slides, config.out) == (str(settings.parent / "here.csv"), str(tmp_path / "runs/a"))
    assert (config.epochs, config.seed, config.augment, overwrite) == (9, 3, False, True)
    assert "test Dice 0.6000 +/- 0.1414 over 2 slides" in capsys.readouterr().out


def test_predict_evaluate_and_report_from_a_run(cohort, run_dir, some_page, tmp_path, capsys):
    out = str(tmp_path / "predictions")
    assert main(["predict", "--run", str(run_dir), "--slides", str(cohort), "--out", out]) == 0
    assert f"1 of 1 slides are in {out}" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "predictions").rglob("small.*")} == {
        "small.tif", "small.geojson", "small.png", "small.json"
    }  # fmt: skip

    assert main(["evaluate", "--run", str(run_dir), "--slides", str(cohort), "--json"]) == 0
    streamed = json.loads(capsys.readouterr().out)
    assert main(["evaluate", "--predictions", out, "--slides", str(cohort), "--split", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == streamed
    assert streamed["dice"].keys() == {"small"}
    assert main(["evaluate", "--predictions", out, "--slides", str(cohort)]) == 0
    assert f"{streamed['mean']:.4f}" in capsys.readouterr().out

    slide, mask, _ = cohort.read_text().splitlines()[1].split(",")
    cohort.write_text(f"slide,mask\n{slide},{mask}\n")
    assert main(["evaluate", "--predictions", out, "--slides", str(cohort), "--json"]) == 0  # no row has a split
    assert json.loads(capsys.readouterr().out) == streamed
    cohort.write_text(f"slide,mask,fold\n{slide},{mask},1\n")
    assert main(["evaluate", "--predictions", out, "--slides", str(cohort), "--json"]) == 2  # what was it trained on?
    said = capsys.readouterr().err
    assert "no rows with split 'test'" in said
    assert "give the run of one, as RUN/fold-1, with --split val" in said

    page = tmp_path / "report.html"
    assert main(["report", "--run", str(run_dir), "--predictions", out, "--out", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert '"picture": "data:image/jpeg' in page.read_text()


def test_target_mpp_chooses_the_level_of_each_slide(cohort, run_dir, tmp_path, capsys):
    """The slide has 0.5, 1 and 2 um/px."""
    out = tmp_path / "predictions"
    command = ["predict", "--run", str(run_dir), "--slides", str(cohort), "--target-mpp"]
    assert main([*command, "1.1", "--out", str(out)]) == 0
    mask = tifffile.imread(out / "masks" / "small.tif")
    assert mask.shape == (350, 450)
    assert json.loads((out / "predictions.json").read_text())["slides"][0]["mpp"] == pytest.approx(1.0, rel=1e-3)
    capsys.readouterr()
    assert main([*command, "8", "--out", str(out), "--overwrite"]) == 2
    assert "no level near 8 um/px; its levels have 0.5, 1, 2" in capsys.readouterr().err


def test_evaluating_a_slide_without_a_mask_uses_the_recipe(cohort, jpeg_slide, run_dir, tmp_path, capsys):
    table = tmp_path / "cohort.csv"
    table.write_text(f"slide,mask,split\n{jpeg_slide},,test\n")
    results = []
    for each in (cohort, table):
        assert main(["evaluate", "--run", str(run_dir), "--slides", str(each), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    assert main(["evaluate", "--run", str(run_dir), "--slides", str(table)]) == 0
    assert "warning: 1 of 1 slides name no mask" in capsys.readouterr().out


def test_doctor_fails_when_a_check_does(monkeypatch, capsys):
    from gigagrad.reports import doctor

    monkeypatch.setattr(doctor, "CHECKS", {"Python": doctor.CHECKS["Python"]})
    monkeypatch.setattr(doctor, "EXTRAS", {})
    assert main(["doctor"]) == 0
    assert "Python" in capsys.readouterr().out
    broken = ("failed", "lacks JPEG", "reinstall imagecodecs")
    monkeypatch.setattr(doctor, "CHECKS", {"Codecs": lambda folder: broken})
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "gigagrad: error: Codecs: lacks JPEG; reinstall imagecodecs\n"


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, jpeg_slide):
    from gigagrad.cohorts import slides

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(slides, "label_slides", interrupted)
    assert main(["label", str(jpeg_slide), "--out", "masks"]) == 130
    assert capsys.readouterr().err == (
        "gigagrad: interrupted; give the same command again to go on from what is finished\n"
    )


def test_our_own_faults_are_one_line_too_and_traceback_shows_where(monkeypatch, capsys, jpeg_slide):
    from gigagrad.cohorts import slides

    def broken(*args, **settings):
        raise AssertionError("two\nlines")

    monkeypatch.setattr(slides, "label_slides", broken)
    command = ["label", str(jpeg_slide), "--out", "masks"]
    assert main(command) == 1
    assert len(lines(capsys.readouterr().err)) == 1
    with pytest.raises(AssertionError):
        main(["--traceback", *command])


def test_a_guessed_resolution_is_one_line_of_warning(tmp_path, capsys):
    """Only an Aperio description names the objective and nothing else."""
    slide = tmp_path / "guess.svs"
    tifffile.imwrite(
        slide,
        np.full((256, 256, 3), 200, np.uint8),
        tile=(128, 128),
        photometric="rgb",
        description="Aperio Image Library v1\n256x256 |AppMag = 20",
        metadata=None,
    )
    assert main(["label", str(slide), "--out", str(tmp_path / "masks")]) == 0
    out, err = capsys.readouterr()
    assert len(lines(err)) == 1
    assert err.startswith("gigagrad: warning: guess")
    assert "10 / its 20x objective" in err
    assert "warning" not in out


@pytest.fixture
def stranger_s(tmp_path, monkeypatch):
    """A saved model that names code to run, and a settings file that does."""
    monkeypatch.chdir(tmp_path)
    probe = "subprocess:getoutput?cmd=touch+ran"
    payload = {"format": "gigagrad model", "version": 1, "spec": probe, "state_dict": {}}
    torch.save(payload, tmp_path / "best.pt")
    (tmp_path / "run.yaml").write_text(f"slides: cohort.csv\nout: run\nmodel: {probe}\n")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def test_no_command_runs_what_a_file_names(stranger_s, cohort, capsys):
    commands = [
        ["predict", "--run", "best.pt", "--slides", str(cohort), "--out", "out"],
        ["predict", "--run", str(stranger_s), "--slides", str(cohort), "--out", "out"],
        ["evaluate", "--run", "best.pt", "--slides", str(cohort)],
        ["fit", "--config", "run.yaml"],
    ]
    for command in commands:
        assert main(command) == 2
        (line,) = lines(capsys.readouterr().err)
        assert "asks to import 'subprocess:getoutput'" in line
        assert "--trust subprocess:getoutput" in line
        assert main([*command, "--trust", "subprocess:getoutput"]) == 2
        assert "it was not called" in capsys.readouterr().err


def test_a_class_of_one_s_own_is_loaded_when_it_is_named(cohort, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_of_test_cli.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Conv2d):\n"
        "    def __init__(self):\n"
        "        super().__init__(3, 1, 1)\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.float())\n"
    )
    save_model(tmp_path / "best.pt", "nets_of_test_cli:Net", torch.nn.Conv2d(3, 1, 1))
    command = ["predict", "--run", "best.pt", "--slides", str(cohort), "--out", "out"]
    assert main(command) == 2
    assert "nets_of_test_cli" not in sys.modules
    assert main([*command, "--trust", "other:Net", "--trust", "nets_of_test_cli:Net"]) == 0
    assert (tmp_path / "out" / "masks" / "small.tif").exists()
    capsys.readouterr()
    assert main([*command, "--trust", "nets_of_test_cli"]) == 2
    assert "expected package.module:class" in capsys.readouterr().err


def test_a_message_cannot_steer_the_terminal(tmp_path, capsys):
    assert main(["evaluate", "--run", "x", "--slides", f"{tmp_path}/a\x1b[2Jb\x07.csv"]) == 2
    assert "a?[2Jb?.csv" in capsys.readouterr().err


def test_resolutions_of_slides_and_of_patches_are_told_apart():
    for command in ("predict", "embed"):
        words = {action.dest: action.help for action in subcommands()[command]._actions}
        assert "of level 0" in words["mpp"]
        assert "of the patches" in words["patch_mpp"]


@pytest.mark.parametrize(
    ("command", "settings"), [("fit", FitConfig), ("predict", PredictConfig), ("embed", EmbedConfig)]
)
def test_the_flags_of_a_command_are_its_settings_and_their_defaults_stand_there(command, settings):
    flags = {action.dest: action for action in subcommands()[command]._actions}
    fields = {field.name for field in dataclasses.fields(settings)}
    assert flags.keys() - {"help", "config", "folds"} - ({"trust", "overwrite"} - fields) == fields
    assert {action.default for name, action in flags.items() if name in fields} == {argparse.SUPPRESS}
