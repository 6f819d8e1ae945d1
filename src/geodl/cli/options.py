"""The options of a run as command-line flags, made from the registered options, so that each is declared once."""

from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from geodl.config import SECTIONS, Effective, Layer, all_options, file_layers, owners, preset_layer
from geodl.methods import METHODS, configure

METAVARS = {tuple: "A,B,...", int: "N", float: "X", Path: "PATH"}


def _flag(name: str, info: Any, group: Group) -> tuple[str, Any, Any]:
    """Return the field of one flag. Numbers and lists stay text: only the configuration checks values."""
    known = info.annotation is bool or get_origin(info.annotation) is Literal
    annotation: Any = info.annotation if known else str
    parts = ", ".join(part for _, part in owners(name))
    default = _default(name, info)
    text = info.description or ""
    text += f" ({parts})" if parts else ""
    text += f" \\[default: {default}]" if default else ""
    types = _types(info)
    metavar = next((word for kind, word in METAVARS.items() if kind in types), "TEXT")
    parameter = Parameter(
        group=group,
        help=text,
        show_default=False,
        metavar=None if known else metavar,
        negative=None,  # --no-flip
    )
    return name, Annotated[annotation | None, parameter], None


def _types(info: Any) -> set[Any]:
    """Return the types that an option may have."""
    return {get_origin(part) or part for part in (info.annotation, *get_args(info.annotation))}


def _default(name: str, info: Any) -> str:
    """Return the default as text, with those of the methods that have their own."""
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
    """Return the class of all flags: preset and file, then options by heading."""
    sources = Group("Sources of options", sort_key=5)
    preset = Parameter(
        group=sources, help="Start from a preset; `geodl config presets` lists them."
    )
    file = Parameter(group=sources, help="Read options from a TOML file.")
    imports = Parameter(
        name="--import",
        group=sources,
        help="Import a file or module with your own methods, classifiers or data sources; can be repeated. Every command has it.",
    )
    flags: list[Any] = [
        ("preset", Annotated[str | None, preset], None),
        ("config", Annotated[Path | None, file], None),
        ("imports", Annotated[list[str] | None, imports], None),
    ]
    headings = {title: dict(section.model_fields) for title, section in SECTIONS.items()}
    for name, info in all_options().items():
        for kind, _ in owners(name)[:1]:
            headings.setdefault(f"Options of single {kind}s", {})[name] = info
    for number, (title, options) in enumerate(headings.items()):
        group = Group(title, sort_key=10 + number)
        flags += [_flag(name, info, group) for name, info in options.items()]
    made = make_dataclass("Flags", flags, frozen=True)
    made.__module__ = __name__  # where cyclopts resolves the annotations
    return Parameter(name="*")(made)


Flags = _declare()


def layers_of(flags: Any, *more: Layer) -> list[Layer]:
    """Return the layers of options, later ones winning: preset, file, `more`, all other flags."""
    given = {name: value for name, value in vars(flags).items() if value is not None}
    given.pop("imports", None)  # imported before the command line was parsed
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
    types = _types(all_options()[key])
    if not isinstance(value, str) or tuple not in types:
        return value
    if ";" in value:
        return [group.split(",") for group in value.split(";")]
    return value.split(",") if "," in value or str not in types else value
