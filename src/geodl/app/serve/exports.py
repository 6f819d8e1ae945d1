"""Downloads: the ONNX file and the report, each written by a process of its own so that requests are not delayed."""

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
    """Writes each file once for each state of the model, into `folder`."""

    def __init__(self, model: Path, folder: Path, seconds: float) -> None:
        self.model, self.folder, self.seconds = model, folder, seconds
        self._versions: dict[Kind, Any] = {}
        self._lock = asyncio.Lock()

    async def make(self, kind: Kind, version: Any) -> Path:
        """Return the file for the state of the model with this version."""
        path = self.folder / NAMES[kind]
        model, file = str(self.model), str(path)
        words = ["report", model, "--out", file, "--without-images"]
        if kind == "onnx":
            words = ["export", model, file, "--force"]
        try:
            async with asyncio.timeout(self.seconds), self._lock:
                if self._versions.get(kind) != version:
                    await _run(words)
                    self._versions[kind] = version
        except TimeoutError:
            raise Refused(503, f"writing the file took longer than {self.seconds:.0f} s") from None
        return path


async def _run(words: list[str]) -> None:
    command = (sys.executable, "-m", "geodl", *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("geodl: ")
        kind = StoreError if process.returncode == 2 else GeodlError
        raise kind(last or "the file could not be written")
