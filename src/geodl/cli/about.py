"""``geodl methods``, ``geodl config`` and ``geodl doctor``."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Column, Table
from rich.text import Text

from geodl import __version__
from geodl.cache import Cache
from geodl.cli.display import plain, say
from geodl.cli.options import Flags, Json, effective
from geodl.config import RunConfig, groups_of_options, presets
from geodl.data.sources import sources
from geodl.devices import device_kind, explain_precision
from geodl.files import readable
from geodl.methods import METHODS


def show(
    *,
    flags: Annotated[Flags, Parameter(name="*")] = Flags(),  # type: ignore[valid-type]  # noqa: B008
    as_json: Json = False,
) -> None:
    """Print every option with its value and where it comes from: default, default of the method, preset, file, command line."""
    found = effective(flags)
    values = found.config.model_dump(mode="json")
    if as_json:
        print(json.dumps({name: {"value": value, "origin": found.origins[name]} for name, value in values.items()}))
        return
    for title, options in groups_of_options(type(found.config)).items():
        table = _table(title, Column(min_width=18), Column(min_width=24), Column(style="dim"))
        for name in options:
            table.add_row(name, plain(json.dumps(values[name])), plain(found.origins[name]))
        say(table)
        say()


def _table(title: str | None = None, *columns: Column) -> Table:
    return Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )


def show_presets() -> None:
    """List the presets that ship with the package."""
    table = _table()
    for name, text in presets().items():
        table.add_row(f"[bold]{name}[/bold]", text)
    say(table)


def methods(*, as_json: Json = False) -> None:
    """List the methods."""
    found = {name: _method(name) for name in METHODS}
    if as_json:
        print(json.dumps(found))
        return
    for name, about in found.items():
        own = ", ".join(f"{key} = {json.dumps(value)}" for key, value in about["defaults"].items())
        say(Text(name, "bold") + Text(f"  {about['summary']}"))
        say(Text(f"  {about['paper']}", "dim"))
        if own:
            say(f"  own defaults: {own}")


def _method(name: str) -> dict[str, Any]:
    method = METHODS[name]
    common = RunConfig.model_fields
    own = {
        key: info.default
        for key, info in method.Config.model_fields.items()
        if key != "method" and (key not in common or common[key].default != info.default)
    }
    return {"summary": method.summary, "paper": method.paper, "defaults": own}


_PACKAGES = ("torch", "lightning-fabric", "numpy", "pillow", "safetensors", "pydantic")


def _extras() -> dict[str, list[str]]:
    """Return the packages of each extra for users, as the installed package declares them."""
    found: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("geodl") or []:
        match = re.match(r"([\w.-]+).*; extra == ['\"](\w+)['\"]", requirement)
        if match and match[2] != "test":
            found.setdefault(match[2], []).append(match[1])
    return found


def _data_found() -> str:
    """Say what lies in the folder where sources look when they are given none."""
    folder = os.environ.get("GEODL_DATA")
    if not folder:
        return "digits (embedded); GEODL_DATA, a folder to look in for others, is not set"
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    return f"digits (embedded); in {folder}: {', '.join(names) or 'nothing'}"


def doctor(*, as_json: Json = False) -> None:
    """Say what a bug report needs."""
    import torch

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cache = Cache()
    facts: dict[str, dict[str, str]] = {
        "versions": {
            "geodl": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "machine": {
            "system": platform.platform(),
            "cores": str(os.cpu_count()),
            "threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS = {os.environ.get('OMP_NUM_THREADS', 'unset')})",
            "devices": ", ".join(devices) or "CPU only",
            "precision auto": explain_precision(device_kind("auto")),
            "executable": sys.executable,
        },
        "extras": {
            name: f"missing: pip install 'geodl[{name}]'"
            if "missing" in (versions := [version(package) for package in packages])
            else ", ".join(f"{package} {found}" for package, found in zip(packages, versions, strict=True))
            for name, packages in _extras().items()
        },
        "data": {
            **sources(),
            "found": _data_found(),
            "cache": f"{cache.root} ({readable(cache.size())})",
            "runs": f"{len(list(Path('runs').glob('*/config.json')))} in ./runs",
        },
    }
    if as_json:
        print(json.dumps(facts))
        return
    for title, entries in facts.items():
        table = _table(title, Column(min_width=18))
        for key, value in entries.items():
            table.add_row(key, plain(value))
        say(table)
        say()
