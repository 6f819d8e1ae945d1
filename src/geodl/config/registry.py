"""Registries look up the parts of a run by name: methods, distillations, classifiers, ...; plug-ins add theirs the same way."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from geodl.config.options import COMMON, Options
from geodl.core.errors import ConfigError
from geodl.core.text import one_line

T = TypeVar("T")
P = TypeVar("P")


class Registry(Mapping[str, T]):
    """A mapping from names to the parts of one kind, such as the methods.

    A part declares its own options in its attribute `Options`, a subclass of `geodl.config.Options`.

    Args:
        kind: the word for one part, such as "distillation"; also the table of its options in a TOML file.
        option: the option that selects a part, such as "distill"; empty: `used` decides.
        optional: whether that option may also be "none".
        prefixes: prefixes of further values of the option, such as "timm:", each with its form in messages.
        used: whether a part is in use with a method.
    """

    def __init__(
        self,
        kind: str,
        option: str = "",
        *,
        optional: bool = False,
        prefixes: Mapping[str, str] | None = None,
        used: Callable[[T, Any], bool] = lambda part, method: False,
    ) -> None:
        self.kind, self.option, self.optional, self.used = kind, option, optional, used
        self.prefixes = dict(prefixes or {})
        self._parts: dict[str, T] = {}
        REGISTRIES[kind] = self

    def __getitem__(self, name: str) -> T:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, name: str, part: T) -> None:
        """Register a part; its name and the names of its options must not be taken."""
        if self.knows(name) and not _same_definition(self.get(name), part):
            raise ConfigError(f"{self.kind} {name!r}: this name is already registered")
        for key in options_of(part).model_fields:
            # Parts that one option selects may share names: only one of them is in use at a time.
            others = [
                f"{kind} {other}"
                for kind, other in owners(key)
                if kind != self.kind or (not self.option and other != name)
            ]
            if key in COMMON or others:
                other = ", ".join(others) or "every run"
                raise ConfigError(f"{self.kind} {name!r}: {key} is already an option of {other}")
        if hasattr(part, "name"):  # not the title of a class it inherits from
            part.title = vars(part).get("title", name)  # type: ignore[attr-defined]
        self._parts[name] = part

    def register(self, name: str, options: type[Options] | None = None) -> Callable[[P], P]:
        """Return a decorator that registers a function or class under a name, with its own options if any."""

        def decorate(part: P) -> P:
            if options is not None:
                part.Options = options  # type: ignore[attr-defined]
            self.add(name, part)  # type: ignore[arg-type]  # a function that is more than T
            return part

        return decorate

    def named(self, part: P) -> P:
        """Register a class under its attribute `name`; used as a decorator."""
        self.add(part.name, part)  # type: ignore[attr-defined, arg-type]
        return part

    def name_of(self, part: Any) -> str:
        """Return the name of a class or function, registering it first if necessary."""
        name = str(getattr(part, "name", part.__name__))
        if self.get(name) is not part:
            self.add(name, part)
        return name

    def remove(self, name: str) -> None:
        """Remove a part from the registry."""
        del self._parts[name]

    @property
    def names(self) -> list[str]:
        """All names that select a part, and "none" if the option is optional."""
        return ["none", *self._parts] if self.optional else [*self._parts]

    def knows(self, value: Any) -> bool:
        """Return whether a value of the option is allowed."""
        return isinstance(value, str) and (
            value in self.names or value.startswith(tuple(self.prefixes))
        )

    def selected(self, value: Any, origin: str = "") -> dict[str, T]:
        """Return the part that a value of the option selects, by its name; empty for "none" and prefixed values."""
        if not self.knows(value):
            where = f" ({origin})" if origin else ""
            allowed = ", ".join([*self.names, *filter(None, self.prefixes.values())])
            raise ConfigError(
                f"{self.option} = {one_line(repr(value))}{where}: allowed values are {allowed}; "
                "--import loads parts of your own"
            )
        return {value: self._parts[value]} if value in self._parts else {}


def _same_definition(old: Any, new: Any) -> bool:
    """Return whether a part replaces its own earlier definition, as when a notebook cell is run again."""
    name = getattr(new, "__qualname__", None)
    return name == getattr(old, "__qualname__", "") and old.__module__ == new.__module__


REGISTRIES: dict[str, Registry[Any]] = {}
"""All registries by the kind of their parts."""


def options_of(part: Any) -> type[Options]:
    """Return the class of a part's own options."""
    return getattr(part, "Options", Options)


def parts() -> dict[tuple[str, str], type[Options]]:
    """Return the class of options of each part by (kind, name)."""
    return {
        (kind, name): options_of(part)
        for kind, registry in REGISTRIES.items()
        for name, part in registry.items()
    }


def owners(key: str) -> list[tuple[str, str]]:
    """Return the parts, as (kind, name), that have an option."""
    return [owner for owner, options in parts().items() if key in options.model_fields]


def all_options() -> dict[str, Any]:
    """Return the pydantic field of every option by name, common options first."""
    fields = dict(COMMON)
    for options in parts().values():
        fields |= options.model_fields
    return fields


def missing_part(values: Mapping[str, Any]) -> str | None:
    """Return the first option whose value names an unregistered part, or None."""
    for registry in REGISTRIES.values():
        if registry.option in values and not registry.knows(values[registry.option]):
            return registry.option
    return None
