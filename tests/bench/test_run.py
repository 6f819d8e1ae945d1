"""`geodl.run` from Python: options, directory and result as of the command."""

from dataclasses import replace

import pytest
from tests.helpers import tiny
from tests.helpers.command import geodl as command
from tests.helpers.runs import DIGITS, QUICK, result_files

import geodl
from geodl.bench.experiment import RunResult, run_config, scenario_of
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError, StoreError
from geodl.core.events import Advised, RunEnded, RunStarted
from geodl.model.metrics import Trajectory
from geodl.store import Directory
from geodl.store.head import read_head, write_head

OPTIONS = QUICK | {"method": "lucir"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder in which the command has run."""
    folder = tmp_path_factory.mktemp("finished")
    command("run", *DIGITS, "--distill", "geodesic", "--no-cache", cwd=folder)
    return folder


def test_it_finds_the_run_of_the_command_complete(finished, tmp_path, monkeypatch):
    # The file of options wins over the preset that it names, and options over the file.
    values = {"preset": "digits", "distill": "none", **OPTIONS}
    lines = [f"{key} = {value!r}" for key, value in values.items()]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    monkeypatch.chdir(finished)
    events = []
    how = {"cache": False, "listener": events.append}
    found = geodl.run(config=tmp_path / "own.toml", distill="geodesic", **how)
    assert isinstance(found, RunResult)
    assert [path.resolve() for path in (finished / "runs").iterdir()] == [found.directory.resolve()]
    assert [type(event) for event in events] == [RunStarted, RunEnded]
    assert events[0].done == 3
    last = Directory(found.directory).phase(2).json("metrics.json")
    assert set(found.results) == set(last["accuracy"]) == {"cnn", "nme", "ncm"}
    for name, trajectory in found.results.items():
        assert isinstance(trajectory, Trajectory)
        assert len(trajectory.accuracy) == 3
        assert trajectory.accuracy[-1] == last["accuracy"][name]
        assert trajectory.average == pytest.approx(sum(trajectory.accuracy[1:]) / 2)


def test_it_computes_the_commands_bytes(finished, tmp_path):
    (theirs,) = (finished / "runs").iterdir()
    found = geodl.run(
        preset="digits", distill="geodesic", cache=False, out=tmp_path / "r", **OPTIONS
    )
    assert found.directory == tmp_path / "r"
    assert len(result_files(theirs)) == 9
    assert result_files(found.directory) == result_files(theirs)


def test_it_starts_over_only_on_request(tmp_path):
    options = {"preset": "digits", "cache": False, "out": tmp_path / "r"} | OPTIONS
    first = result_files(geodl.run(**options).directory)
    with pytest.raises(StoreError, match="seed"):
        geodl.run(**options, seed=2)
    assert result_files(tmp_path / "r") == first
    geodl.run(**options, seed=2, fresh=True)
    assert result_files(tmp_path / "r") != first


def test_options_that_do_not_exist_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"epoch = \d+ \(option\): .* did you mean epochs"):
        geodl.run(preset="digits", epoch=3)
    with pytest.raises(ConfigError, match="preset = 'letters'"):
        geodl.run(preset="letters")
    assert not list(tmp_path.iterdir())


def test_a_directory_of_an_earlier_version_has_the_defaults_of_newer_options(tmp_path):
    config, data = tiny.config(epochs=1), tiny.dataset()
    store = run_config(config, out=tmp_path, data=data)
    head = read_head(tmp_path)
    older = {key: head.record["config"][key] for key in head.record["config"] if key != "optimizer"}
    write_head(tmp_path, replace(head, record={**head.record, "config": older}))
    assert run_config(config, out=tmp_path, data=data).completed() == store.completed()
    other = tiny.config(epochs=1, optimizer="adamw")
    with pytest.raises(StoreError, match="optimizer"):
        run_config(other, out=tmp_path, data=data)
    # Nor does the name of a directory depend on options that are at their defaults.
    assert "optimizer" not in config.older(())
    assert config.older(()).keys() < config.identity().keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exemplars": 3, "memory_budget": "total"}, "exemplars = 3, memory_budget = total"),
        ({"exemplars": 0}, "exemplars = 0"),
        ({"exemplars": 4, "memory_budget": "total"}, ""),
        ({"exemplars": 0, "method": "joint"}, ""),
        ({"exemplars": 0, "method": "analytic", "expansion": 64}, ""),
    ],
)
def test_a_run_without_exemplars_of_a_class_warns_before_it_trains(tmp_path, options, words):
    heard = []
    config = tiny.config(epochs=1, **options)
    run_config(config, out=tmp_path, data=tiny.dataset(), listener=heard.append)
    said = [event.sentence for event in heard if isinstance(event, Advised)]
    assert len(said) == bool(words)
    if words:
        assert words in said[0]
        kinds = [event.kind for event in heard]
        assert kinds.index("advised") < kinds.index("stage")


def test_a_part_of_the_data(tmp_path):
    data = tiny.dataset(classes=8, train=9)
    whole = scenario_of(tiny.config(base=2, phases=3), data)
    options = {"classes": 4, "images_per_class": 5, "base": 2, "phases": 2}
    part = scenario_of(tiny.config(**options), data)
    assert part.classes == whole.classes[:4]
    assert [len(phase.train) for phase in part] == [10, 5, 5]
    assert len(part.test(2)) == len(whole.test(0)) * 2
    assert set(part.train(0).item_digests()) < set(whole.train(0).item_digests())
    other = scenario_of(tiny.config(**options, split_seed=1), data)
    assert set(other.train(0).item_digests()) != set(part.train(0).item_digests())
    again = scenario_of(tiny.config(**options | {"classes": None, "phases": 3}), data)
    assert part.train(0).item_digests() == again.train(0).item_digests()
    cache = Cache(tmp_path / "cache")
    for i, most in enumerate((5, None)):  # no base phase of other images is taken
        config = tiny.config(**options | {"images_per_class": most}, epochs=1)
        run_config(config, out=tmp_path / str(i), data=data, cache=cache)
    assert len(list((tmp_path / "cache" / "entries").glob("*.safetensors"))) == 2
    for wrong in ({"classes": 9}, {"classes": 2, "groups": (("class 1",), ("class 2",))}):
        with pytest.raises(ConfigError, match="classes = "):
            scenario_of(tiny.config(**wrong), data)
