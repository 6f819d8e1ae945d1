"""Files to take away: the ONNX file and the report, made by a process of their own so that nothing else is held up."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any, Literal

from geodl.app.serve.limits import Refused
from geodl.core.errors import GeodlError, StoreError

Kind = Literal["onnx", "report"]
NAMES: dict[Kind, str] = {"onnx": "model.onnx", "report": "report.html"}


class Exports:
    """Makes each file once for each state of the model, in `folder`."""

    def __init__(self, model: Path, folder: Path, seconds: float) -> None:
        self.model, self.folder, self.seconds = model, folder, seconds
        self._made: dict[Kind, Any] = {}
        self._lock = asyncio.Lock()

    async def make(self, kind: Kind, version: Any) -> Path:
        """Return the file of the state with this version."""
        path = self.folder / NAMES[kind]
        model, file = str(self.model), str(path)  # the file of an earlier state is replaced
        words = ["report", model, "--out", file, "--without-images"]
        if kind == "onnx":
            words = ["export", model, file, "--force"]
        try:
            async with asyncio.timeout(self.seconds), self._lock:
                if self._made.get(kind) != version:
                    await _run(words)
                    self._made[kind] = version
        except TimeoutError:
            raise Refused(503, f"writing the file took longer than {self.seconds:.0f} s") from None
        return path


async def _run(words: list[str]) -> None:
    command = (sys.executable, "-m", "geodl", *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("geodl: ")
        kind = StoreError if process.returncode == 2 else GeodlError
        raise kind(last or "the file could not be written")
