"""Generates the reference of commands and options from their declarations, so that it is always up to date."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App

from geodl.cli import COMMANDS
from geodl.cli import app as geodl
from geodl.cli.options import Flags
from geodl.config import SECTIONS, presets
from geodl.config.registry import parts
from geodl.methods import METHODS

FLAGS = {"--" + name.replace("_", "-") for name in vars(Flags())}


def plain(text: str) -> str:
    """Escape what Markdown or a table would read as markup; code in backticks stays."""
    text = " ".join(text.split()).replace("\\[", "[")
    quoted = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(quoted), 2):
        quoted[i] = re.sub(r"([\\*_<>$\[\]])", r"\\\1", quoted[i])
    return "".join(quoted).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return []
    ruler = tuple("---" for _ in head)
    return [*(f"| {' | '.join(row)} |" for row in (head, ruler, *rows)), ""]


# ------------------------------------------------------------------------------------- commands


def leaves(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield the words and the app of every command that can be called."""
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        if command.default_command:
            yield (*path, name), command
        yield from leaves(command, (*path, name))


def arguments(command: App) -> tuple[list[tuple[str, ...]], bool]:
    """Return the table rows of a command's arguments, and whether it also takes the options of a run."""
    rows, takes_options = [], False
    collection = command.assemble_argument_collection(
        default_parameter=geodl.default_parameter, parse_docstring=True
    )
    found = [each for each in collection if each.show]
    takes_options = {"--preset", "--config", "--distill"} <= {
        name for each in found for name in each.names
    }
    for each in found:
        if takes_options and FLAGS.issuperset(each.names[:1]):
            continue
        default = each.field_info.default
        shown = "" if default in (None, False, "", ()) or each.required else f"`{default}`"
        names = ", ".join(f"`{name}`" for name in each.names)
        values = ", ".join(each.get_choices() or ())
        rows.append((names, plain(each.parameter.help or ""), plain(values), shown))
    return rows, takes_options


def usage(path: tuple[str, ...], command: App) -> str:
    """Return the usage line of a command: its words and its positional arguments."""
    words = ["geodl", *path]
    for each in command.assemble_argument_collection():
        name = each.names[0]
        if not name.startswith("-") and name != "*":
            words.append(name if each.required else f"[{name}]")
    return " ".join([*words, "[OPTIONS]"])


def commands() -> str:
    """Return the reference of the command line."""
    lines = ["# Command line", ""]
    lines += [
        "Every command of `geodl`, as `geodl COMMAND --help` prints it.",
        "",
    ]
    lines += [
        "A command that fails prints one line and exits with status 2; after Ctrl-C the status is 130, after SIGTERM 143.",
        "",
    ]
    order = [name.split()[0] for name, *_ in COMMANDS]
    for path, command in sorted(leaves(geodl), key=lambda each: order.index(each[0][0])):
        lines += [f"## geodl {' '.join(path)}", ""]
        help_text = command.help or ""
        for paragraph in help_text.split("\n\n"):
            lines += [plain(paragraph), ""]
        lines += ["```text", usage(path, command), "```", ""]
        example = re.search(r"`(geodl .*)`", str(command.help_epilogue or ""))
        if example:
            lines += ["Example:", "", "```sh", example[1], "```", ""]
        rows, takes_options = arguments(command)
        lines += table(("argument", "meaning", "values", "default"), rows)
        if takes_options:
            lines += ["It also takes all [options of a run](options.md).", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- options


KINDS = {
    bool: "switch",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    tuple: "list",
}
MANY = 1_000_000  # larger limits are not shown


def kind_of(info: Any) -> str:
    """Return the type of an option in plain words, or its values."""
    if get_origin(info.annotation) is Literal:
        return ", ".join(map(str, get_args(info.annotation)))
    choices = get_args(info.annotation) if get_origin(info.annotation) in (Union, UnionType) else ()
    types = [get_origin(part) or part for part in choices or (info.annotation,)]
    return " or ".join(dict.fromkeys(KINDS[each] for each in types if each in KINDS))


def bounds_of(info: Any) -> str:
    """Return the limits of a number, such as >= 0."""
    found = []
    for part in info.metadata:
        for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            limit = getattr(part, key, None)
            if limit is not None and abs(limit) < MANY:
                found.append(f"{sign} {limit}")
    return ", ".join(found)


def rows_of(fields: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each option: name, meaning, values, default."""
    rows = []
    for name, info in fields.items():
        own = [
            f"{method}: `{kind.Options.defaults[name]}`"
            for method, kind in METHODS.items()
            if name in kind.Options.defaults
        ]
        default = "" if info.default is None else f"`{info.default}`"
        values = ", ".join(filter(None, (kind_of(info), bounds_of(info))))
        shown = "; ".join(filter(None, (default, *own)))
        rows.append((f"`{name}`", plain(info.description or ""), plain(values), shown))
    return rows


def options() -> str:
    """Return the reference of the options of a run."""
    head = ("option", "meaning", "values", "default")
    lines = ["# Options", ""]
    lines += [
        "Every option of a run. `batch_size` is `--batch-size 64` on the command line, `batch_size = 64` in a TOML file, and "
        "`batch_size=64` in Python; a switch such as `flip` is `--flip` or `--no-flip`. Later sources override earlier ones: default, default of the method, preset, file, command line. "
        "`geodl config show` prints every value with its source.",
        "",
    ]
    lines += [
        "## Presets",
        "",
        *table(
            ("preset", "description"),
            [(f"`{name}`", plain(text)) for name, text in presets().items()],
        ),
    ]
    for title, section in SECTIONS.items():
        lines += [
            f"## {title}",
            "",
            plain(section.__doc__ or ""),
            "",
            *table(head, rows_of(section.model_fields)),
        ]
    for (kind, name), own in parts().items():
        if own.model_fields:
            lines += [f"## {kind.capitalize()} {name}", "", *table(head, rows_of(own.model_fields))]
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write both pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("commands", commands()), ("options", options())):
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:  # else Sphinx would read it again
            page.write_text(text)
