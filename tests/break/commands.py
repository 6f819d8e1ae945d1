"""Whole commands on damaged directories."""

import io
import random
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from geodl.cli import main
from geodl.core.errors import StoreError

from .damage import harm
from .directories import KINDS, put
from .harness import family

QUICK: dict[str, Any] = {
    "network": "convnet",
    "epochs": 1,
    "threads": 1,
    "workers": 1,
    "precision": "32",
}
"""Options of learning in an instant."""


@family("commands")
def commands(draw: random.Random, folder: Path) -> None:
    """`geodl runs` on a damaged directory beside a sound one: exit 0 or 2, one line of error, the sound one is listed."""
    put("run", folder / "sound")
    put(draw.choice(KINDS), folder / "it")
    harm(draw, folder / "it", folder / "outside")
    status, out = geodl("runs", "list", str(folder))
    assert status == 0
    assert re.search("^sound +interrupted +2/3 ", out, flags=re.M), out
    assert any(line.startswith("it ") for line in out.splitlines()), "the damaged run is hidden"
    words = draw.choice(["runs show", "runs show --json", "runs rm"]).split()
    geodl(*words[:2], str(folder / "it"), *words[2:])


def geodl(*words: str, notes: int = 0) -> tuple[Any, str]:
    """Run a command in this process; return its exit status, 0 or 2, and what it printed; `notes`: lines beside it, at most."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            status = end.code
        except StoreError as error:
            raise AssertionError(f"not caught: {error}") from error
    lines = err.getvalue().splitlines()
    assert bool(status) <= len(lines) <= notes + bool(status), f"{words}: {lines}"
    assert status in (0, 2), f"{words}: {status}"
    assert all(line.isprintable() for line in [*lines, *out.getvalue().split("\n")]), (
        "control characters"
    )
    return status, out.getvalue()
