"""A step that is stopped, fails, or meets another program: nothing is lost and nothing changes."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from tests.helpers.directories import contents
from tests.helpers.folders import QUICK, Heard

from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import Interrupted, StoreError, TrainingError
from geodl.core.events import EpochEnded, StepContinued, StepTaken
from geodl.store import Directory


def kept(path):
    """Return what is complete in a directory."""
    return contents(path, progress=False)


def test_it_stops_while_images_are_read(classifier, weeks):
    with pytest.raises(Interrupted, match="stopped while the images were read"):
        classifier.learn(weeks[0], stop=lambda: True, **QUICK)
    assert classifier.learn(weeks[0], **QUICK).step == 1


def test_a_step_is_finished_with_the_threads_it_was_begun_with(classifier, weeks):
    before = torch.get_num_threads()
    taken, continued, threads = Heard(StepTaken), Heard(StepContinued), set()
    with pytest.raises(Interrupted):
        classifier.learn(weeks[0], listener=taken, stop=lambda: bool(taken), **QUICK)

    def listener(event):
        continued(event)
        threads.update([torch.get_num_threads()] if isinstance(event, StepTaken) else [])

    torch.set_num_threads(3)
    classifier.learn(weeks[0], listener=listener, **QUICK | {"threads": 2})
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert continued
    assert threads == {1}
    assert found == 3  # as the process had them


def test_stopped_and_continued_it_is_as_if_never_stopped(taught, weeks, tmp_path):
    straight, stopped = IncrementalClassifier(tmp_path / "straight"), taught
    shutil.copytree(stopped.path, straight.path)
    straight.learn(weeks[1], **QUICK)
    before = kept(stopped.path)
    for when in (1, 2):
        taken = Heard(StepTaken)
        with pytest.raises(Interrupted):
            stopped.learn(weeks[1], listener=taken, stop=lambda: len(taken) >= when, **QUICK)  # noqa: B023
        assert kept(stopped.path) == before
        assert stopped.classes == ("digit 0", "digit 1")
    continued = Heard(StepContinued)
    stopped.learn(weeks[1], listener=continued, **QUICK)
    assert continued
    assert kept(stopped.path) == kept(straight.path)


def test_a_stop_between_two_epochs_keeps_the_progress(taught, weeks):
    ended, continued = Heard(EpochEnded), Heard(StepContinued)
    assert not taught.unfinished
    with pytest.raises(Interrupted, match="progress is saved"):
        taught.learn(weeks[1], listener=ended, stop=lambda: bool(ended), **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geodl.store.directory.load_checkpoint", None)
        assert taught.unfinished  # known without reading the checkpoint
        assert taught.info()["unfinished"]
    taught.learn(weeks[1], listener=continued, **QUICK)
    assert continued


def test_unfinished_work_on_other_images_is_not_continued(tmp_path, weeks):
    straight, stopped = (IncrementalClassifier(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(Interrupted):
        stopped.learn(weeks[0], stop=lambda: True, **QUICK)
    stopped.learn(weeks[1], **QUICK)
    straight.learn(weeks[1], **QUICK)
    assert kept(stopped.path) == kept(straight.path)


def test_a_failed_learn_changes_nothing(classifier, weeks):
    with pytest.raises(TrainingError, match="not finite"):
        classifier.learn(weeks[0], lr=1e30, **QUICK)
    assert not classifier.path.exists()
    classifier.learn(weeks[0], **QUICK)
    before = kept(classifier.path)
    place = "the loss is not finite in phase 1, stage train, epoch 1"
    with pytest.raises(TrainingError, match=place):
        classifier.learn(weeks[1], lr=1e30, **QUICK)
    assert kept(classifier.path) == before
    assert classifier.classes == ("digit 0", "digit 1")


def test_what_another_process_learned_while_a_learn_failed_stays(classifier, weeks, monkeypatch):
    lock = Directory.lock

    @contextmanager
    def followed(store):
        try:
            with lock(store):
                yield
        finally:
            monkeypatch.setattr(Directory, "lock", lock)
            IncrementalClassifier(classifier.path).learn(weeks[1], **QUICK)

    monkeypatch.setattr(Directory, "lock", followed)
    with pytest.raises(TrainingError, match="not finite"):
        classifier.learn(weeks[0], lr=1e30, **QUICK)
    assert classifier.classes == ("digit 2", "digit 3")


def test_others_see_the_old_state_while_one_learns(taught, weeks):
    seen = []

    def hear(event):
        if isinstance(event, EpochEnded):
            other = IncrementalClassifier(taught.path)
            seen.append({each.label for each in other.predict(weeks[1])})
            for write in (lambda: other.learn(weeks[1], **QUICK), other.undo):
                with pytest.raises(StoreError, match="is being written by process"):
                    write()

    taught.learn(weeks[1], listener=hear, **QUICK)
    assert len(seen) == 3
    assert all(labels <= {"digit 0", "digit 1"} for labels in seen)
    assert len(taught.classes) == 4


def test_other_directories_are_refused(taught, tmp_path, weeks):
    before = kept(taught.path)
    for fresh in (False, True):
        with pytest.raises(StoreError, match="is the directory of a model; use another one"):
            Directory.create_or_open(taught.path, {"method": "lucir"}, phases=3, fresh=fresh)
    assert kept(taught.path) == before
    Directory.create_or_open(tmp_path / "run", {"method": "icarl"})
    with pytest.raises(StoreError, match="is the directory of a run, not of a model"):
        IncrementalClassifier(tmp_path / "run").learn(weeks[0], **QUICK)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="not a geodl directory"):
        IncrementalClassifier(tmp_path / "mine").learn(weeks[0], **QUICK)
    with pytest.raises(StoreError, match="no such model"):
        IncrementalClassifier(tmp_path / "nowhere").predict(weeks[0])
