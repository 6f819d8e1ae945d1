"""Layers of values (preset, file, command line) merged into one checked configuration."""

import difflib
import reprlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from geodl.config.options import COMMON, Options, RunConfig
from geodl.config.plugins import import_parts
from geodl.config.registry import REGISTRIES, all_options, options_of, owners
from geodl.core.errors import ConfigError, StoreError
from geodl.core.files import read_file
from geodl.core.text import one_line

TOML_LIMIT = 2**20  # bytes


@dataclass(frozen=True)
class Layer:
    """Values from one origin.

    A key that is a method's name holds a table for that method alone; tables of other parts are grouped by kind, as in
    ``[distillation.geodesic]``.
    """

    origin: str
    values: Mapping[str, Any]

    def table(self, name: str) -> "Layer":
        """Return a table by name; empty if the layer has none."""
        values = self.values.get(name, {})
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{name} = {one_line(repr(values))} ({self.origin}): expected a table of options"
            )
        return Layer(f"{self.origin}, table {name}", values)


@dataclass(frozen=True)
class Effective:
    """A validated configuration and the origin of each option's value."""

    config: RunConfig
    origins: dict[str, str]


def resolve(layers: Sequence[Layer]) -> Effective:
    """Merge layers, later ones winning, over the defaults of the selected method, and check the result."""
    for layer in layers:
        _check_tables(layer)
    ((method, chosen),) = _selected("method", layers).items()
    layers = [Layer(f"default of {method}", options_of(chosen).defaults), *layers]
    flat = [_flat(layer, method) for layer in layers]
    used = {("method", method): options_of(chosen)}
    for kind, registry in REGISTRIES.items():
        selected = _selected(kind, flat) if registry.option else registry
        for name, part in selected.items():
            options = options_of(part)
            if options.model_fields and (registry.option or registry.used(part, chosen)):
                used[kind, name] = options
    values: dict[str, Any] = {}
    origins = dict.fromkeys(COMMON, "default")
    for (_, name), options in used.items():
        origins |= dict.fromkeys(options.model_fields, f"default of {name}")
    for layer, common in zip(layers, flat, strict=True):
        own = dict(common.values)
        for kind, name in used:
            own |= layer.table(kind).table(name).values if kind != "method" else {}
        for key, value in own.items():
            if key not in origins:
                raise ConfigError(_unknown(key, value, layer.origin, used))
        values |= own
        origins |= dict.fromkeys(own, layer.origin)
    return Effective(_build(values, used, origins), origins)


def _selected(kind: str, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the part of a kind that the last layer with a value of its option selects."""
    registry = REGISTRIES[kind]
    value, origin = COMMON[registry.option].default, ""
    for layer in layers:
        if registry.option in layer.values:
            value, origin = layer.values[registry.option], layer.origin
    return registry.selected(value, origin)


def _flat(layer: Layer, method: str) -> Layer:
    """Return a layer without its tables, but with the values of the method's table."""
    tables = ({*REGISTRIES} - {"method"}) | {*REGISTRIES["method"]}
    common = {key: value for key, value in layer.values.items() if key not in tables}
    return Layer(layer.origin, {**common, **layer.table(method).values})


def _build(
    values: Mapping[str, Any],
    used: Mapping[tuple[str, str], type[Options]],
    origins: Mapping[str, str],
) -> RunConfig:
    """Return the validated configuration."""

    def only(fields: Collection[str]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in fields}

    try:
        parts = {
            f"{kind} {name}": options(**only(options.model_fields))
            for (kind, name), options in used.items()
        }
        config = RunConfig(**only(COMMON), parts=parts)
        for part in parts.values():
            part.check(config)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def presets() -> dict[str, str]:
    """Return the presets in the package: name -> description (the first comment line)."""
    files = resources.files("geodl.config").joinpath("presets").iterdir()
    first_lines = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8").partition("\n")[0]
        for file in files
        if file.name.endswith(".toml")
    }
    return {name: first_lines[name].lstrip("# ") for name in sorted(first_lines)}


def preset_layer(name: str) -> Layer:
    """Read a preset of the package."""
    if not isinstance(name, str) or name not in presets():
        allowed = ", ".join(presets())
        raise ConfigError(f"preset = {one_line(repr(name))}: allowed values are {allowed}")
    file = resources.files("geodl.config").joinpath("presets", f"{name}.toml")
    return Layer(f"preset {name}", tomllib.loads(file.read_text(encoding="utf-8")))


def file_layers(path: Path, *, imports: bool = True) -> list[Layer]:
    """Read a TOML file of options.

    Its key ``preset`` names a preset to start from, ``import`` lists files and modules to import.
    imports: False ignores that list, for files that the user did not name: importing runs code.
    """
    try:
        values = tomllib.loads(read_file(path, limit=TOML_LIMIT).decode())
    except StoreError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause or error
        raise ConfigError(f"config file {path}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"config file {path}: tables or lists are nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise ConfigError(f"config file {path}: not TOML: {one_line(error)}") from None
    names = values.pop("import", [])
    import_parts(names if imports else [])
    below = [preset_layer(values.pop("preset"))] if "preset" in values else []
    return [*below, Layer(f"file {path}", values)]


def _check_tables(layer: Layer) -> None:
    """Refuse unknown parts and keys, also in tables of parts that are not in use."""
    for kind, registry in REGISTRIES.items():
        outer = layer if kind == "method" else layer.table(kind)
        for name in registry if kind == "method" else outer.values:
            if name not in registry:
                shown = f"{kind}.{one_line(repr(name)[1:-1])} ({layer.origin})"
                raise ConfigError(f"{shown}: allowed values are {', '.join(registry)}")
            table = outer.table(name)
            for key, value in table.values.items():
                if not _allowed_in_table(key, kind, name):
                    used = {(kind, name): options_of(registry[name])}
                    raise ConfigError(_unknown(key, value, table.origin, used))


def _allowed_in_table(key: str, kind: str, name: str) -> bool:
    """Return whether an option may stand in a part's table; a method's may hold common options and those of other kinds."""
    parts = owners(key)
    if kind == "method" and key != "method":
        return (
            key in COMMON or (kind, name) in parts or any(other != "method" for other, _ in parts)
        )
    return (kind, name) in parts


def _unknown(key: str, value: Any, origin: str, used: Collection[tuple[str, str]]) -> str:
    """Return the message for an option that does not exist, or not with the parts in use."""
    # reprlib: tables may be nested more deeply than repr can follow.
    shown = f"{one_line(repr(key)[1:-1])} = {one_line(reprlib.repr(value))} ({origin})"
    if having := owners(key):
        allowed, present = (", ".join(map(" ".join, parts)) for parts in (having, used))
        return f"{shown}: allowed only with {allowed}, not with {present}"
    if key in COMMON:
        return f"{shown}: a common option is not allowed in this table"
    close = difflib.get_close_matches(key, [*all_options(), "preset"], n=1)
    hint = f"did you mean {close[0]}?" if close else "`geodl config show` lists the options"
    return f"{shown}: no such option; {hint}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Return pydantic's first error as one line with key, value and origin."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not first["loc"]:
        return message
    key = str(first["loc"][0])
    return f"{key} = {one_line(repr(first['input']))} ({origins[key]}): {one_line(message)}"
