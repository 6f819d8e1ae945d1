"""The options of a run on the command line: made from the configuration's classes, so that each is declared once."""

from collections.abc import Sequence
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from geodl.config import Effective, Layer, RunConfig, file_layers, groups_of_options, preset_layer
from geodl.methods import configure, kinds


def _flag(name: str, info: Any, group: Group, owners: Sequence[str]) -> tuple[str, Any, Any]:
    """Make one flag. Numbers and lists are taken as text: the configuration alone says what is allowed."""
    kind = info.annotation
    known = kind is bool or (get_origin(kind) is Literal and name != "method")
    taken: Any = kind if known else str
    shown = _default(name, info)
    text = (
        info.description + (f" ({', '.join(owners)})" if owners else "") + (f" \\[default: {shown}]" if shown else "")
    )
    names = {tuple: "A,B,...", int: "N", float: "X", Path: "PATH"}
    metavar = next((word for part, word in names.items() if part in _types(info)), "TEXT")
    parameter = Parameter(group=group, help=text, show_default=False, metavar=None if known else metavar)
    return name, Annotated[taken | None, parameter], None


def _types(info: Any) -> set[Any]:
    """Return the types that an option may have."""
    return {get_origin(part) or part for part in (info.annotation, *get_args(info.annotation))}


def _default(name: str, info: Any) -> str:
    """Show a default, and those of the methods that have their own."""
    own = [
        f"{method}: {_text(kind.model_fields[name].default)}"
        for method, kind in kinds().methods.items()
        if name in RunConfig.model_fields and name != "method" and kind.model_fields[name].default != info.default
    ]
    return "; ".join([_text(info.default), *own])


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _declare() -> type[Any]:
    """Make the class of all flags: preset and file, the common ones by group, those of single methods and distillations."""
    source = partial(Parameter, group=Group("Sources of options", sort_key=5))
    preset = source(help="Start from a preset; `geodl config presets` lists them.")
    flags: list[Any] = [
        ("preset", Annotated[str | None, preset], None),
        ("config", Annotated[Path | None, source(help="Read options from a TOML file.")], None),
    ]
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
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]


def layers_of(flags: Any, *more: Layer) -> list[Layer]:
    """Return the layers of options, later ones winning: preset, file, `more`, all other flags."""
    given = {name: value for name, value in vars(flags).items() if value is not None}
    preset, file = given.pop("preset", None), given.pop("config", None)
    layers = [preset_layer(preset)] if preset else []
    layers += file_layers(file) if file else []
    return [*layers, *more, Layer("command line", {key: _parse(key, value) for key, value in given.items()})]


def effective(flags: Any, **more: Any) -> Effective:
    """Merge preset, file and flags into a checked configuration."""
    return configure([*layers_of(flags), Layer("command line", more)])


def _parse(key: str, value: Any) -> Any:
    """Split lists: ``0.5,0.75``; groups of named classes: ``cat,dog;bird,fish``."""
    infos = [config.model_fields[key] for config in kinds().methods.values() if key in config.model_fields]
    allowed = {part for info in infos for part in _types(info)}
    if not isinstance(value, str) or tuple not in allowed:
        return value
    if ";" in value:
        return [group.split(",") for group in value.split(";")]
    return value.split(",") if "," in value or str not in allowed else value
