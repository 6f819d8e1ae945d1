"""The command line as a person meets it: help, errors, results, stopping."""

import importlib.metadata
import json
import os
import re
import signal
import statistics
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.command import completed, geodl, started
from tests.helpers.runs import wait_until_told

from geodl.cli import COMMANDS
from geodl.cli.display import Stopper, console
from geodl.cli.grids import Watch
from geodl.core.devices import choose_precision
from geodl.core.errors import DISTRIBUTION
from geodl.core.events import PhaseStarted, StageStarted

ROOT = Path(__file__).parents[2]
TINY = "--preset digits --network convnet --base 6 --phases 2 --base-epochs 1 --epochs 1 --no-cache".split()
RUN = ["run", *TINY, *"--method lucir --distill geodesic --ame".split()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Give a folder in which one run is complete."""
    folder = tmp_path_factory.mktemp("finished")
    geodl(*RUN, cwd=folder)
    return folder


def test_help_and_version_load_no_torch():
    script = "import sys; sys.argv = ['geodl', sys.argv[1]]\nfrom geodl.cli import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    for flag in ("--help", "--version"):
        completed(flag, code=script)
    completed(
        code="import sys, geodl; assert 'torch' not in sys.modules; geodl.GeodesicDistillation"
    )


def test_every_command_s_help_has_a_sentence_and_an_example():
    overview = geodl("--help").stdout
    for command in COMMANDS:
        assert command.name.split()[0] in overview
        assert command.text.endswith(".")
        assert command.example.startswith(command.name)
    shown = " ".join(geodl("run", "--help").stdout.split())
    assert "Example: geodl run --preset digits" in shown
    for group in (
        "Method",
        "Data",
        "Network",
        "Training",
        "Images",
        "Memory",
        "Evaluation",
        "Machine",
    ):
        assert f"─ {group} ─" in shown
    assert "default: none; bic: lwf; icarl: lwf; lucir: cosine" in re.sub(
        r" *│ *", " ", shown
    ).replace("  ", " ")


def test_help_says_more_than_the_list_of_commands():
    overview = geodl("--help").stdout
    for name, first, more in (
        (
            "predict",
            '"unknown" for an image',
            "in closed form at a temperature fitted to learned images",
        ),
        (
            "serve",
            "Serve a model as a web page",
            "Only this machine can reach it unless --host says otherwise.",
        ),
    ):
        shown = " ".join(geodl(name, "--help").stdout.split())
        assert first in shown
        assert more in shown
        assert more[:20] not in overview
    assert "beyond (the closed form over given weights)" in " ".join(
        geodl("reproduce", "--help").stdout.split()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # What is wrong with values is tested beside their options.
        (["run", "--epoch", "3"], "Unknown option: --epoch. Did you mean --epochs?"),
        (["run", "--lr", "inf"], "lr = 'inf' (command line): input should be a finite number"),
        (["run", "--distill", "cosine", "--subspace-dim", "9"], "distillation geodesic, not with"),
        (["run", "--preset", "digits", "--base", "10"], "base = 10: allowed values are 0 to 9"),
        (["run", "--preset", "digits", "--groups", "8,8"], "groups = [8, 8]"),
        (["run", "--data", "cifar100", "--data-dir", "nowhere"], "nowhere"),
        (["run", "--accelerator", "cuda"], "accelerator = 'cuda': torch finds no CUDA device here"),
        (["runs", "show", "nowhere"], "nowhere: no such directory"),
        (["compare", "lucir", "--method", "bic"], "METHOD+DISTILLATION, not by --method"),
        (["rnu"], "rnu: no such command; did you mean run?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    done = geodl(*arguments, cwd=tmp_path, status=2)
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("geodl: ")
    assert message in lines[0]


def test_a_run_says_what_it_learns_how_good_it_is_and_where_it_lies(finished):
    again = geodl(*RUN, cwd=finished).stdout
    assert "already complete" in again
    assert "10 classes, learned as 6 + 2 + 2" in again
    assert re.search(r"k-NME +\d+\.\d +\d+\.\d +-?\d+\.\d", again)
    assert "AME (oracle)" in again
    (run,) = (finished / "runs").iterdir()
    assert f"run directory: runs/{run.name}, its report: runs/{run.name}/report.html" in again
    assert (run / "report.html").exists()


def test_equal_methods_are_compared_once_and_names_are_shown_as_they_are(tmp_path):
    pixels, labels = np.zeros((24, 8, 8), np.uint8), np.repeat(["a [old]", "b [/b]", "c"], 8)
    pixels[labels == "c"] = 200
    np.savez(tmp_path / "own.npz", x=pixels, y=labels)
    options = (
        "--data arrays --data-dir own.npz --network convnet --epochs 1 --base 2 --phases 1".split()
    )
    said = geodl("compare", "lucir", "lucir+cosine", *options, "--no-cache", cwd=tmp_path).stdout
    assert said.count("run directory") == 1
    assert "a [old]" in said
    assert "b [/b]" in said


def test_several_seeds_are_shown_as_mean_and_deviation(tmp_path):
    order = ("compare", "lucir", "finetune", *TINY, "--ame", "--seed", "1,2")
    found = json.loads(geodl(*order, "--json", cwd=tmp_path).stdout)
    assert len(found) == 4
    said = geodl(*order, cwd=tmp_path).stdout
    assert said.count("run directory") == 4
    assert "standard deviation of 2 seeds" in said
    shown = said[said.rindex("classifier ") :]
    for method, name in (("lucir", "LUCIR"), ("finetune", "CE")):
        both = [each["results"]["cnn"] for path, each in found.items() if f"-{method}-" in path]
        mean, deviation = (
            round(of([each["final"] for each in both]), 1)
            for of in (statistics.fmean, statistics.stdev)
        )
        row = next(line for line in shown.splitlines() if line.strip().startswith(name))
        assert f"{mean} ± {deviation}" in row
    # The same classifiers as a single run has.
    assert shown.count("AME (oracle)") == shown.count("NCM (SDC)") == 2


def test_json_is_for_programs(finished):
    done = geodl(*RUN, "--json", cwd=finished)
    result = json.loads(done.stdout)
    assert len(result["results"]["nme"]["accuracy"]) == 3
    listed = json.loads(geodl("runs", "list", "--json", cwd=finished).stdout)
    assert [run["state"] for run in listed] == ["complete"]
    shown = json.loads(
        geodl("config", "show", "--preset", "digits", "--method", "lwf", "--json").stdout
    )
    assert shown["distill"] == {"value": "lwf", "origin": "default of lwf"}
    assert shown["network"] == {"value": "resnet8", "origin": "preset digits"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEODL_DATA", str(finished))
        facts = json.loads(geodl("doctor", "--json").stdout)
    assert set(facts) == {"versions", "machine", "extras", "data"}
    assert facts["machine"]["precision auto"].split(":")[0] == choose_precision("auto", "cpu")
    installed = any(importlib.metadata.distributions(name=DISTRIBUTION))  # or run from its source
    assert ({"parquet", "onnx", "timm", "serve"} <= set(facts["extras"])) == installed
    assert facts["data"]["found"] == f"digits (embedded); in {finished}: runs"
    methods = json.loads(geodl("methods", "--json").stdout)
    assert methods["lucir"]["defaults"]["margin"] == 0.5


def test_runs_are_listed_shown_and_removed(finished, tmp_path):
    (run,) = (finished / "runs").iterdir()
    assert run.name in geodl("runs", cwd=finished).stdout.replace("\n", "")
    assert run.name in geodl("runs", "list", cwd=finished).stdout.replace("\n", "")
    shown = geodl("runs", "show", f"runs/{run.name}", cwd=finished).stdout
    assert re.search(r"NCM \(SDC\) +\d+\.\d +\d+\.\d +-?\d+\.\d", shown)
    facts = json.loads(geodl("runs", "show", f"runs/{run.name}", "--json", cwd=finished).stdout)
    assert facts["accuracy"]["nme"] == facts["results"]["nme"]["accuracy"][-1]
    assert geodl("runs", "list", ".", cwd=run).stdout.count(" complete ") == 1  # its own directory
    assert "no runs in" in geodl("runs", "list", cwd=tmp_path).stdout


def test_presets_and_methods_are_listed():
    listed = geodl("config", "presets").stdout
    assert "cifar100-cpu" in listed
    assert "digits" in listed
    assert "Rebalancing, CVPR 2019" in geodl("methods").stdout


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch):
    geodl("run", *TINY[:-1], "--method", "finetune", cwd=tmp_path)
    assert not geodl("cache", "show").stdout.endswith(" 0 bytes\n")
    geodl("cache", "clear")
    assert geodl("cache", "show").stdout.endswith(" 0 bytes\n")


def test_ctrl_c_stops_after_the_step_and_the_same_command_continues(tmp_path):
    command = ["run", *TINY[:-3], "--epochs", "200", "--no-cache", "--out", "r"]
    process = started(*command, cwd=tmp_path)
    wait_until_told(tmp_path / "r", '"kind": "epoch".*"phase": 1', process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(
        r"geodl: stopped in phase 1, epoch \d+, step \d+; progress is saved; the same command continues",
        said,
    )
    assert "Traceback" not in said
    state = json.loads(geodl("runs", "list", "--json", ".", cwd=tmp_path).stdout)
    assert state[0]["state"] == "interrupted"
    assert "\nphase 1, interrupted: " in geodl("runs", "show", "r", cwd=tmp_path).stdout
    process = started(*command, cwd=tmp_path, stderr=None)
    assert process.stdout is not None
    assert any("resuming with epoch" in line for line in process.stdout)
    process.kill()
    process.communicate()


def test_the_epoch_a_run_goes_on_with_is_said():
    with console.capture() as said:
        Watch("run")(StageStarted(phase=0, stage="train", epochs=16, steps=9, epoch=0))
        Watch("run")(StageStarted(phase=0, stage="train", epochs=16, steps=9, epoch=2))
    assert said.get() == "    resuming with epoch 3 of 16\n"


def test_names_are_never_markup(tmp_path):
    assert "no runs in [/x]" in geodl("runs", "list", "[/x]", cwd=tmp_path).stdout
    (tmp_path / "[red].toml").write_text("seed = 3")
    shown = geodl(
        "config", "show", "--data-dir", "[/x]", "--config", "[red].toml", cwd=tmp_path
    ).stdout
    assert '"[/x]"' in shown
    assert "[red].toml" in shown
    with console.capture() as said:
        Watch("run")(PhaseStarted(phase=1, classes=["[bold]", "cat [copy]"], images=3))
    assert "[bold], cat [copy] (3 images)" in said.get()


def test_a_second_ctrl_c_leaves_at_once():
    stopper, before = Stopper(), signal.getsignal(signal.SIGINT)
    with redirect_stderr(StringIO()), stopper.watching():
        assert not stopper()
        signal.raise_signal(signal.SIGINT)
        assert stopper()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    # Before anybody has asked there is nothing to save.
    with redirect_stderr(StringIO()), Stopper().watching(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_on_a_terminal_a_bar_shows_the_time_left(tmp_path):
    master, slave = pytest.importorskip("pty").openpty()  # Windows has none
    terminal = {"TERM": "xterm", "COLUMNS": "120"}
    words = ("run", *TINY, "--out", "r")
    process = started(*words, cwd=tmp_path, environment=terminal, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert process.wait(60) == 0
    text = seen.decode()
    assert "images/s" in text
    assert re.search(r"\d+%", text)
    assert re.search(r"\d:\d\d(\x1b\[[\d;]*m)? left", text)
