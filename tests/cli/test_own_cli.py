"""The commands for your own images, and every command of the tutorial."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from tests.helpers.command import completed, started
from tests.helpers.folders import write_digits
from tests.helpers.runs import wait_until_told

from geodl.app.classifier import IncrementalClassifier
from geodl.cli import app
from geodl.core.errors import ConfigError, DataError, Interrupted, StoreError
from geodl.core.events import StepTaken

DOCS = Path(__file__).parents[2] / "docs" / "own-images.md"
QUICK = ("--epochs", "2", "--threads", "1")


@pytest.fixture(scope="module")
def root(tmp_path_factory, digits):
    """A folder with images of two weeks, test images, and a model of the first week."""
    root = tmp_path_factory.mktemp("own")
    name = "[red]{}"
    write_digits(root / "week1", digits, (0, 1), 12, name=name)
    write_digits(root / "week2", digits, (2, 3), 12, name=name)
    write_digits(root / "test", digits, range(4), 5, start=20, name=name)
    IncrementalClassifier(root / "base").learn(root / "week1", epochs=2, threads=1)
    return root


@pytest.fixture
def typed(typed, root, monkeypatch):
    """Return a function that runs one command in the folder of images."""
    monkeypatch.chdir(root)
    return typed


@pytest.fixture
def model(root, tmp_path):
    return str(shutil.copytree(root / "base", tmp_path / "model"))


def test_learn_prints_what_it_read_chose_and_reached(typed, tmp_path):
    path = str(tmp_path / "model")
    out = typed("learn", path, "week1", *QUICK).out
    assert "week1: 24 images of 2 classes, typically 8 pixels a side" in out
    assert re.search(r"--epochs +2 +as you set it", out)
    assert re.search(r"--batch-size +32 +images a training step", out)
    assert "at most 60 images, 11.5 kB for 2 classes" in out
    assert "step 1 learned from 20 images; new: [red]0, [red]1" in out
    measured = r"accuracy \d+\.\d % \(95 % interval \d+\.\d to \d+\.\d\)"
    assert re.search(rf"^{measured} on 4 validation images of 2 classes$", out, re.M)
    assert "24 images, 4.6 kB" in out
    again = typed("learn", path, "week1", *QUICK).out
    assert again.startswith("already learned: ")
    assert "--again" in again
    out = typed("learn", path, "week2", *QUICK).out
    assert re.search(
        r"of 4 classes: \d+\.\d % on the classes known before, \d+\.\d % on the new ones", out
    )
    again = json.loads(typed("learn", path, "week2", "--again", "--json", *QUICK).out)
    assert (again["returning"], again["already"]) == (["[red]2", "[red]3"], False)


def test_options_reach_the_step(typed, tmp_path):
    model = tmp_path / "model"
    with pytest.raises(ConfigError, match="epochs = 0"):
        typed("learn", model, "week1", "--epochs", "0")
    options = "--backbone convnet --image-size 12 --flip".split()
    out = typed("learn", model, "week1", *options, *QUICK).out
    assert re.search(
        r"--method +lucir +trained, with geodesic distillation, since --network is set", out
    )
    assert re.search(r"--backbone +convnet +as you set it", out)
    assert re.search(r"--image-size +12 x 12 pixels +as you set it", out)
    assert re.search(r"--flip +yes +as you set it", out)
    out = typed("learn", model, "week2", "--no-flip", *QUICK).out
    assert re.search(r"--backbone +convnet +as this model was made", out)
    assert re.search(r"--flip +no +as you set it", out)


def test_skipped_files_are_listed(typed, tmp_path, root):
    week = shutil.copytree(root / "week1", tmp_path / "week")
    (week / "[red]0" / "notes [b].txt").write_text("no")
    out = typed("learn", tmp_path / "model", week, *QUICK).out
    assert "skipped: 1\n  [red]0/notes [b].txt: not an image" in out
    with pytest.raises(DataError, match=r"notes \[b\]\.txt: not an image"):
        typed("learn", tmp_path / "other", week, "--strict")


def test_a_removed_class_that_returns_counts_all_its_images(typed, model):
    before = json.loads(typed("info", model, "--json").out)["classes"]
    typed("remove", model, before[1]["name"])
    typed("learn", model, "week1", "--quiet", *QUICK)
    after = json.loads(typed("info", model, "--json").out)["classes"]
    counts = [{known["name"]: known["images"] for known in classes} for classes in (before, after)]
    assert counts[0] == counts[1]


def test_predict_prints_a_table_csv_or_json(typed, model):
    table = typed("predict", model, "test/[red]0", "nowhere.png", "--top", "2")
    assert len(table.out.splitlines()) == 6
    assert "next likeliest" in table.out
    assert "[red]" in table.out
    assert "nowhere.png: no such file or folder" in table.err
    assert re.search(r"5 images, \d+ images/s", table.err)
    for top in ("2", "9"):  # more than there are classes
        out = typed("predict", model, "test", "--csv", "--top", top).out
        header, *rows = csv.reader(io.StringIO(out))
        assert header == ["image", "label", "confidence", "nearest", "label 2", "confidence 2"]
        assert [len(row) for row in rows] == [6] * 20
    found = json.loads(
        typed("predict", model, "test", "missing", "--json", "--classifier", "cnn").out
    )
    assert [image["name"] for image in found["predictions"]] == [row[0] for row in rows]
    assert found["skipped"] == [{"name": "missing", "reason": "no such file or folder"}]
    assert all(0 < image["confidence"] <= 1 for image in found["predictions"])
    with pytest.raises(DataError, match="no image could be read"):
        typed("predict", model, "nowhere.png")


def test_predict_sorts_the_least_certain_first(typed, model):
    def margins(*options):
        found = json.loads(typed("predict", model, "test", "--json", "--top", "2", *options).out)
        top = [image["top"] for image in found["predictions"]]
        return [first["confidence"] - second["confidence"] for first, second in top]

    assert margins("--sort") == sorted(margins()) != margins()


def test_evaluate(typed, model, tmp_path):
    out = typed("evaluate", model, "test").out
    assert "[red]2: the model does not know this class" in out
    assert re.search(r"accuracy: \d+\.\d % of 10 images", out)
    assert re.search(r"classes learned in step 1: \d+\.\d %", out)
    found = json.loads(typed("evaluate", model, "test", "--json").out)
    assert found["images"] == sum(map(sum, found["confusion"])) == 10
    (tmp_path / "test" / "[red]0").mkdir(parents=True)
    whole = next(Path("test/[red]0").iterdir()).read_bytes()
    (tmp_path / "test" / "[red]0" / "cut.png").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"no image could be read, such as \[red\]0/cut\.png"):
        typed("evaluate", model, tmp_path / "test")


def test_info_undo_rename_remove(typed, model):
    out = typed("info", model).out
    assert "2 classes, learned in 1 step\n" in out
    assert re.search(
        r"step 1: learning \[red\]0, \[red\]1 \(20 images\); accuracy .+ % on the validation images of 2 classes",
        out,
    )
    assert re.search(r"\[red\]0 +1 +\d{4}-\d\d-\d\d \d\d:\d\d +12 +10 +2", out)
    budget = "memory budget: 20 a class and up to 10 validation images a class"
    assert f"stored images: 24, 4.6 kB ({budget})" in out
    listed = typed("info", model, "--images").out
    use = "kept to (learn from again|measure the accuracy)"
    assert len(re.findall(rf"^  \[red\]\d/\d+\.png \(\[red\]\d\): {use}$", listed, re.M)) == 24
    assert len(json.loads(typed("info", model, "--json").out)["stored"]) == 24
    assert typed("rename", model, "[red]1", "one").out == "[red]1 is now called one\n"
    assert typed("undo", model).out.startswith("undone: renaming [red]1 to one; ")
    removed = typed("remove", model, "[red]0").out
    assert removed.startswith("[red]0 is removed; `geodl undo` restores it")
    assert typed("undo", model).out.startswith("undone: removing [red]0; ")
    step = "step 1: learning [red]0, [red]1 (20 images); "
    assert typed("undo", model).out.startswith(f"undone: {step}")
    assert typed("redo", model).out.startswith(f"restored: {step.removesuffix('; ')}")
    for command in ("show", "rm"):
        with pytest.raises(StoreError, match="directory of a model, not of a run; `geodl info "):
            typed("runs", command, model)


def test_json_of_a_path_that_is_not_text(root, tmp_path):
    path = tmp_path / os.fsdecode(b"m\xff")
    try:
        shutil.copytree(root / "base", path)
    except OSError:
        pytest.skip("this file system has only names that are text")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    done = completed("info", path, "--json", environment=strict)
    assert json.loads(done.stdout)["model"] == str(path)


def test_an_interrupted_step_is_reported_until_a_change_discards_it(typed, model, root):
    events = []
    with pytest.raises(Interrupted):
        IncrementalClassifier(model).learn(
            root / "week2",
            epochs=3,
            threads=1,
            listener=events.append,
            stop=lambda: any(isinstance(event, StepTaken) for event in events),
        )
    reported = "a learn step was interrupted; the same learn command resumes it"
    assert reported in typed("info", model).out
    assert "is discarded" in typed("rename", model, "[red]0", "zero").out
    assert reported not in typed("info", model).out
    assert "discarded" not in typed("undo", model).out


def test_after_a_kill_the_same_command_resumes(typed, model, root):
    words = ("learn", model, "week2", "--epochs", "80", "--threads", "1")
    process = started(*words, cwd=root)
    wait_until_told(Path(model), '(?s)("kind": "epoch".*){7}', process)  # two of the first step
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert IncrementalClassifier(model).classes == ("[red]0", "[red]1")
    assert "step 2 learned" in typed(*words).out
    assert len(IncrementalClassifier(model).classes) == 4


def test_predicting_loads_nothing_that_trains(model, root):
    code = (
        "import sys, geodl.cli.own\n"
        f"geodl.cli.own.predict({model!r}, ['test'], as_csv=True)\n"
        "print([m for m in ('lightning_fabric', 'matplotlib') if m in sys.modules])"
    )
    *predicted, modules = completed(code=code, cwd=root).stdout.splitlines()
    assert len(predicted) == 21
    assert modules == "[]"


# ---------------------------------------------------------------------------------------------------------- tutorial


MANY = "## Many classes"  # needs Omniglot, and a minute
IMAGES = "## Images to try it with"  # writes digits, which the other sections use as photographs


def walk_through(sections):
    """Run every block of some sections of the tutorial; return the commands."""
    ran, names = [], {}
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", "".join(sections), re.M | re.S):
        if kind == "python":
            exec(compile(text, str(DOCS), "exec"), names)
        if kind in ("python", "text"):
            continue
        assert kind == "console"
        for line in text.splitlines():
            words = shlex.split(line)
            assert words[0] == "geodl"
            app(words[1:], exit_on_error=False, print_error=False)
            ran.append(words[1])
    return ran


def sections():
    """Return the sections, the one that writes the images first."""
    found = re.split(r"^(?=## )", DOCS.read_text(), flags=re.M)
    return sorted(found, key=lambda section: not section.startswith(IMAGES))


def test_every_command_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    monkeypatch.chdir(tmp_path)
    ran = walk_through(section for section in sections() if not section.startswith(MANY))
    assert set(ran) == set(
        "learn predict evaluate info undo redo rename remove report export".split()
    )
    out = capsys.readouterr().out
    assert "step 2 learned" in out
    assert "known before: digit 1" in out
    accuracy = float(re.findall(r"^(\d+\.\d+)$", out, re.M)[-1])  # printed by the last block
    assert accuracy > 80
    assert re.search(
        r"trained\.onnx: 6 classes, [\d.]+ kB; differs from the model by .* at most on \d+ kept images",
        out,
    )
    assert Path("trained.onnx").exists()


@pytest.mark.slow
def test_the_tutorials_many_classes(tmp_path, monkeypatch, capsys, omniglot):
    monkeypatch.chdir(tmp_path)
    data = Path(os.environ.get("GEODL_DATA") or Path(__file__).parents[3] / "shared" / "data")
    monkeypatch.setenv("GEODL_DATA", str(data))
    ran = walk_through(section for section in sections() if section.startswith(MANY))
    assert ran == "learn learn info".split()
    assert "letters: 30 classes, learned in 2 steps" in capsys.readouterr().out
    assert IncrementalClassifier("letters").info()["accuracy"] > 50  # chance is 3
