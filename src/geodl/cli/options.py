"""The options of a run on the command line: made from the registered options, so that each is declared once."""

from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from geodl.config import SECTIONS, Effective, Layer, all_options, file_layers, owners, preset_layer
from geodl.methods import METHODS, configure

METAVARS = {tuple: "A,B,...", int: "N", float: "X", Path: "PATH"}


def _flag(name: str, info: Any, group: Group) -> tuple[str, Any, Any]:
    """Make one flag. Numbers and lists are taken as text: the configuration alone says what is allowed."""
    known = info.annotation is bool or get_origin(info.annotation) is Literal
    taken: Any = info.annotation if known else str
    used_with = ", ".join(part for _, part in owners(name))
    shown = _default(name, info)
    text = info.description or ""
    text += f" ({used_with})" if used_with else ""
    text += f" \\[default: {shown}]" if shown else ""
    types = _types(info)
    metavar = next((word for kind, word in METAVARS.items() if kind in types), "TEXT")
    parameter = Parameter(
        group=group, help=text, show_default=False, metavar=None if known else metavar
    )
    return name, Annotated[taken | None, parameter], None


def _types(info: Any) -> set[Any]:
    """Return the types that an option may have."""
    return {get_origin(part) or part for part in (info.annotation, *get_args(info.annotation))}


def _default(name: str, info: Any) -> str:
    """Show a default, and those of the methods that have their own."""
    own = [
        f"{method}: {_text(kind.Options.defaults[name])}"
        for method, kind in METHODS.items()
        if name in kind.Options.defaults
    ]
    return "; ".join([_text(info.default), *own])


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _declare() -> type[Any]:
    """Make the class of all flags: preset and file, then options by heading."""
    sources = Group("Sources of options", sort_key=5)
    preset = Parameter(
        group=sources, help="Start from a preset; `geodl config presets` lists them."
    )
    file = Parameter(group=sources, help="Read options from a TOML file.")
    parts = Parameter(
        name="--import",
        group=sources,
        help="Import a file or module with parts of your own; can be repeated. Every command has it.",
        negative=(),
    )
    flags: list[Any] = [
        ("preset", Annotated[str | None, preset], None),
        ("config", Annotated[Path | None, file], None),
        ("imports", Annotated[list[str] | None, parts], None),
    ]
    headings: dict[str, dict[str, Any]] = {
        title: dict(section.model_fields) for title, section in SECTIONS.items()
    }
    for name, info in all_options().items():
        for kind, _ in owners(name)[:1]:
            headings.setdefault(f"Options of single {kind}s", {})[name] = info
    for number, (title, options) in enumerate(headings.items()):
        group = Group(title, sort_key=10 + number)
        flags += [_flag(name, info, group) for name, info in options.items()]
    made = make_dataclass("Flags", flags, frozen=True)
    made.__module__ = __name__  # where the command-line library looks for what the annotations mean
    return made


Flags = _declare()
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]


def layers_of(flags: Any, *more: Layer) -> list[Layer]:
    """Return the layers of options, later ones winning: preset, file, `more`, all other flags."""
    given = {name: value for name, value in vars(flags).items() if value is not None}
    given.pop("imports", None)  # done before anything was parsed
    preset, file = given.pop("preset", None), given.pop("config", None)
    layers = [preset_layer(preset)] if preset else []
    layers += file_layers(file) if file else []
    parsed = {key: _parse(key, value) for key, value in given.items()}
    return [*layers, *more, Layer("command line", parsed)]


def effective(flags: Any, **more: Any) -> Effective:
    """Merge preset, file and flags into a checked configuration."""
    return configure([*layers_of(flags), Layer("command line", more)])


def _parse(key: str, value: Any) -> Any:
    """Split lists: ``0.5,0.75``; groups of named classes: ``cat,dog;bird,fish``."""
    allowed = _types(all_options()[key])
    if not isinstance(value, str) or tuple not in allowed:
        return value
    if ";" in value:
        return [group.split(",") for group in value.split(";")]
    return value.split(",") if "," in value or str not in allowed else value
