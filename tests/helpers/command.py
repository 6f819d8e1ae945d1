"""The command line, in this process or in one of its own."""

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from geodl.cli import main


class Done(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


def geodl(*arguments: str, cwd: Path | None = None, status: int = 0) -> Done:
    """Run a command as the console script does, but in this process: importing torch takes seconds."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "100")
        patch.chdir(cwd or Path.cwd())
        with pytest.raises(SystemExit) as left:
            main(arguments)
    assert left.value.code == status, err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def started(
    *words: object, code: str = "", environment: dict[str, str] | None = None, **how: Any
) -> subprocess.Popen[str]:
    """Start a command with one thread in a process of its own; code: Python to run instead of geodl."""
    program = ["-c", code] if code else ["-m", "geodl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    arguments = [sys.executable, *program, *map(str, words)]
    return subprocess.Popen(arguments, env=variables, **pipes | how)


def completed(*words: object, status: int = 0, **how: Any) -> Done:
    """Run a command in a process of its own and check its exit status."""
    process = started(*words, **how)
    done = Done(*process.communicate(timeout=300))
    assert process.returncode == status, done.stderr
    return done
