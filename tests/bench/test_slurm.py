"""SLURM arrays."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.helpers import tiny
from tests.helpers.command import geodl
from tests.helpers.runs import DIGITS

from geodl.bench.sweep import slurm
from geodl.bench.sweep.jobs import Job, jobs_in


def test_an_array_whose_lines_are_runs(tmp_path):
    array = ["--submit", "slurm", "--sbatch", "--partition=cpu --time=60"]
    said = geodl("sweep", *DIGITS, "--grid", "seed=1,2", *array, cwd=tmp_path).stdout
    script = tmp_path / "runs" / ".sweep" / "array.sbatch"
    assert f"submit them: sbatch {script}" in said
    text = script.read_text()
    asked = "--array=1-2 --requeue --ntasks-per-node=1 --cpus-per-task=1 --partition=cpu --time=60"
    for line in asked.split():
        assert f"#SBATCH {line}\n" in text
    commands = re.search(r"^commands=\(\n(.*?)^\)\n", text, re.M | re.S)[1]
    words = [shlex.split(command) for command in shlex.split(commands)]
    assert [each[1:4] for each in words] == [["-m", "geodl", "run"]] * 2
    assert "2 runs: 2 waiting" in geodl("sweep", "status", cwd=tmp_path).stdout
    # Run the script with stand-ins for srun and scontrol.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, code in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "7"}
    environment = os.environ | task | {"PATH": f"{tools}:{os.environ['PATH']}"}
    # What is submitted later to the same directory changes nothing for the copy that SLURM keeps of a script.
    script = Path(shutil.copy(script, tmp_path / "spooled"))
    geodl("sweep", *DIGITS, "--grid", "seed=3,4,5", "--submit", "slurm", cwd=tmp_path)
    subprocess.run(["bash", script], env=environment, check=True, cwd="/")
    assert {job.config.seed for job in jobs_in(tmp_path / "runs") if job.complete()} == {2}
    assert not (tmp_path / "asked").exists()
    # A run whose time is over goes back into the queue.
    (tools / "srun").write_text("#!/bin/bash\nexit 130\n")
    assert subprocess.run(["bash", script], env=environment).returncode == 130
    assert (tmp_path / "asked").read_text() == "requeue 7_2\n"


def test_resources_of_the_array(tmp_path):
    config = tiny.config(devices=4, nodes=2, accelerator="cuda", threads=3)
    text = slurm.write([Job(config, tmp_path / "run", "a run")]).read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=3"):
        assert f"#SBATCH {line}\n" in text
