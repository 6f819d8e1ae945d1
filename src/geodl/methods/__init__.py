"""The methods, one file each; importing the package registers them."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from geodl.config import Layer, RunConfig, all_options, import_installed
from geodl.config import resolve as configure
from geodl.config.registry import missing_part
from geodl.core.errors import ConfigError
from geodl.methods.method import METHODS, Losses, Method, Schedule, Stage, register
from geodl.model.phase import Phase

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "Losses",
    "Method",
    "Phase",
    "Schedule",
    "Stage",
    "build",
    "configure",
    "not_loaded",
    "register",
]


def build(config: RunConfig) -> Method:
    """Return the method that a configuration names."""
    return METHODS[config.method](config)


def stored_config(values: Mapping[str, Any]) -> RunConfig:
    """Return a configuration that was stored with a model, without options that no longer exist.

    A missing part is an error that names the files to import: a directory never imports code by itself.
    """
    if (option := missing_part(values)) is not None:
        raise ConfigError(not_loaded(option, values[option], values))
    known = {key: value for key, value in values.items() if key in all_options()}
    return configure([Layer("the stored configuration", known)]).config


def not_loaded(option: str, value: Any, values: Mapping[str, Any]) -> str:
    """Return the error message for a stored configuration whose part is not registered."""
    flags = " ".join(f"--import {name}" for name in values.get("imports", ["FILE"]))
    return (
        f"{option} = {value!r}: a part that is not loaded; {flags} (in Python: import it) loads it"
    )


import_installed()  # plug-ins need everything above
