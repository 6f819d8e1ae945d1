"""Results of runs kept as small files."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import records, verdicts
from studies.results import main
from tests.helpers import tiny
from tests.helpers.directories import content, cut, sign

from geodl.bench import experiment
from geodl.bench.experiment import results_of, run_config
from geodl.bench.report.published import FILES, REPETITION
from geodl.core.errors import StoreError
from geodl.store import Directory

START = datetime(2026, 1, 1, tzinfo=UTC)


def event(second, kind, **fields):
    time = (START + timedelta(seconds=second)).isoformat(timespec="milliseconds")
    return {"time": time, "kind": kind, **fields}


OPTIONS = {"method": "lwf", "distill": "lwf", "seed": 7, "analysis": False, "ame": True}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path, config = tmp_path_factory.mktemp("run") / "r", tiny.config(**OPTIONS)
    run_config(config, out=path, data=tiny.dataset())
    return path


def test_a_record_has_the_results_of_the_run(finished, tmp_path):
    (written,) = records.add([finished], tmp_path)
    (found,) = records.read(tmp_path)
    assert written.name.startswith("lwf-lwf-")
    assert written.name.endswith("-seed7.json")
    assert found.seed == 7
    assert found.training == ("icarl", "lwf")
    assert (found.config["method"], found.config["epochs"]) == ("lwf", 2)
    assert found.machine["threads"] == 1
    assert set(found.results) == {"cnn", "nme", "ame", "ncm"}
    for name, trajectory in results_of(Directory(finished)).items():
        result = trajectory.to_dict()
        assert found.results[name]["accuracy"] == result["accuracy"]
        assert found.value(name, "final") == result["accuracy"][-1]
        for key in ("average", "average_incremental", "forgetting"):
            assert found.value(name, key) == result[key]
    assert found.seconds == records.phase_seconds(Directory(finished).read_events(), 3)
    assert not found.cached
    # Nothing in it depends on the places of the data and the run.
    assert str(finished) not in written.read_text()
    assert not {*FILES, *REPETITION} & set(found.config)


def test_other_options_have_another_file(finished, tmp_path):
    one = records.record(finished)
    other = replace(one, config=one.config | {"lr": 0.01})
    assert other.file_name != one.file_name == records.record(finished).file_name


def test_a_record_has_changes_of_the_environment(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "r")
    run = Directory(path)
    environment = {**run.environment, "threads": 2}
    how = {"must_match": ["threads"], "allow_environment_change": True}
    Directory.create_or_open(path, run.config, environment=environment, **how)
    found = records.record(path)
    assert found.machine["threads"] == 2
    assert found.machine["changed"] == ["threads is 1 there and 2 now"]
    before = records.record(finished)
    assert "changed" not in before.machine
    text = verdicts.page([found, before, found], "cifar100-cpu")
    one = r" 1 run on cpu \(\w+\), 1 thread, precision 32, torch [^ ;,]+;"
    two = r" 2 runs on cpu \(\w+\), 2 threads, precision 32, torch [^ ;,]+, earlier with threads 1;"
    assert re.search(f"{one}{two} commits ", text)


def test_only_complete_runs_have_a_result(finished, tmp_path):
    (tmp_path / "head.json").write_bytes((finished / "head.json").read_bytes())
    cut(tmp_path, 0)
    with pytest.raises(StoreError, match="0 of 3 phases are complete"):
        records.record(tmp_path)


def test_a_run_names_the_commit_of_its_code(finished, tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def as_if_here() -> str | None:
        monkeypatch.setattr(experiment, "__file__", str(tmp_path / "experiment.py"))
        return experiment.commit()

    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "nobody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "nobody")
    assert as_if_here() is None  # no repository
    git("init", "-q")
    (tmp_path / "experiment.py").write_text("1")
    git("commit", "-q", "--allow-empty", "-m", "another project's")
    assert as_if_here() is None  # installed inside another project's checkout
    git("add", "experiment.py")
    git("commit", "-q", "-m", "ours")
    assert as_if_here() == git("rev-parse", "--short", "HEAD").strip()
    (tmp_path / "experiment.py").write_text("2")
    assert as_if_here() == git("rev-parse", "--short", "HEAD").strip() + "+"
    assert records.record(finished).commit == Directory(finished).environment["commit"]


def test_what_is_not_a_record_is_refused(finished, tmp_path):
    with pytest.raises(StoreError, match="no such directory"):
        records.read(tmp_path / "nothing")
    (path,) = records.add([finished], tmp_path)
    for value, words in (
        ({"format": 1, "other": 2}, "not a record"),
        ({"format": 9}, "format 9"),
        ([], "not"),
    ):
        path.write_text(json.dumps(value))
        with pytest.raises(StoreError, match=rf"{path.name}.* {words}"):
            records.read(tmp_path)


def test_errors_of_the_command_are_one_line(finished, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file"):
        main(["add", str(finished), "--to", str(tmp_path / "file" / "x")])
    run = shutil.copytree(finished, tmp_path / "run")
    head = content(run / "head.json")
    head["record"]["config"]["method"] = "../outside"
    sign(run / "head.json", head)
    with pytest.raises(SystemExit, match="a name that no file can have"):
        main(["add", str(run), "--to", str(tmp_path / "kept")])
    assert list((tmp_path / "kept").iterdir()) == []


def events_of(line):
    """Return events from words KIND@SECOND or KIND:PHASE@SECOND."""
    found = []
    for kind, phase, second in re.findall(r"(\w+):?(\d*)@(\d+)", line):
        found.append(event(int(second), kind, **({"phase": int(phase)} if phase else {})))
    return found


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("run@0 phase:0@1 stage@2 epoch@40 evaluated:0@50 phase:1@51 evaluated:1@71", [49, 20]),
        (  # interrupted for hours, and asked for again when complete
            "run@0 phase:0@0 epoch@10 run@9000 phase:0@9005 epoch@9020 evaluated:0@9022 run@9900 done@9901",
            [10 + 17],
        ),
    ],
)
def test_seconds_of_phases(line, seconds):
    assert records.phase_seconds(events_of(line), len(seconds)) == seconds


@given(st.lists(st.sampled_from(["run", "phase", "epoch", "evaluated", "done"]), max_size=12))
def test_seconds_are_never_more_than_passed(kinds):
    of = {"phase": {"phase": 0}}
    events = [event(3 * i, kind, **of.get(kind, {})) for i, kind in enumerate(kinds)]
    (found,) = records.phase_seconds(events, 1)
    assert 0 <= found <= 3 * max(len(kinds) - 1, 0)
