"""Events: distinct kinds, records for JSON, errors for misspelt ones, and the log of a run."""

import dataclasses
import inspect
import json

import pytest
from tests.helpers import tiny

from geodl.bench.experiment import run_config
from geodl.core import events
from geodl.core.events import (
    FREQUENT,
    AnglesTaken,
    EpochEnded,
    Event,
    PhaseEvaluated,
    RunStarted,
    StepTaken,
)


def test_kinds_differ_and_no_field_hides_a_key_of_the_log():
    classes = [each for _, each in inspect.getmembers(events, inspect.isclass)]
    kinds = [each for each in classes if issubclass(each, Event) and each != Event]
    assert len({kind.kind for kind in kinds}) == len(kinds) >= 14
    for kind in kinds:
        assert not {"kind", "time", "crc32"} & {field.name for field in dataclasses.fields(kind)}


def test_a_misspelt_event_or_field_is_an_error():
    with pytest.raises(AttributeError):
        _ = events.StepTakn  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        StepTaken(phase=0, stage="train", epoch=0, step=1, loss=0.5, rte=3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunStarted("run", [1], 0, [1]).done = 1


def test_metrics_are_not_repeated_in_the_log():
    assert PhaseEvaluated(2, {"accuracy": {"cnn": 50.0}}).record() == {"phase": 2}


def test_a_run_reports_everything_and_logs_all_but_frequent_events(tmp_path):
    heard: list[Event] = []
    config = tiny.config(method="lucir", distill="geodesic", finetune_epochs=1)
    store = run_config(config, out=tmp_path / "r", data=tiny.dataset(), listener=heard.append)
    expected = [event for event in heard if not isinstance(event, FREQUENT)]
    logged = store.read_events()
    assert [event.kind for event in expected] == [event["kind"] for event in logged]
    for event, line in zip(expected, logged, strict=True):
        for key in ("kind", "time"):
            del line[key]
        assert line == json.loads(json.dumps(event.record()))
    base, later = ["phase", "stage", "epoch", "epoch", "evaluated"], ["phase", "stage"]
    later += ["epoch", "angles", "epoch", "angles", "stage", "epoch", "evaluated"]
    assert [event.kind for event in expected] == ["run", *base, *later, *later, "done"]
    epochs = [event for event in heard if isinstance(event, EpochEnded)]
    assert [event.phase for event in epochs] == [0, 0, 1, 1, 1, 2, 2, 2]
    stages = [(event.stage, event.epoch, event.epochs) for event in epochs]
    assert stages[2:5] == [("train", 1, 2), ("train", 2, 2), ("balance", 1, 1)]
    every = {"ce", "distill", "margin"}
    assert [set(event.parts) for event in epochs][:5] == [{"ce"}, {"ce"}, every, every, {"ce"}]
    assert all(event.loss == pytest.approx(sum(event.parts.values())) for event in epochs)
    steps = [(e.phase, e.stage, e.epoch, e.step) for e in heard if isinstance(e, StepTaken)]
    assert steps[:6] == [(0, "train", e, s) for e in (0, 1) for s in (1, 2, 3)]
    (start,) = (event for event in heard if isinstance(event, RunStarted))
    assert (start.sizes, start.done) == ([2, 1, 1], 0)
    assert start.work == [2 * 18, 2 * (9 + 6), 2 * (9 + 9)]
    angles = [angle for e in heard if isinstance(e, AnglesTaken) for angle in e.angles]
    assert angles
    assert all(isinstance(angle, float) for angle in angles)
