"""Plug-ins: files, modules and installed packages that register parts."""

import logging
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from geodl.core.errors import ConfigError
from geodl.core.text import one_line, raised

GROUP = "geodl.plugins"
"""The entry point group of packages with modules that register parts."""
log = logging.getLogger("geodl")
IMPORTED: list[str] = []
_installed: list[str] = []


def import_parts(names: Iterable[str]) -> None:
    """Import files (``my_part.py``) and modules (``my_package.parts``) that register parts, each once.

    A file can import others in its folder.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"import = {names!r}: expected a list of files and modules")
    for name in names:
        path = Path(name).expanduser().resolve() if name.endswith(".py") else None
        place = str(path or name)
        if place in IMPORTED:
            continue
        try:
            _run(path) if path else import_module(name)
        except Exception as error:
            raise ConfigError(f"import = {name}: {raised(error)}") from error
        IMPORTED.append(place)


def imported() -> list[str]:
    """Return the absolute paths and module names that `import_parts` imported in this process."""
    return list(IMPORTED)


def import_installed() -> None:
    """Import the modules of the entry point group, each once; a broken one is skipped with a warning."""
    for entry in entry_points(group=GROUP):
        if entry.value in _installed:
            continue
        _installed.append(entry.value)
        try:
            entry.load()
        except Exception as error:
            log.warning("plug-in %s (%s) is skipped: %s", entry.name, entry.value, one_line(error))


def _run(path: Path) -> None:
    """Import a file under a unique module name."""
    if not path.is_file():
        raise FileNotFoundError("no such file")
    name = f"geodl_import_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # classes and their source are looked up here
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
