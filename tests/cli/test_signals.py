"""Signals, closed pipes and warnings in real processes; skipped files; odd option files."""

import signal
from pathlib import Path

import pytest
from tests.helpers.command import completed, started
from tests.helpers.folders import write_digits
from tests.helpers.runs import wait_until_told

from geodl.app.classifier import IncrementalClassifier
from geodl.cli.own_display import print_skipped
from geodl.config.layers import TOML_LIMIT, file_layers
from geodl.core.errors import ConfigError
from geodl.methods import configure


def test_a_training_that_is_terminated_saves_its_progress(tmp_path, digits):
    week = write_digits(tmp_path / "week", digits, (0, 1), 12)
    options = "--backbone convnet --epochs 100000 --threads 1".split()
    process = started("learn", tmp_path / "model", week, *options)
    wait_until_told(tmp_path / "model", '"kind": "epoch"', process)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 143, (out, errors)
    assert "the same command resumes" in errors
    assert "Traceback" not in errors
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
    ("words", "number", "status", "word"),
    [
        ("learn model .", signal.SIGTERM, 143, "terminated"),
        ("run --preset digits --quiet", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_before_training_a_signal_ends_it_with_one_line(tmp_path, words, number, status, word):
    process = started(*words.split(), code=WAITING, cwd=tmp_path)
    assert process.stdout.readline() == "reading\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors == f"geodl: {word}; completed work is kept\n"


def test_a_closed_pipe_is_no_error():
    with started("methods") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_warnings_of_libraries_are_not_printed():
    code = (
        "import warnings\nfrom geodl.cli import installation, main\n"
        "installation.show_presets = lambda: warnings.warn('from a library')\n"
        "main(['config', 'presets'])"
    )
    assert completed(code=code).stderr == ""


def test_very_many_skipped_files_are_summarized(capsys):
    print_skipped(
        [(f"{i}.png", "not an image" if i % 4 else "the file is empty") for i in range(100_000)]
    )
    first, *_, last = lines = capsys.readouterr().out.splitlines()
    assert first == "skipped: 100000; 75000 times: not an image; 25000 times: the file is empty"
    assert len(lines) == 22
    assert last == "  and 99980 more lines (--json lists all)"


def test_skipped_files_of_a_folder_with_the_same_reason_share_a_line(capsys):
    known = [(f"rose/{i}.jpg", "known as another class") for i in range(9)]
    print_skipped([*known, ("rose/a.txt", "not an image"), ("b.txt", "not an image")])
    assert capsys.readouterr().out == (
        "skipped: 11\n  rose (9 files): known as another class\n"
        "  rose/a.txt: not an image\n  b.txt: not an image\n  (--json lists all)\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = " + "[" * 100_000, "too deep"),
        ('"a\\nb\\u001b" = 1', "no such option"),
        ('epochs = "' + "y" * 100_000 + '"', r"epochs = 'y+\.\.\."),
        ("#" * (TOML_LIMIT + 1), "is too large"),
    ],
)
def test_odd_toml_is_one_clean_line(tmp_path, content, message):
    file = tmp_path / "odd.toml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        configure(file_layers(file))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_device_is_not_read_for_ever():
    with pytest.raises(ConfigError, match="not a regular file"):
        file_layers(Path("/dev/zero"))
