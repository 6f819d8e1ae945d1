"""The commands for a user's own images, as typed; and every command of the tutorial."""

import csv
import io
import json
import os
import re
import shlex
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


@pytest.fixture(scope="module")
def root(tmp_path_factory, digits):
    root = tmp_path_factory.mktemp("own")
    name = "[red]{}"
    write_digits(root / "week1", digits, (0, 1), 12, name=name)
    write_digits(root / "week2", digits, (2, 3), 12, name=name)
    write_digits(root / "test", digits, range(4), 5, start=20, name=name)
    return root


@pytest.fixture
def typed(typed, root, monkeypatch):
    """Return what runs one command in the folder of images."""
    monkeypatch.chdir(root)
    return typed


QUICK = ("--epochs", "2", "--threads", "1")


@pytest.fixture
def model(typed, tmp_path):
    path = str(tmp_path / "model")
    typed("learn", path, "week1", *QUICK)
    return path


def test_learn_says_what_it_found_chose_and_reached(typed, tmp_path):
    path = str(tmp_path / "model")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    out = typed("learn", path, "week1", *QUICK).out
    assert "week1: 24 images of 2 classes, typically 8 pixels a side" in out
    assert re.search(r"--epochs +2 +as you set it", out)
    assert re.search(r"--batch-size +32 +images a training step", out)
    assert "at most 60 images, 11.5 kB for 2 classes" in out
    assert "step 1 learned from 20 images; new: [red]0, [red]1" in out
    assert re.search(
        r"^accuracy \d+\.\d % \(95 % interval \d+\.\d to \d+\.\d\) on 4 validation images of 2 classes$",
        out,
        re.M,
    )
    assert "24 images, 4.6 kB" in out
    again = typed("learn", path, "week1", *QUICK).out
    assert again.startswith("already learned: ")
    assert "--again" in again
    out = typed("learn", path, "week2", *QUICK).out
    assert re.search(
        r"of 4 classes: \d+\.\d % on the classes known before, \d+\.\d % on the new ones", out
    )
    assert not typed("learn", path, "week2", "--again", "--quiet", *QUICK).out.startswith("already")


def test_learn_as_json(typed, tmp_path):
    done = json.loads(typed("learn", str(tmp_path / "model"), "week1", "--json", *QUICK).out)
    assert done["new"] == ["[red]0", "[red]1"]
    assert done["already"] is False
    assert done["skipped"] == []


def test_learn_names_what_it_skips(typed, tmp_path, root):
    week = tmp_path / "week"
    for label in (0, 1):
        (week / str(label)).mkdir(parents=True)
        for file in (root / "week1" / f"[red]{label}").iterdir():
            (week / str(label) / file.name).write_bytes(file.read_bytes())
    (week / "0" / "notes [b].txt").write_text("no")
    out = typed("learn", str(tmp_path / "model"), str(week), *QUICK).out
    assert "skipped: 1\n  0/notes [b].txt: not an image" in out
    with pytest.raises(DataError, match=r"notes \[b\]\.txt: not an image"):
        typed("learn", str(tmp_path / "other"), str(week), "--strict")


def test_a_class_that_was_removed_and_comes_back_counts_all_its_images(typed, model):
    before = json.loads(typed("info", model, "--json").out)["classes"]
    typed("remove", model, before[1]["name"])
    typed("learn", model, "week1", "--quiet", *QUICK)
    after = json.loads(typed("info", model, "--json").out)["classes"]
    counts = [{each["name"]: each["images"] for each in classes} for classes in (before, after)]
    assert counts[0] == counts[1]


def test_predict_in_three_forms(typed, model):
    table = typed("predict", model, "test/[red]0", "nowhere.png", "--top", "2")
    assert len(table.out.splitlines()) == 6
    assert "next likeliest" in table.out
    assert "[red]" in table.out
    assert "nowhere.png: no such file or folder" in table.err
    assert re.search(r"5 images, \d+ images/s", table.err)
    rows = list(csv.reader(io.StringIO(typed("predict", model, "test", "--csv", "--top", "2").out)))
    assert rows[0] == ["image", "label", "confidence", "nearest", "label 2", "confidence 2"]
    assert len(rows) == 21
    found = json.loads(
        typed("predict", model, "test", "missing", "--json", "--classifier", "cnn").out
    )
    assert [entry["name"] for entry in found["predictions"]] == [row[0] for row in rows[1:]]
    assert found["skipped"] == [{"name": "missing", "reason": "no such file or folder"}]
    assert all(0 < entry["confidence"] <= 1 for entry in found["predictions"])
    with pytest.raises(DataError, match="no image could be read"):
        typed("predict", model, "nowhere.png")


def test_predict_sorts_the_least_sure_first(typed, model):
    words = ("predict", model, "test", "--json", "--top", "2")
    plain, found = (json.loads(typed(*words, *more).out) for more in ((), ("--sort",)))

    def margin(entry):
        first, second = (each["confidence"] for each in entry["top"])
        return first - second

    margins = [margin(entry) for entry in found["predictions"]]
    assert margins == sorted(map(margin, plain["predictions"]))
    assert margins != [margin(entry) for entry in plain["predictions"]]


def test_a_csv_has_as_many_columns_as_there_are_classes(typed, model):
    header, first, *_ = typed(
        "predict", model, "test/[red]0", "--csv", "--top", "9"
    ).out.splitlines()
    assert header.count(",") == first.count(",")


def test_a_model_is_no_run(typed, model):
    for command in ("show", "rm"):
        with pytest.raises(StoreError, match="directory of a model, not of a run; `geodl info "):
            typed("runs", command, model)


def test_when_no_image_can_be_read_that_is_said(typed, model, root, tmp_path):
    whole = next((root / "week1").rglob("*.png")).read_bytes()
    for name in ("[red]0", "[red]1"):
        (tmp_path / "test" / name).mkdir(parents=True)
        (tmp_path / "test" / name / "cut.png").write_bytes(whole[: -30 - int(name[-1])])
    with pytest.raises(DataError, match=r"no image could be read, such as \[red\]\d/cut\.png"):
        typed("evaluate", model, str(tmp_path / "test"))


def test_evaluate(typed, model):
    out = typed("evaluate", model, "test").out
    assert "[red]2: the model does not know this class" in out
    assert re.search(r"accuracy: \d+\.\d % of 10 images", out)
    assert re.search(r"classes learned in step 1: \d+\.\d %", out)
    found = json.loads(typed("evaluate", model, "test", "--json").out)
    assert found["images"] == sum(map(sum, found["confusion"])) == 10


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
    lines = re.findall(rf"^  \[red\]\d/\d+\.png \(\[red\]\d\): {use}$", listed, re.M)
    assert len(lines) == 24
    assert len(json.loads(typed("info", model, "--json").out)["stored"]) == 24
    assert typed("rename", model, "[red]1", "one").out == "[red]1 is now called one\n"
    assert typed("undo", model).out.startswith("undone: renaming [red]1 to one; ")
    typed("learn", model, "week2", *QUICK)
    removed = typed("remove", model, "[red]0").out
    assert removed.startswith("[red]0 is removed; `geodl undo` restores it")
    assert typed("undo", model).out.startswith("undone: removing [red]0; ")
    step = "step 2: learning [red]2, [red]3 (20 images); "
    assert typed("undo", model).out.startswith(f"undone: {step}")
    assert IncrementalClassifier(model).classes == ("[red]0", "[red]1")


def test_a_step_that_was_stopped_is_named_also_when_it_is_given_up(typed, model, root):
    heard = []
    with pytest.raises(Interrupted):
        IncrementalClassifier(model).learn(
            root / "week2",
            epochs=3,
            threads=1,
            listener=heard.append,
            stop=lambda: any(isinstance(event, StepTaken) for event in heard),
        )
    said = "a learn step was interrupted; the same learn command resumes it"
    assert said in typed("info", model).out
    assert "is given up" in typed("rename", model, "[red]0", "zero").out
    assert said not in typed("info", model).out
    assert "given up" not in typed("undo", model).out


def test_options_reach_the_step(typed, tmp_path):
    with pytest.raises(ConfigError, match="epochs = 0"):
        typed("learn", str(tmp_path / "m"), "week1", "--epochs", "0")
    out = typed(
        "learn",
        str(tmp_path / "m"),
        "week1",
        "--backbone",
        "convnet",
        "--image-size",
        "12",
        "--flip",
        *QUICK,
    ).out
    assert re.search(
        r"--method +lucir +trained, with geodesic distillation, since --network is set", out
    )
    assert re.search(r"--backbone +convnet +as you set it", out)
    assert re.search(r"--image-size +12 x 12 pixels +as you set it", out)
    assert re.search(r"--flip +yes +as you set it", out)
    later = typed("learn", str(tmp_path / "m"), "week2", *QUICK).out
    assert re.search(r"--backbone +convnet +as this model was made", later)


def test_killed_at_once_the_same_command_goes_on(typed, model, root, tmp_path):
    """Kill a real process in the middle of training; the model is as before, and the same command finishes the step."""
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
    """Start-up stays short: neither Lightning nor matplotlib is imported."""
    code = (
        "import sys, geodl.cli.own\n"
        f"geodl.cli.own.predict({model!r}, ['test'], as_csv=True)\n"
        "print([m for m in ('lightning_fabric', 'matplotlib') if m in sys.modules])"
    )
    *predicted, modules = completed(code=code, cwd=root).stdout.splitlines()
    assert len(predicted) == 21
    assert modules == "[]"


# ---------------------------------------------------------------------------------------------------------- tutorial


MANY = "## Many classes"  # needs data that are not everywhere, and a minute
IMAGES = "## Images to try it with"  # digits, which stand in for the photographs of the sections before and after it


def walk_through(sections):
    """Run every block of some sections of the tutorial; gives the commands that were run."""
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
