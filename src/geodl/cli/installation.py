"""``geodl methods``, ``geodl config`` and ``geodl doctor``."""

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geodl import __version__
from geodl.bench.runs import list_runs
from geodl.cli.display import Json, echo, plain, print_json, table
from geodl.cli.options import Flags, effective
from geodl.config import presets
from geodl.core.cache import Cache
from geodl.core.devices import device_kind, precision_of
from geodl.core.errors import DISTRIBUTION, install
from geodl.core.text import readable
from geodl.data import sources
from geodl.methods import METHODS


def show(
    *,
    flags: Flags = Flags(),  # type: ignore[valid-type]  # noqa: B008
    as_json: Json = False,
) -> None:
    """Print every option with its value and origin."""
    found = effective(flags)
    values, origins = found.config.flat("json"), found.origins
    if as_json:
        print_json({key: {"value": values[key], "origin": origins[key]} for key in values})
        return
    for title, options in found.config.headings().items():
        _print_group(title, {key: (json.dumps(values[key]), origins[key]) for key in options})


def _print_group(title: str, entries: Mapping[str, Sequence[str]]) -> None:
    """Print a title and a table with a name and its values in each row."""
    widest = max(map(len, entries), default=0)
    rows = [(name.ljust(max(18, widest)), *values) for name, values in entries.items()]
    echo(table(rows=rows, title=title, title_justify="left", title_style="bold"))
    echo()


def show_presets() -> None:
    """List the presets that ship with the package."""
    echo(table(rows=list(presets().items())))


def methods(*, as_json: Json = False) -> None:
    """List the methods."""
    descriptions = {name: _method(name) for name in METHODS}
    if as_json:
        print_json(descriptions)
        return
    for name, about in descriptions.items():
        own = ", ".join(f"{key} = {json.dumps(value)}" for key, value in about["defaults"].items())
        echo(plain(name, "bold") + plain(f"  {about['summary']}"))
        echo(f"  {about['paper']}", "dim")
        if own:
            echo(f"  own defaults: {own}")


def _method(name: str) -> dict[str, Any]:
    method = METHODS[name]
    own = dict(method.Options.defaults)
    own |= {key: info.default for key, info in method.Options.model_fields.items()}
    return {"summary": method.summary, "paper": method.paper, "defaults": own}


_PACKAGES = ("torch", "lightning-fabric", "numpy", "pillow", "safetensors", "pydantic")


def _extras() -> dict[str, list[str]]:
    """Return the packages of each extra for users, as the installed distribution declares them; empty if run from source."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*; extra == ['\"](\w+)['\"]", requirement)
        if match and match[2] not in ("test", "docs", "dev"):
            found.setdefault(match[2], []).append(match[1])
    return found


def _data_found() -> str:
    """Describe the folder in which sources look for data by default."""
    folder = os.environ.get("GEODL_DATA")
    if not folder:
        return "digits (embedded); GEODL_DATA, a folder to look in for others, is not set"
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    return f"digits (embedded); in {folder}: {', '.join(names) or 'nothing'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _extra(name: str, packages: Sequence[str]) -> str:
    versions = [f"{package} {_version(package)}" for package in packages]
    missing = any(version.endswith(" missing") for version in versions)
    return f"missing: {install(name)}" if missing else ", ".join(versions)


def doctor(*, as_json: Json = False) -> None:
    """Print what a bug report needs."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cache, omp = Cache(), os.environ.get("OMP_NUM_THREADS", "unset")
    facts: dict[str, dict[str, str]] = {
        "versions": {
            "geodl": __version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "machine": {
            "system": platform.platform(),
            "cores": str(os.cpu_count()),
            "threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS = {omp})",
            "devices": ", ".join(devices) or "CPU only",
            "precision auto": ": ".join(precision_of(device_kind("auto"))),
            "executable": sys.executable,
        },
        "extras": {name: _extra(name, packages) for name, packages in _extras().items()},
        "data": {
            **sources(),
            "found": _data_found(),
            "cache": f"{cache.root} ({readable(cache.size())})",
            "runs": f"{len(list_runs(Path('runs')))} in ./runs",
        },
    }
    if as_json:
        print_json(facts)
        return
    for title, entries in facts.items():
        _print_group(title, {name: (text,) for name, text in entries.items()})
