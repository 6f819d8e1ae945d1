"""Export to a folder: the ONNX file, its description, the page, and the files of onnxruntime-web."""

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from geodl.app.export import Exported, export
from geodl.core.errors import ConfigError, GeodlError
from geodl.core.files import atomic_write, directory_size, make_directory
from geodl.core.text import UNKNOWN, one_line
from geodl.data.images import Images
from geodl.model.model import Model

PACKAGE = "onnxruntime-web@1.30.0"
"""The npm package of the runtime; another version is used from a directory."""
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_STATIC = Path(__file__).parent / "static"


def export_web(
    model: Model,
    folder: Path,
    name: str,
    runtime: Path | None = None,
    force: bool = False,
    pictures: Images | None = None,
) -> dict[str, Any]:
    """Write a folder that any web server can serve; it contains none of the model's images.

    name:     shown on the page.
    runtime:  a directory with the files of onnxruntime-web; None: npm fetches them.
    force:    write into a directory that is not empty.
    pictures: as for `export`.
    """
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"{folder} is not empty; --force writes into it")
    make_directory(folder)
    for file, content in _runtime(runtime).items():
        atomic_write(folder / file, content)
    done = export(model, folder / "model.onnx", pictures)
    graph = Exported(model)
    about = {
        "name": name,
        "labels": list(model.classes),
        "size": model.transform.size,
        "shorter_side": model.transform.shorter_side,
        "whole": model.transform.whole,
        "output": graph.default,
        "unknown": UNKNOWN if graph.rejects else None,
        "runtime": PACKAGE,
    }
    atomic_write(folder / "model.json", json.dumps(about, ensure_ascii=False, indent=1).encode())
    for part in _STATIC.iterdir():
        atomic_write(folder / part.name, part.read_bytes())
    return done | {"file": str(folder), "bytes": directory_size(folder)}


def _runtime(directory: Path | None) -> dict[str, bytes]:
    """Return the files of onnxruntime-web by name."""
    if directory is None:
        return fetched()
    dist = directory / "node_modules" / "onnxruntime-web" / "dist"
    places = (directory, directory / "dist", dist)
    for place in places:
        if all((place / file).is_file() for file in RUNTIME):
            return {file: (place / file).read_bytes() for file in RUNTIME}
    raise ConfigError(
        f"--runtime {directory}: {', '.join(RUNTIME)} of onnxruntime-web are needed there"
    )


def fetched() -> dict[str, bytes]:
    """Download the files of onnxruntime-web with npm, which checks their hash; nothing is executed."""
    npm = shutil.which("npm")
    hint = "--runtime DIR takes the files from a directory"
    if npm is None:
        raise ConfigError(f"npm is needed to fetch {PACKAGE}; {hint}")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", PACKAGE, "--ignore-scripts", "--silent"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        files = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(files) != 1:
            reason = one_line(done.stderr.strip() or "no file came")
            raise GeodlError(f"npm could not fetch {PACKAGE} ({reason}); {hint}")
        with tarfile.open(files[0]) as package:
            found = {file: package.extractfile(f"package/dist/{file}") for file in RUNTIME}
            return {file: content.read() for file, content in found.items() if content is not None}
