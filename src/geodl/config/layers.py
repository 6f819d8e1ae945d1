"""Layers of values (preset, file, command line) merged into one checked configuration."""

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError, create_model

from geodl.config.options import RunConfig, roles_of
from geodl.errors import ConfigError, StoreError
from geodl.files import read_file
from geodl.text import one_line

TOML_LIMIT = 2**20  # bytes


@dataclass(frozen=True)
class Layer:
    """Values from one origin.

    A key that is a method's name holds a table for that method alone, and ``distillation`` a table of such tables.
    """

    origin: str
    values: Mapping[str, Any]

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table by its name; an empty one where there is none."""
        found = self.values.get(name, {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name} = {one_line(repr(found))} in {self.origin}: a table of options is allowed here")
        return found


@dataclass(frozen=True)
class Effective:
    """A checked configuration and, for every option, where its value came from."""

    config: RunConfig
    origins: dict[str, str]


@dataclass(frozen=True)
class Kinds:
    """The classes of options there are: those of the methods, and what the distillations add."""

    methods: Mapping[str, type[RunConfig]]
    distillations: Mapping[str, type[BaseModel]]

    def of(self, method: str, distill: str) -> type[RunConfig]:
        """Return the class of a method with a distillation: its options are there only where it is in use."""
        return self.methods[method] if distill == "none" else _joined(self.methods[method], self.distillations[distill])


@cache
def _joined(method: type[RunConfig], distillation: type[BaseModel]) -> type[RunConfig]:
    bases: Any = (distillation, method)
    made: Any = create_model(f"{method.__name__}And{distillation.__qualname__}", __base__=bases)
    return cast(type[RunConfig], made)


def resolve(layers: Sequence[Layer], kinds: Kinds) -> Effective:
    """Merge layers, later ones winning, over the defaults of the method they name, and check the result."""
    method = _last(layers, "method", RunConfig.model_fields["method"].default, kinds.methods)
    flats = []
    for layer in layers:
        _check_tables(layer, kinds)
        common = {key: value for key, value in layer.values.items() if key not in (*kinds.methods, "distillation")}
        flats.append(Layer(layer.origin, {**common, **layer.table(method)}))
    allowed = ["none", *kinds.distillations]
    distill = _last(flats, "distill", kinds.methods[method].model_fields["distill"].default, allowed)
    kind = kinds.of(method, distill)
    values: dict[str, Any] = {}
    origins = {name: _default_origin(name, info, method, distill) for name, info in kind.model_fields.items()}
    for layer, flat in zip(layers, flats, strict=True):
        own = {**flat.values, **layer.table("distillation").get(distill, {})}
        for key in own:
            if key not in kind.model_fields:
                raise ConfigError(_unknown(key, layer.origin, f"{method} with distill = {distill}", kind, kinds))
        values |= own
        origins |= dict.fromkeys(own, layer.origin)
    try:
        return Effective(kind(**values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def _last(layers: Sequence[Layer], key: str, default: str, allowed: Collection[str]) -> str:
    """Return what the last layer says of a choice by name."""
    named = [layer for layer in layers if key in layer.values]
    value, origin = (named[-1].values[key], f" ({named[-1].origin})") if named else (default, "")
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key} = {one_line(repr(value))}{origin}: {', '.join(allowed)} are allowed")
    return value


def _default_origin(name: str, info: Any, method: str, distill: str) -> str:
    common = RunConfig.model_fields.get(name)
    if name == "method" or (common is not None and common.default == info.default):
        return "default"
    return f"default of {distill if roles_of(info)['group'] == 'Distillation' else method}"


def presets() -> dict[str, str]:
    """Return the names of the presets in the package, each with its first comment line."""
    files = (item for item in resources.files("geodl").joinpath("presets").iterdir() if item.name.endswith(".toml"))
    found = {
        item.name.removesuffix(".toml"): item.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for item in files
    }
    return dict(sorted(found.items()))


def preset_layer(name: str) -> Layer:
    """Read a preset that ships inside the package."""
    if not isinstance(name, str) or name not in presets():
        raise ConfigError(f"preset = {one_line(repr(name))}: {', '.join(presets())} are allowed")
    text = resources.files("geodl").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return Layer(f"preset {name}", tomllib.loads(text))


def file_layers(path: Path) -> list[Layer]:
    """Read a TOML file of options; its key ``preset`` names a preset to stand on."""
    try:
        values = tomllib.loads(read_file(path, limit=TOML_LIMIT).decode())
    except StoreError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause or error
        raise ConfigError(f"config file {path}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"config file {path}: tables or lists inside each other too deep") from None
    except ValueError as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise ConfigError(f"config file {path}: not TOML: {one_line(error)}") from None
    below = [preset_layer(values.pop("preset"))] if "preset" in values else []
    return [*below, Layer(f"file {path}", values)]


def _check_tables(layer: Layer, kinds: Kinds) -> None:
    """Refuse unknown keys also in the tables of methods and distillations that are not used now."""
    distillations = layer.table("distillation")
    for name in distillations:
        if name not in kinds.distillations:
            allowed = ", ".join(kinds.distillations)
            shown = f"distillation.{one_line(repr(name)[1:-1])} ({layer.origin})"
            raise ConfigError(f"{shown}: no such distillation; {allowed} are allowed")
    tables: list[tuple[str, type[BaseModel], Mapping[str, Any]]]
    tables = [(name, kind, layer.table(name)) for name, kind in kinds.methods.items()]
    inner = Layer(f"{layer.origin}, table distillation", distillations)
    tables += [(name, kind, inner.table(name)) for name, kind in kinds.distillations.items()]
    for name, kind, table in tables:
        for key in table:
            # A method's table may also hold options of the distillation that it is used with.
            distills = any(key in each.model_fields for each in kinds.distillations.values())
            if key not in kind.model_fields and not (name in kinds.methods and distills):
                raise ConfigError(_unknown(key, f"{layer.origin}, table {name}", name, kind, kinds))


def _unknown(key: str, origin: str, user: str, kind: type[BaseModel], kinds: Kinds) -> str:
    owners = [name for name, each in kinds.methods.items() if key in each.model_fields]
    owners += [f"the distillation {name}" for name, each in kinds.distillations.items() if key in each.model_fields]
    shown = one_line(repr(key)[1:-1])
    if owners:
        return f"{shown} ({origin}): an option of {', '.join(owners)}, not of {user}"
    close = difflib.get_close_matches(key, [*kind.model_fields, "preset"], n=1)
    hint = f"did you mean {close[0]}?" if close else "`geodl config show` lists the options"
    return f"{shown} ({origin}): no such option; {hint}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not first["loc"]:
        return message
    key = str(first["loc"][0])
    return f"{key} = {one_line(repr(first['input']))} ({origins[key]}): {one_line(message)}"
