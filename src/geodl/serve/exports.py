"""Files to take away: the ONNX file and the report, made by a process of their own so that nothing else is held up."""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from geodl.serve.security import Refused

Kind = Literal["onnx", "report"]
NAMES: dict[Kind, str] = {"onnx": "model.onnx", "report": "report.html"}


class Exports:
    """Makes each file once for each state of the model."""

    def __init__(self, model: Path, seconds: float) -> None:
        self.model, self.seconds = model, seconds
        self._folder = TemporaryDirectory(prefix="geodl-serve-")
        self._made: dict[Kind, Any] = {}
        self._lock = asyncio.Lock()

    async def make(self, kind: Kind, stamp: Any) -> Path:
        """Return the file of the state with this stamp."""
        path = Path(self._folder.name) / NAMES[kind]
        if self._lock.locked():
            raise Refused(429, "another file is being written; try again in a moment")
        async with self._lock:
            if self._made.get(kind) != stamp:
                model, file = str(self.model), str(path)  # the file of an earlier state is replaced
                words = {"onnx": ["export", model, file, "--force"], "report": ["report", model, "--out", file]}
                await self._run(words[kind])
                self._made[kind] = stamp
        return path

    async def _run(self, words: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "geodl", *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(), self.seconds)
        except TimeoutError:
            raise Refused(503, f"writing the file took longer than {self.seconds:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines() or ["it could not be written"]
            raise Refused(500 if process.returncode != 2 else 409, lines[-1].removeprefix("geodl: "))

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
