"""Sweeps on real Ray, on loopback: lost workers, a lost head, nodes that share nothing, ASHA; the bytes stay the same."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.command import completed, started
from tests.helpers.runs import DIGITS, quick, result_files, wait_until

from geodl.bench.experiment import run_config
from geodl.bench.sweep.jobs import jobs_in
from geodl.bench.sweep.runner import run_all
from geodl.bench.sweep.status import status_of
from geodl.store import Directory

pytest.importorskip("ray")
# Ray leaves sockets and processes to the system when it ends.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

POINTS = [{"seed": 1}, {"seed": 2}, {"method": "lucir+geodesic", "seed": 1}]
LONGER = {"epochs": 40, "checkpoint_steps": 10}
SPEC = '[[grid]]\nmethod = ["lucir"]\nseed = [1, 2]\n[[grid]]\nmethod = ["lucir+geodesic"]\nseed = [1]\n'


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Work in a folder of its own; Ray's workers as fast as others; a lost head is noticed soon."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "GEODL_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        "RAY_memory_monitor_refresh_ms": "0",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "spec.toml").write_text(SPEC)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Give the results of the runs done one after the other, without Ray and without the cache."""
    root = tmp_path_factory.mktemp("alone")
    return {
        job.out.name: result_files(run_config(job.config, out=job.out).path)
        for job in quick(root, *POINTS, **LONGER)
    }


def descendants(pid: int) -> list[int]:
    """Name a process and all below it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(words[1]), []).append(int(entry.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


class Head:
    """A Ray cluster of one node with two places, at a port of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        port = f"--port={self.address.rpartition(':')[2]}"
        how = "--head --block --num-cpus=2 --include-dashboard=false --disable-usage-stats"
        command = [Path(sys.executable).parent / "ray", "start", *how.split(), port]
        with (folder / "ray.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--object-store-memory=100000000"],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        host, port = self.address.split(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Lose it, at once, with all its workers."""
        for pid in reversed(descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def head(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster, and of no other
    made = Head(tmp_path)
    yield made
    made.kill()


def start(*arguments: str) -> subprocess.Popen[str]:
    longer = ["--epochs", LONGER["epochs"], "--checkpoint-steps", LONGER["checkpoint_steps"]]
    return started("sweep", *arguments, *DIGITS[:-2], *longer)


def in_the_middle() -> list[Path]:
    """Name the runs that have progress in a phase after the first."""
    return [
        path.parents[1]
        for path in Path("runs").glob("*/progress/checkpoint-*")
        if Directory(path.parents[1]).completed()
    ]


def children_of_runs(name: str) -> list[int]:
    """Name the processes that do a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().decode(errors="replace").split("\0")
            if "geodl.bench.sweep.child" in words and any(name in word for word in words):
                found.append(int(entry.parent.name))
    return found


def parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def same(alone, root: Path = Path("runs")) -> None:
    assert {name: result_files(root / name) for name in alone} == alone


def starts(run: Path) -> int:
    return sum(event["kind"] == "run" for event in Directory(run).read_events())


def test_a_killed_worker_is_replaced_and_the_bytes_are_the_same(alone, head):
    sweep = start("spec.toml", "--ray", head.address)
    wait_until(in_the_middle)
    run = in_the_middle()[0]
    (child,) = children_of_runs(run.name)
    os.kill(parent(child), signal.SIGKILL)
    said, wrong = sweep.communicate(timeout=600)
    assert sweep.returncode == 0, wrong
    assert "3 runs, 0 of them complete" in said
    assert starts(run) == 2
    same(alone)
    cached = [
        event["kind"] == "cached"
        for job in jobs_in(Path("runs"))
        for event in Directory(job.out).read_events()
    ]
    assert sum(cached) == 1  # the two runs of seed 1 trained one base


def test_a_lost_head_and_the_same_command_again(alone, head, tmp_path):
    sweep = start("spec.toml", "--ray", head.address)
    wait_until(in_the_middle)
    begun = in_the_middle()
    head.kill()
    try:
        sweep.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        sweep.kill()
        sweep.communicate()
    assert sweep.returncode != 0
    wait_until(lambda: not any(children_of_runs(run.name) for run in begun), 30)
    other = Head(tmp_path)
    try:
        sweep = start("spec.toml", "--ray", other.address)
        _, wrong = sweep.communicate(timeout=600)
        assert sweep.returncode == 0, wrong
    finally:
        other.kill()
    assert all(starts(run) == 2 for run in begun)
    same(alone)


def test_ctrl_c_saves_progress_on_the_cluster(head):
    sweep = start("spec.toml", "--ray", head.address)
    wait_until(in_the_middle)
    sweep.send_signal(signal.SIGINT)
    _, said = sweep.communicate(timeout=120)
    assert sweep.returncode == 130, said
    assert "geodl: stopped; progress is saved; the same command continues" in said
    assert {status_of(job).state for job in jobs_in(Path("runs"))} <= set(
        "interrupted waiting complete".split()
    )
    assert not any(children_of_runs(job.out.name) for job in jobs_in(Path("runs")))


def test_nodes_that_share_nothing_ship_their_progress(alone, tmp_path):
    from geodl.bench.sweep.cluster import Cluster, leave

    jobs = quick(tmp_path / "runs", *POINTS[:1], **LONGER)
    killed = []

    def told(running):
        if not killed and in_the_middle():  # it has been shipped
            (child,) = children_of_runs(jobs[0].out.name)
            killed.append(child)
            os.kill(parent(child), signal.SIGKILL)

    try:
        failed = run_all(jobs, Cluster("local", jobs, shared=False, ship_seconds=0.5), notify=told)
    finally:
        leave()
    assert failed == {}
    assert len(killed) == 1
    assert result_files(jobs[0].out) == alone[jobs[0].out.name]
    events = Directory(jobs[0].out).read_events()
    done = [event["done"] for event in events if event["kind"] == "run"]
    assert done[-1] >= 1  # resumed, not started over
    Directory(jobs[0].out).verify()


def test_asha_stops_poor_runs_and_the_same_command_leaves_them_out(tmp_path):
    options = [*DIGITS[:4], "--base", "4", "--phases", "3", "--base-epochs", "2", "--epochs", "40"]
    # Few exemplars make a poor k-NME; seed 8 draws 33, 7, 37 and 3 of them.
    search = "--search asha --trials 4 --over exemplars=1:40 --seed 8 --ray local".split()
    done = completed("sweep", *options, *search)
    states = [status_of(job).state for job in jobs_in(Path("runs"))]
    assert len(states) == 4
    assert "complete" in states
    assert "stopped early" in states
    assert "best average: " in done.stdout
    assert "stopped early: " in done.stdout
    for job in jobs_in(Path("runs")):
        if status_of(job).state == "stopped early":
            assert 2 <= job.done() < 4
        else:  # the bytes do not depend on the search
            alone = run_config(job.config, out=tmp_path / "alone" / job.out.name)
            assert result_files(alone.path) == result_files(job.out)
    assert "started" not in completed("sweep", *options, *search).stdout
