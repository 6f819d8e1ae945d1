"""The progress of a run and the time left."""

import pytest

from geodl.bench.work import Progress


def event(kind, seconds, **fields):
    time = f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}+00:00"
    return {"kind": kind, "time": time} | fields


def test_time_left_follows_from_the_work_since_the_last_start():
    began = 1767225600.0

    def progress(events, now):
        found = Progress.of(events)
        return found.part, found.seconds_left(began + now)

    events = [
        event("run", 0, work=[100, 50, 50], done=0),
        event("stage", 0, phase=0, stage="train", epoch=0, epochs=10, steps=8),
    ]
    assert progress(events, 5) == (0.0, None)
    step = event("step", 5, phase=0, stage="train", epoch=1, step=4)
    assert progress([*events, step], 5) == (0.075, pytest.approx(185 / 3))
    events += [event("epoch", 10, phase=0, stage="train", epoch=5, epochs=10)]
    assert progress(events, 10) == (0.25, 30.0)
    # A base phase from the cache took no time, and neither did what was done before the last start.
    events += [event("run", 100, work=[100, 50, 50], done=0), event("cached", 100, phase=0)]
    events += [event("epoch", 120, phase=1, stage="train", epoch=2, epochs=5)]
    assert progress(events, 120) == (0.6, pytest.approx(80.0))
    events += [event("epoch", 121, phase=1, stage="correction", epoch=1, epochs=5), {"kind": "odd"}]
    assert progress(events, 120) == (0.6, pytest.approx(80.0))
    assert progress([], 0) == (0.0, None)
