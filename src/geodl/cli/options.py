"""The options of a run on the command line: made from the configuration's classes, so that each is declared once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from geodl.config import Effective, Layer, RunConfig, file_layers, groups_of_options, preset_layer
from geodl.methods import configure, kinds


def _flag(name: str, info: Any, group: Group, owners: Sequence[str]) -> tuple[str, Any, Any]:
    """Make one flag. Numbers and lists are taken as text: the configuration alone says what is allowed."""
    kind = info.annotation
    if kind is bool:
        taken: Any = bool
    elif get_origin(kind) is Literal and name != "method":
        taken = kind
    else:
        taken = str
    shown = _default(name, info)
    text = (
        info.description + (f" ({', '.join(owners)})" if owners else "") + (f" \\[default: {shown}]" if shown else "")
    )
    names = {int: "N", float: "X", Path: "PATH"}
    metavar = next((names[part] for part in (kind, *get_args(kind)) if part in names), "TEXT")
    if any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
        metavar = "A,B,..."
    parameter = Parameter(group=group, help=text, show_default=False, metavar=metavar if taken is str else None)
    return name, Annotated[taken | None, parameter], None


def _default(name: str, info: Any) -> str:
    """Show a default, and those of the methods that have their own."""
    common = _text(info.default)
    own = {
        method: _text(kind.model_fields[name].default)
        for method, kind in kinds().methods.items()
        if name in RunConfig.model_fields and name != "method" and kind.model_fields[name].default != info.default
    }
    return "; ".join([common, *(f"{method}: {value}" for method, value in own.items())]) if common or own else ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _declare() -> type[Any]:
    """Make the class of all flags: the common ones by group, then those of single methods and distillations."""
    flags = []
    for number, (title, options) in enumerate(groups_of_options(RunConfig).items()):
        group = Group(title, sort_key=10 + number)
        flags += [_flag(name, info, group, ()) for name, info in options.items()]
    known = kinds()
    for number, (title, owners) in enumerate(
        (("Options of single methods", known.methods), ("Options of single distillations", known.distillations))
    ):
        own: dict[str, tuple[Any, list[str]]] = {}
        for owner, kind in owners.items():
            for name, info in kind.model_fields.items():
                if name not in RunConfig.model_fields:
                    own.setdefault(name, (info, []))[1].append(owner)
        group = Group(title, sort_key=30 + number)
        flags += [_flag(name, info, group, names) for name, (info, names) in own.items()]
    made = make_dataclass("Flags", flags, frozen=True)
    made.__module__ = __name__  # where the command-line library looks for what the annotations mean
    return made


Flags = _declare()


_SOURCES = Group("Sources of options", sort_key=5)


@dataclass(frozen=True)
class Common:
    """Where options come from besides the flags."""

    preset: Annotated[
        str | None, Parameter(help="Start from a preset; `geodl config presets` lists them.", group=_SOURCES)
    ] = None
    config: Annotated[Path | None, Parameter(help="Read options from a TOML file.", group=_SOURCES)] = None


def layers_of(common: Common, flags: Any, *more: Layer) -> list[Layer]:
    """Return the layers of options, later ones winning: preset, file, `more`, flags."""
    layers: list[Layer] = [preset_layer(common.preset)] if common.preset else []
    layers += file_layers(common.config) if common.config else []
    given = {flag.name: getattr(flags, flag.name) for flag in fields(flags) if getattr(flags, flag.name) is not None}
    return [*layers, *more, Layer("command line", {key: _parse(key, value) for key, value in given.items()})]


def effective(common: Common, flags: Any, **more: Any) -> Effective:
    """Merge preset, file and flags into a checked configuration."""
    return configure([*layers_of(common, flags), Layer("command line", more)])


def _parse(key: str, value: Any) -> Any:
    """Split lists: ``0.5,0.75``; groups of named classes: ``cat,dog;bird,fish``."""
    allowed = {part for config in kinds().methods.values() for part in _types(config, key)}
    if not isinstance(value, str) or tuple not in allowed:
        return value
    if ";" in value:
        return [group.split(",") for group in value.split(";")]
    return value.split(",") if "," in value or str not in allowed else value


def _types(config: type[RunConfig], key: str) -> set[Any]:
    if key not in config.model_fields:
        return set()
    kind = config.model_fields[key].annotation
    return {get_origin(part) or part for part in (kind, *get_args(kind))}
