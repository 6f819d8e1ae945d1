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

    A key that is a method's name holds a table for that method alone; other parts have theirs in a table of their kind, such
    as ``[distillation.geodesic]``.
    """

    origin: str
    values: Mapping[str, Any]

    def table(self, name: str) -> "Layer":
        """Return a table by its name; an empty one where there is none."""
        found = self.values.get(name, {})
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{name} = {one_line(repr(found))} ({self.origin}): a table of options is allowed"
            )
        return Layer(f"{self.origin}, table {name}", found)


@dataclass(frozen=True)
class Effective:
    """A checked configuration and, for every option, where its value came from."""

    config: RunConfig
    origins: dict[str, str]


def resolve(layers: Sequence[Layer]) -> Effective:
    """Merge layers, later ones winning, over the defaults of the method they name, and check the result."""
    for layer in layers:
        _check_tables(layer)
    ((method, chosen),) = _named("method", layers).items()
    base = Layer(f"default of {method}", options_of(chosen).defaults)
    flat = [base, *(_flat(layer, method) for layer in layers)]
    used = {("method", method): options_of(chosen)}
    used |= {
        (kind, name): options_of(part)
        for kind in REGISTRIES
        for name, part in _in_use(kind, flat, chosen).items()
    }
    values: dict[str, Any] = {}
    origins = dict.fromkeys(COMMON, "default")
    for (_, name), options in used.items():
        origins |= dict.fromkeys(options.model_fields, f"default of {name}")
    for layer, given in zip([base, *layers], flat, strict=True):
        own = dict(given.values)
        for kind, name in used:
            own |= layer.table(kind).table(name).values if kind != "method" else {}
        for key, value in own.items():
            if key not in origins:
                raise ConfigError(_unknown(key, value, layer.origin, used))
        values |= own
        origins |= dict.fromkeys(own, layer.origin)
    return Effective(_build(values, used, origins), origins)


def _in_use(kind: str, layers: Sequence[Layer], method: Any) -> dict[str, Any]:
    """Return the parts of a kind, with options of their own, that are in use with a method."""
    registry = REGISTRIES[kind]
    if registry.option:
        used = _named(kind, layers)
    else:
        used = {name: part for name, part in registry.items() if registry.used(part, method)}
    return {name: part for name, part in used.items() if options_of(part).model_fields}


def _named(kind: str, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the part of a kind that the last layer names which names any."""
    registry = REGISTRIES[kind]
    value, origin = COMMON[registry.option].default, ""
    for layer in layers:
        if registry.option in layer.values:
            value, origin = layer.values[registry.option], layer.origin
    return registry.in_use(value, origin)


def _flat(layer: Layer, method: str) -> Layer:
    """Return a layer without its tables, but with the values of the method's."""
    tables = ({*REGISTRIES} - {"method"}) | {*REGISTRIES["method"]}
    common = {key: value for key, value in layer.values.items() if key not in tables}
    return Layer(layer.origin, {**common, **layer.table(method).values})


def _build(
    values: Mapping[str, Any],
    used: Mapping[tuple[str, str], type[Options]],
    origins: Mapping[str, str],
) -> RunConfig:
    """Return the configuration of these values, checked."""

    def those_of(fields: Collection[str]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in fields}

    try:
        own = {
            f"{kind} {name}": options(**those_of(options.model_fields))
            for (kind, name), options in used.items()
        }
        config = RunConfig(**those_of(COMMON), parts=own)
        for part in own.values():
            part.check(config)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def presets() -> dict[str, str]:
    """Return the names of the presets in the package, each with its first comment line."""
    folder = resources.files("geodl.config").joinpath("presets")
    found = {
        item.name.removesuffix(".toml"): item.read_text(encoding="utf-8").partition("\n")[0]
        for item in folder.iterdir()
        if item.name.endswith(".toml")
    }
    return {name: found[name].lstrip("# ") for name in sorted(found)}


def preset_layer(name: str) -> Layer:
    """Read a preset that ships inside the package."""
    if not isinstance(name, str) or name not in presets():
        allowed = ", ".join(presets())
        raise ConfigError(f"preset = {one_line(repr(name))}: allowed values are {allowed}")
    file = resources.files("geodl.config").joinpath("presets", f"{name}.toml")
    return Layer(f"preset {name}", tomllib.loads(file.read_text(encoding="utf-8")))


def file_layers(path: Path, *, imports: bool = True) -> list[Layer]:
    """Read a TOML file of options; its key ``preset`` names a preset to start from, ``import`` parts to import.

    imports: False leaves them out, for a file that nobody named: what it imports is code that runs.
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
    """Refuse unknown parts and keys also in tables that are not in use."""
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
    """Return whether a part's table may have an option: a method's also common ones, and those of parts it is used with."""
    having = owners(key)
    others = kind == "method" and (key in COMMON or any(other != "method" for other, _ in having))
    return others or (kind, name) in having


def _unknown(key: str, value: Any, origin: str, used: Collection[tuple[str, str]]) -> str:
    # Tables may be nested as deeply as no repr can follow.
    shown = f"{one_line(repr(key)[1:-1])} = {one_line(reprlib.repr(value))} ({origin})"
    if having := owners(key):
        allowed, there = (", ".join(map(" ".join, each)) for each in (having, used))
        return f"{shown}: allowed only with {allowed}, not with {there}"
    close = difflib.get_close_matches(key, [*all_options(), "preset"], n=1)
    hint = f"did you mean {close[0]}?" if close else "`geodl config show` lists the options"
    return f"{shown}: no such option; {hint}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not first["loc"]:
        return message
    key = str(first["loc"][0])
    return f"{key} = {one_line(repr(first['input']))} ({origins[key]}): {one_line(message)}"
