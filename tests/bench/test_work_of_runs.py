"""The work of the paper's runs, and confirmation before much of it."""

from contextlib import nullcontext

import pytest
from tests.helpers.paper import SPEED, jobs_of

from geodl.bench.paper import estimate
from geodl.bench.paper.grid import Training, config_of
from geodl.cli import grids
from geodl.core.errors import ConfigError
from geodl.core.text import duration
from geodl.learning.timing import Shape


def test_work_counts_images():
    config = config_of(Training("lucir", "cosine", 50, 5), "cifar100", "cpu")
    first, second, *_, last = estimate.work(config)
    assert first.trained == 16 * 50 * 500
    assert second.trained == 6 * (10 * 500 + 50 * 20)
    assert last.trained == 6 * (10 * 500 + 90 * 20)
    # herding and means; test; exemplars, mirrored too; AME's 150 a class
    assert first.evaluated == 25000 + 50 * 100 + 2 * 50 * 20 + 50 * 150
    joint = config_of(Training("joint", "none", 50, 5), "cifar100", "cpu")
    later = [each.trained for each in estimate.work(joint)][1:]
    assert later == [16 * 500 * seen for seen in (60, 70, 80, 90, 100)]


def test_seconds_of_each_kind_of_phase():
    def of(method, distill):
        training = Training(method, distill, 50, 5)
        config = config_of(training, "cifar100", "cpu")
        return estimate.seconds(config, estimate.work(config), SPEED)

    assert of("finetune", "geodesic")[:2] == pytest.approx([400_000 / 100, 36_000 / 20], rel=1e-3)
    assert of("finetune", "lwf")[1] == pytest.approx(36_000 / 50, rel=1e-3)
    assert of("mnemonics", "cosine")[1] == pytest.approx(1.5 * 36_000 / 40, rel=1e-3)
    assert of("joint", "none")[1] == pytest.approx(480_000 / 100, rel=1e-3)


def test_plan_counts_shared_base_phases_once_and_complete_phases_not_at_all():
    jobs = jobs_of("table1", "cifar100", "cpu", phases=[5])
    works = estimate.plan(jobs, [0] * len(jobs))
    trained = [job.config.method for job, each in zip(jobs, works, strict=True) if each[0].trained]
    # linear head; BiC, which holds images out; cosine head
    assert trained == ["icarl", "bic", "lucir"]
    done = [6, 0, 2, 0, 0, 0]
    later = estimate.plan(jobs, done)
    none = estimate.Work(0, 0)
    assert later[0] == [none] * 6
    assert later[2] == [none, none, *works[2][2:]]
    assert all((each[0].trained, each[0].evaluated > 0) == (0, True) for each in later[3:])


def test_base_phases_of_other_seeds_are_others():
    jobs = jobs_of("table3", "cifar100", "cpu", runs=2)
    trained = [each[0].trained > 0 for each in estimate.plan(jobs, [0] * 8)]
    assert trained == [True, False, False, False] * 2


def test_what_is_timed():
    config = config_of(Training("finetune", "none", 50, 5), "cifar100", "smoke")
    for precision in ("32", "bf16"):
        found = estimate.shape_of(config.model_copy(update={"precision": precision}))
        assert found == Shape("resnet8", 8, 64, precision=precision)
    large = config_of(Training("finetune", "none", 50, 5), "imagenet-subset", "paper")
    assert (estimate.shape_of(large).size, estimate.shape_of(large).batch) == (224, 16)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (720, "12 min"), (12600, "3.5 h"), (181440, "2.1 days"), (0, "0 s")],
)
def test_words_for_times(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("y", None),
        (" YES ", None),
        ("", "nothing was started"),
        ("n", "nothing was started"),
        (None, r"about 2\.0 h, and there is no terminal to confirm it: add --yes"),
    ],
)
def test_much_work_needs_confirmation(monkeypatch, answer, refused):
    monkeypatch.setattr(grids.sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr(grids.console, "input", lambda prompt, **_: answer)
    grids.confirm("about 2.0 h", yes=True)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        grids.confirm("about 2.0 h", yes=False)
