"""Events: each has a kind and a record for JSON, what is misspelt is an error, and a run's file tells its story."""

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

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

KINDS = [
    each
    for _, each in inspect.getmembers(events, inspect.isclass)
    if issubclass(each, Event) and each != Event
]


def sample(kind: Any) -> Any:
    """Return a value of a type."""
    simple = {int: 3, float: 0.25, str: "text", bool: True, Any: None}
    if kind in simple:
        return simple[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(sample(each) for each in arguments)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {sample(arguments[0]): sample(arguments[1])}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return [sample(arguments[0])]
    return sample(arguments[0])  # a union


def made(kind: type[Event]) -> Event:
    hints = get_type_hints(kind)
    return kind(**{field.name: sample(hints[field.name]) for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_has_a_kind_and_a_record_ready_for_json(kind):
    event = made(kind)
    assert isinstance(kind.kind, str)
    assert kind.kind
    record = event.record()
    kept = [
        field.name
        for field in dataclasses.fields(kind)
        if (kind, field.name) != (PhaseEvaluated, "metrics")
    ]
    assert list(record) == kept
    read = json.loads(json.dumps(record, allow_nan=False))
    assert read.keys() == record.keys()
    # the names under which a line of events.jsonl keeps its own
    assert not {"kind", "time"} & record.keys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.kind = "other"


def test_kinds_differ():
    names = [kind.kind for kind in KINDS]
    assert len(names) >= 14
    assert len(set(names)) == len(names)


def test_a_misspelt_event_is_an_error_and_so_is_a_field():
    with pytest.raises(AttributeError):
        _ = events.StepTakn  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        exec("from geodl.core.events import EpochEnd")
    with pytest.raises(TypeError):
        StepTaken(phase=0, stage="train", epoch=0, step=1, loss=0.5, rte=3.0)
    with pytest.raises(TypeError):
        StepTaken(0, "train", 0, 1, 0.5)


def test_metrics_are_told_but_kept_in_their_own_file():
    event = PhaseEvaluated(2, {"accuracy": {"cnn": 50.0}})
    assert event.record() == {"phase": 2}


def test_a_run_tells_all_and_notes_down_all_but_single_steps(tmp_path):
    heard: list[Event] = []
    config = tiny.config(method="lucir", distill="geodesic", finetune_epochs=1)
    store = run_config(config, out=tmp_path / "r", data=tiny.dataset(), listener=heard.append)
    told = [event for event in heard if not isinstance(event, FREQUENT)]
    noted = store.read_events()
    assert [event.kind for event in told] == [event["kind"] for event in noted]
    for event, line in zip(told, noted, strict=True):
        record = {
            name: value for name, value in line.items() if name not in ("kind", "time", "crc32")
        }
        assert record == json.loads(json.dumps(event.record()))
    base, later = ["phase", "stage", "epoch", "epoch", "evaluated"], ["phase", "stage"]
    later += ["epoch", "angles", "epoch", "angles", "stage", "epoch", "evaluated"]
    assert [event.kind for event in told] == ["run", *base, *later, *later, "done"]
    assert [event.phase for event in heard if isinstance(event, EpochEnded)] == [
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    assert [(e.stage, e.epoch, e.epochs) for e in heard if isinstance(e, EpochEnded)][2:5] == [
        ("train", 1, 2),
        ("train", 2, 2),
        ("balance", 1, 1),
    ]
    steps = [(e.phase, e.stage, e.epoch, e.step) for e in heard if isinstance(e, StepTaken)]
    assert steps[:6] == [(0, "train", e, s) for e in (0, 1) for s in (1, 2, 3)]
    parts = [set(e.parts) for e in heard if isinstance(e, EpochEnded)]
    assert parts[:5] == [
        {"ce"},
        {"ce"},
        {"ce", "distill", "margin"},
        {"ce", "distill", "margin"},
        {"ce"},
    ]
    assert all(
        e.loss == pytest.approx(sum(e.parts.values())) for e in heard if isinstance(e, EpochEnded)
    )
    (start,) = [e for e in heard if isinstance(e, RunStarted)]
    assert (start.sizes, start.done) == ([2, 1, 1], 0)
    assert start.work == [2 * 18, 2 * (9 + 6), 2 * (9 + 9)]
    assert all(
        isinstance(angle, float) for e in heard if isinstance(e, AnglesTaken) for angle in e.angles
    )
