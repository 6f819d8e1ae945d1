"""Ctrl-C and SIGTERM in real processes; and messages that are one clean line."""

import json
import signal
from pathlib import Path

import pytest
from tests.helpers.command import started
from tests.helpers.runs import wait_until_told
from tests.helpers.tiny import dataset

from geodl.app.classifier import IncrementalClassifier
from geodl.cli import main
from geodl.cli.own_display import say_skipped
from geodl.config.layers import TOML_LIMIT, file_layers
from geodl.core.errors import ConfigError, DataError
from geodl.data import load
from geodl.methods import configure

QUICK = {"network": "convnet", "epochs": 1, "threads": 1, "workers": 1, "precision": "32"}


@pytest.fixture
def folder(tmp_path):
    data = dataset(classes=2, train=12)
    for i, label in enumerate(data.train.labels.tolist()):
        file = tmp_path / "images" / data.classes[label] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        data.train.decode(i).save(file)
    return tmp_path / "images"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_training_that_is_asked_to_stop_saves_and_says_so(folder, tmp_path, number, status):
    options = "--backbone convnet --epochs 100000 --threads 1".split()
    process = started("learn", tmp_path / "model", folder, *options)
    wait_until_told(tmp_path / "model", '"kind": "epoch"', process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, (out, err)
    assert "the same command resumes" in err
    assert "Traceback" not in err
    assert IncrementalClassifier(tmp_path / "model").unfinished


WAITING = """
import sys, time
from geodl.app.classifier import IncrementalClassifier
from geodl.cli import run
def wait(*arguments, **more):
    print("reading", flush=True)
    time.sleep(60)
IncrementalClassifier.learn = run.run_config = wait
from geodl.cli import main
main()
"""


@pytest.mark.parametrize(
    "words", [("learn", "model", "."), ("run", "--preset", "digits", "--quiet")]
)
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_before_training_it_leaves_at_once_with_a_sentence(
    tmp_path, monkeypatch, number, status, word, words
):
    monkeypatch.chdir(tmp_path)
    process = started(*words, code=WAITING)
    assert process.stdout.readline() == "reading\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err == f"geodl: {word}; what was complete before is kept\n"


def test_who_reads_the_first_lines_alone_spoils_nothing():
    with started("methods") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------------------------ skipped


def test_of_many_skipped_files_the_first_and_the_reasons_are_shown(capsys):
    say_skipped(
        [(f"{i}.png", "not an image" if i % 4 else "the file is empty") for i in range(100_000)]
    )
    out = capsys.readouterr().out
    assert out.startswith(
        "skipped: 100000; 75000 times: not an image; 25000 times: the file is empty\n"
    )
    assert len(out.splitlines()) == 22
    assert out.endswith("  and 99980 more lines (--json lists all)\n")


def test_many_files_of_a_folder_with_one_fault_share_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    known = [(f"rose/{i}.jpg", "known as another class") for i in range(9)]
    say_skipped([*known, ("rose/a.txt", "not an image"), ("b.txt", "not an image")])
    assert capsys.readouterr().out == (
        "skipped: 11\n  rose (9 files): known as another class\n"
        "  rose/a.txt: not an image\n  b.txt: not an image\n  (--json lists all)\n"
    )


# ----------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a = " + "[" * 100_000, "too deep"),
        ("a.b" + ".c" * 5000 + " = 1", r"such option|too deep"),
        ("x = " + "9" * 5000, "not TOML"),
        ('"a\\nb\\u001b" = 1', "no such option"),
        ('epochs = "' + "y" * 100_000 + '"', r"epochs = 'y+\.\.\."),
        ("preset = [" + "1," * 1000 + "]", "preset = "),
        ("#" * (TOML_LIMIT + 1), "is too large"),
        ("\udcff", "not TOML"),
    ],
)
def test_odd_toml_is_one_clean_line(tmp_path, content, said):
    file = tmp_path / "odd.toml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said) as caught:
        configure(file_layers(file))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_device_is_not_read_for_ever():
    with pytest.raises(ConfigError, match="not a regular file"):
        file_layers(Path("/dev/zero"))


def test_what_is_too_much_on_the_command_line_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["info", "model", "stray\x1b[31m"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("geodl: stray\\x1b[31m: too many arguments")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    ["info X", "predict X X", "evaluate X X", "learn model X", "report X", "export X a.onnx"],
)
def test_a_path_that_is_too_long_is_one_clean_line(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(words.replace("X", "y" * 2000).split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_damaged_parquet_is_one_clean_line(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    for part in ("train", "test"):
        (tmp_path / f"{part}-0.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(DataError) as caught:
        load("cifar100", tmp_path)
    assert str(caught.value).isprintable()


def test_warnings_of_pillow_are_not_printed(folder, tmp_path):
    from PIL import Image

    odd = Image.new("P", (8, 8))
    odd.info["transparency"] = b"\x00\x80"
    odd.save(tmp_path / "odd.png", transparency=b"\x00\x80")
    IncrementalClassifier(tmp_path / "model").learn(folder, **QUICK)
    code = (
        "import warnings, geodl.core.decoding as i\n"
        "real = i.upright_rgb\n"
        "i.upright_rgb = lambda *a: (warnings.warn('from pillow'), real(*a))[1]\n"
        "from geodl.cli import main; main()"
    )
    process = started("predict", tmp_path / "model", tmp_path / "odd.png", "--json", code=code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert len(json.loads(out)["predictions"]) == 1
