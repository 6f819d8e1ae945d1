"""The command line for experiments: help, errors, results, resuming."""

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
from tests.helpers.runs import DIGITS, wait_until_told

from geodl.cli import COMMANDS
from geodl.cli.display import Stopper
from geodl.core.devices import choose_precision
from geodl.core.errors import DISTRIBUTION

TINY = [*DIGITS, "--no-cache"]
RUN = ["run", *TINY, *"--method lucir --distill geodesic --ame".split()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with one complete run."""
    folder = tmp_path_factory.mktemp("finished")
    geodl(*RUN, cwd=folder)
    return folder


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_load_no_torch(flag):
    script = "import sys; sys.argv = ['geodl', sys.argv[1]]\nfrom geodl.cli import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    completed(flag, code=script)


def test_help():
    overview = geodl("--help").stdout
    for command in COMMANDS:
        assert command.name.split()[0] in overview
        assert command.text.endswith(".")
        assert command.example.startswith(command.name)
    shown = " ".join(geodl("run", "--help").stdout.split())
    assert "Example: geodl run --preset digits" in shown
    for group in "Method Data Network Training Images Memory Evaluation Machine".split():
        assert f"─ {group} ─" in shown
    assert "default: none; bic: lwf; icarl: lwf; lucir: cosine" in re.sub("[ │]+", " ", shown)
    # more than the overview
    shown = " ".join(geodl("serve", "--help").stdout.split())
    assert "Serve a model as a web page" in shown
    assert "Only this machine can reach it unless --host names another address." in shown
    assert "Only this machine" not in overview


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Wrong values are tested beside their options.
        ("run --epoch 3", "Unknown option: --epoch. Did you mean --epochs?"),
        ("run --lr inf", "lr = 'inf' (command line): input should be a finite number"),
        ("run --data cifar100 --data-dir nowhere", "nowhere"),
        ("runs show nowhere", "nowhere: no such directory"),
        ("compare lucir --method bic", "METHOD+DISTILLATION, not by --method"),
        ("rnu", 'Unknown command "rnu". Did you mean "run"?'),
        ("info model stray\x1b[31m", "stray\\x1b[31m: too many arguments"),
        *(
            (words.replace("X", "y" * 2000), "")
            for words in ("info X", "predict X X", "learn m X", "report X", "export X a.onnx")
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    done = geodl(*arguments.split(" "), cwd=tmp_path, status=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("geodl: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_a_run_prints_its_protocol_results_and_directory(finished):
    again = geodl(*RUN, cwd=finished).stdout
    assert "already complete" in again
    assert "10 classes, learned as 6 + 2 + 2" in again
    assert re.search(r"k-NME +\d+\.\d +\d+\.\d +-?\d+\.\d", again)
    assert "AME (oracle)" in again
    (run,) = (finished / "runs").iterdir()
    assert f"run directory: runs/{run.name}, its report: runs/{run.name}/report.html" in again
    assert (run / "report.html").exists()


def test_equal_methods_are_run_once_and_names_are_not_markup(tmp_path):
    pixels, labels = np.zeros((24, 8, 8), np.uint8), np.repeat(["a [old]", "b [/b]", "c"], 8)
    pixels[labels == "c"] = 200
    np.savez(tmp_path / "own.npz", x=pixels, y=labels)
    options = (
        "--data arrays --data-dir own.npz --network convnet --epochs 1 --base 2 --phases 1".split()
    )
    out = geodl("compare", "lucir", "lucir+cosine", *options, "--no-cache", cwd=tmp_path).stdout
    assert out.count("run directory") == 1
    assert "resuming" not in out
    assert "a [old]" in out
    assert "b [/b]" in out


def test_several_seeds_are_shown_as_mean_and_deviation(tmp_path):
    command = ("compare", "lucir", "finetune", *TINY, "--ame", "--seed", "1,2")
    found = json.loads(geodl(*command, "--json", cwd=tmp_path).stdout)
    assert len(found) == 4
    out = geodl(*command, cwd=tmp_path).stdout
    assert out.count("run directory") == 4
    assert "standard deviation of 2 seeds" in out
    shown = out[out.rindex("classifier ") :]
    for method, name in (("lucir", "LUCIR"), ("finetune", "CE")):
        runs = [run["results"]["cnn"] for path, run in found.items() if f"-{method}-" in path]
        final = [run["final"] for run in runs]
        row = next(line for line in shown.splitlines() if line.strip().startswith(name))
        assert f"{statistics.fmean(final):.1f} ± {statistics.stdev(final):.1f}" in row
    # the same classifiers as in a single run
    assert shown.count("AME (oracle)") == shown.count("NCM (SDC)") == 2


def test_json(finished, monkeypatch):
    result = json.loads(geodl(*RUN, "--json", cwd=finished).stdout)
    assert len(result["results"]["nme"]["accuracy"]) == 3
    runs = json.loads(geodl("runs", "list", "--json", cwd=finished).stdout)
    assert [run["state"] for run in runs] == ["complete"]
    options = json.loads(geodl(*"config show --preset digits --method lwf --json".split()).stdout)
    assert options["distill"] == {"value": "lwf", "origin": "default of lwf"}
    assert options["network"] == {"value": "resnet8", "origin": "preset digits"}
    monkeypatch.setenv("GEODL_DATA", str(finished))
    facts = json.loads(geodl("doctor", "--json").stdout)
    assert set(facts) == {"versions", "machine", "extras", "data"}
    assert facts["machine"]["precision auto"].split(":")[0] == choose_precision("auto", "cpu")
    installed = any(importlib.metadata.distributions(name=DISTRIBUTION))  # or run from source
    assert ({"parquet", "onnx", "timm", "serve"} <= set(facts["extras"])) == installed
    assert facts["data"]["found"] == f"digits (embedded); in {finished}: runs"
    methods = json.loads(geodl("methods", "--json").stdout)
    assert methods["lucir"]["defaults"]["margin"] == 0.5


def test_lists(finished, tmp_path):
    (run,) = (finished / "runs").iterdir()
    for command in (["runs"], ["runs", "list"]):
        assert run.name in geodl(*command, cwd=finished).stdout.replace("\n", "")
    assert geodl("runs", "list", ".", cwd=run).stdout.count(" complete ") == 1  # its own directory
    assert "no runs in [/x]" in geodl("runs", "list", "[/x]", cwd=tmp_path).stdout
    assert "cifar100-cpu" in geodl("config", "presets").stdout
    assert "Rebalancing, CVPR 2019" in geodl("methods").stdout


def test_a_run_is_shown(finished):
    (run,) = (finished / "runs").iterdir()
    shown = geodl("runs", "show", f"runs/{run.name}", cwd=finished).stdout
    assert re.search(r"NCM \(SDC\) +\d+\.\d +\d+\.\d +-?\d+\.\d", shown)
    facts = json.loads(geodl("runs", "show", f"runs/{run.name}", "--json", cwd=finished).stdout)
    assert facts["accuracy"]["nme"] == facts["results"]["nme"]["accuracy"][-1]


def test_the_cache_is_shown_and_cleared(tmp_path):
    geodl("run", *DIGITS, "--method", "finetune", cwd=tmp_path)
    assert not geodl("cache", "show").stdout.endswith(" 0 bytes\n")
    geodl("cache", "clear")
    assert geodl("cache", "show").stdout.endswith(" 0 bytes\n")


def test_ctrl_c_stops_after_the_step_and_the_same_command_resumes(tmp_path):
    command = ["run", *TINY[:-3], "--epochs", "200", "--no-cache", "--out", "r"]
    process = started(*command, cwd=tmp_path)
    wait_until_told(tmp_path / "r", '"kind": "epoch".*"phase": 1', process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"geodl: stopped in phase 1, epoch \d+, step \d+; progress is saved", errors)
    assert "Traceback" not in errors
    state = json.loads(geodl("runs", "list", "--json", ".", cwd=tmp_path).stdout)
    assert state[0]["state"] == "interrupted"
    assert "\nphase 1, interrupted: " in geodl("runs", "show", "r", cwd=tmp_path).stdout
    process = started(*command, cwd=tmp_path, stderr=None)
    assert process.stdout is not None
    assert any(re.search(r"resuming with epoch \d+ of 200", line) for line in process.stdout)
    process.kill()
    process.communicate()


def test_a_second_ctrl_c_quits_at_once():
    stopper, before = Stopper(), signal.getsignal(signal.SIGINT)
    with redirect_stderr(StringIO()), stopper.watching():
        assert not stopper()
        signal.raise_signal(signal.SIGINT)
        assert stopper()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    # so does the first one, as long as there is nothing to save
    with redirect_stderr(StringIO()), Stopper().watching(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path):
    master, slave = pytest.importorskip("pty").openpty()  # Windows has none
    terminal = {"TERM": "xterm", "COLUMNS": "120"}
    words = ("run", *TINY, "--out", "r")
    process = started(*words, cwd=tmp_path, environment=terminal, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(60) == 0
    text = seen.decode()
    assert "images/s" in text
    assert re.search(r"\d+%", text)
    assert re.search(r"\d:\d\d(\x1b\[[\d;]*m)? left", text)
