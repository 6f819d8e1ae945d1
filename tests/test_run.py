"""`geodl.run` from Python: the command's options, directory and result."""

import hashlib
from pathlib import Path

import pytest
from tests.test_cli import geodl as command

import geodl
from geodl.errors import ConfigError, StoreError
from geodl.events import RunEnded, RunStarted
from geodl.experiment import RunResult
from geodl.metrics import Trajectory
from geodl.store import RunDirectory

OPTIONS = {"network": "convnet", "base": 6, "phases": 2, "base_epochs": 1, "epochs": 1, "method": "lucir"}
FLAGS = [part for key, value in OPTIONS.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def files(run: Path) -> dict[str, str]:
    paths = [*run.glob("phases/*/*.safetensors"), *run.glob("phases/*/metrics.json")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Give a folder in which the command has run."""
    folder = tmp_path_factory.mktemp("finished")
    command("run", "--preset", "digits", *FLAGS, "--distill", "geodesic", "--no-cache", cwd=folder)
    return folder


def test_it_finds_the_commands_run_complete(finished, monkeypatch):
    monkeypatch.chdir(finished)
    heard = []
    found = geodl.run(preset="digits", distill="geodesic", cache=False, listener=heard.append, **OPTIONS)
    assert isinstance(found, RunResult)
    assert [path.resolve() for path in (finished / "runs").iterdir()] == [found.directory.resolve()]
    assert [type(event) for event in heard] == [RunStarted, RunEnded]
    assert heard[0].done == 3
    last = RunDirectory(found.directory).load_metrics(2)
    assert set(found.results) == set(last["accuracy"]) == {"cnn", "nme", "ncm"}
    for name, trajectory in found.results.items():
        assert isinstance(trajectory, Trajectory)
        assert len(trajectory.accuracy) == 3
        assert trajectory.accuracy[-1] == last["accuracy"][name]
        assert trajectory.average == pytest.approx(sum(trajectory.accuracy[1:]) / 2)


def test_it_computes_the_commands_bytes(finished, tmp_path):
    (theirs,) = (finished / "runs").iterdir()
    found = geodl.run(preset="digits", distill="geodesic", cache=False, out=tmp_path / "r", **OPTIONS)
    assert found.directory == tmp_path / "r"
    assert len(files(theirs)) == 9
    assert files(found.directory) == files(theirs)


def test_a_file_of_options_lies_between_preset_and_options(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished)
    lines = ['preset = "digits"', 'distill = "none"', *(f"{key} = {value!r}" for key, value in OPTIONS.items())]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    found = geodl.run(config=tmp_path / "own.toml", distill="geodesic")
    assert [path.resolve() for path in (finished / "runs").iterdir()] == [found.directory.resolve()]


def test_it_starts_over_only_when_asked(tmp_path):
    options = {"preset": "digits", "cache": False, "out": tmp_path / "r"} | OPTIONS
    first = files(geodl.run(**options).directory)
    with pytest.raises(StoreError, match="seed"):
        geodl.run(**options, seed=2)
    assert files(tmp_path / "r") == first
    geodl.run(**options, seed=2, fresh=True)
    assert files(tmp_path / "r") != first


def test_options_that_do_not_exist_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"epoch \(option\): no such option; did you mean epochs"):
        geodl.run(preset="digits", epoch=3)
    with pytest.raises(ConfigError, match="preset = 'letters'"):
        geodl.run(preset="letters")
    assert not list(tmp_path.iterdir())
