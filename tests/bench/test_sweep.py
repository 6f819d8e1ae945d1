"""Whole sweeps: equal bytes to single runs, stopping and resuming, output."""

import json
import signal

import pytest
from tests.helpers.command import geodl, started
from tests.helpers.runs import DIGITS, quick, result_files, seeds, wait_until

from geodl.bench.experiment import run_config
from geodl.bench.sweep.jobs import jobs_in
from geodl.bench.sweep.status import status_of
from geodl.cli import grids
from geodl.store import Directory


def test_two_processes_give_the_bytes_of_one_after_the_other(tmp_path):
    (tmp_path / "spec.toml").write_text(
        '[[grid]]\nmethod = ["lucir"]\nseed = [1, 2]\n[[grid]]\nmethod = ["lucir+geodesic"]\nseed = [2]\n'
    )
    said = geodl("sweep", "spec.toml", *DIGITS, "-j", "2", cwd=tmp_path).stdout
    assert "3 runs, 0 of them complete" in said
    assert said.count(": complete: ") == 3
    assert (tmp_path / "runs" / "report.html").exists()
    cached = 0
    points = [{"seed": 1}, {"seed": 2}, {"method": "lucir+geodesic", "seed": 2}]
    for job in quick(tmp_path / "runs", *points):
        # no cache: each trains its own base
        alone = run_config(job.config, out=tmp_path / "alone" / job.out.name)
        assert result_files(alone.path) == result_files(job.out)
        assert len(result_files(job.out)) == 9
        cached += sum(event["kind"] == "cached" for event in Directory(job.out).read_events())
    assert cached == 1  # each base was trained once
    again = geodl("sweep", "spec.toml", *DIGITS, cwd=tmp_path).stdout
    assert "started" not in again
    shown = geodl("sweep", "status", cwd=tmp_path).stdout
    assert "LUCIR + GeoDL, seed 2" in shown
    assert "3 runs: 3 complete" in shown


def test_a_run_that_fails_is_named_with_its_last_error(tmp_path):
    done = geodl("sweep", *DIGITS, "--grid", "lr=1e30,0.05", "-j", "2", cwd=tmp_path, status=2)
    assert "1 of 2 runs failed; the first: LUCIR, lr 1e30: " in done.stderr
    assert "not finite" in done.stderr
    assert "LUCIR, lr 0.05: complete" in done.stdout
    assert "LUCIR, lr 1e30: failed: " in done.stdout
    shown = geodl("sweep", "status", cwd=tmp_path).stdout
    assert "not finite" in shown
    assert "2 runs: 1 complete, 1 failed" in shown


LONG = [*DIGITS[:-1], "3000", "--checkpoint-steps", "20", "--grid", "seed=1,2", "-j", "2"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_no_process_stays_and_the_same_command_continues(tmp_path, how):
    process = started("sweep", *LONG, cwd=tmp_path)
    wait_until(lambda: len(list((tmp_path / "runs").glob("*/progress/checkpoint-*"))) == 2)
    running = jobs_in(tmp_path / "runs")
    assert [status_of(job).state for job in running] == ["running", "running"]
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    wait_until(lambda: all(status_of(job).state == "interrupted" for job in running), 20)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "geodl: stopped; progress is saved; the same command continues" in said
    process = started("sweep", *LONG, cwd=tmp_path)
    begun = [process.stdout.readline() for _ in range(3)]
    assert sum(line.endswith("resumed\n") for line in begun) == 2
    process.kill()
    process.communicate()


def test_a_table_on_a_terminal(tmp_path):
    jobs = seeds(tmp_path, 3)
    run_config(jobs[0].config, out=jobs[0].out)
    board = grids.Board(jobs)
    board(jobs)
    with grids.console.capture() as said:
        grids.echo(board.table())
    shown = said.get()
    assert "LUCIR, seed 0" in shown
    assert "3/3" in shown
    assert "1 complete, 2 waiting" in shown


def test_reports_of_whole_directories(tmp_path):
    (job,) = quick(tmp_path / "runs", {"seed": 1})
    run_config(job.config, out=job.out)
    job.file("stopped").parent.mkdir()
    job.file("stopped").write_text("")
    job.prepare()
    assert not job.file("stopped").exists()
    assert "1 run: 1 complete" in geodl("sweep", "status", cwd=tmp_path).stdout
    (tmp_path / "runs" / "report.html").write_text("")
    said = geodl("report", "runs", "--out", "all.html", cwd=tmp_path).stdout
    assert "page: all.html" in said
    given = ("runs/report.html", f"runs/{job.out.name}")  # as a shell gives runs/*
    assert "page: all.html" in geodl("report", *given, "--out", "all.html", cwd=tmp_path).stdout
    failed = geodl("report", "runs/report.html", cwd=tmp_path, status=2)
    assert "report.html is not a geodl directory" in failed.stderr
    listed = json.loads(geodl("runs", "list", "--json", cwd=tmp_path).stdout)
    assert listed[0]["state"] == "complete"
