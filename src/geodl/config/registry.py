"""Registries: the parts that a run is made of, each found by its name; plug-ins add theirs the same way."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from geodl.config.options import COMMON, Options
from geodl.core.errors import ConfigError
from geodl.core.text import one_line

T = TypeVar("T")
P = TypeVar("P")


class Registry(Mapping[str, T]):
    """The parts of one kind by name, such as the methods.

    A part may have options of its own: its attribute `Options`, a subclass of `geodl.config.Options`.

    Args:
        kind: what one part is called, such as "distillation"; also the table of its options in a TOML file.
        option: the option that names the part in use, such as "distill"; empty: `used` tells.
        optional: whether that option may also be "none".
        prefixes: beginnings of other values that the option may have, each with how a message shows it.
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
        """Register a part; its name, and the names of its options, must be free."""
        if self.knows(name) and not _same_place(self.get(name), part):
            raise ConfigError(f"{self.kind} {name!r}: there is one of this name already")
        for key in options_of(part).model_fields:
            # Of parts that one option names, one is in use at a time.
            others = [
                f"{kind} {other}"
                for kind, other in owners(key)
                if kind != self.kind or (not self.option and other != name)
            ]
            if key in COMMON or others:
                other = ", ".join(others) or "every run"
                raise ConfigError(f"{self.kind} {name!r}: its option {key} is one of {other}")
        if hasattr(part, "name"):  # not the title of a class it inherits from
            part.title = vars(part).get("title", name)  # type: ignore[attr-defined]
        self._parts[name] = part

    def register(self, name: str, options: type[Options] | None = None) -> Callable[[P], P]:
        """Return a decorator that registers a function or class by name, with options of its own."""

        def decorate(part: P) -> P:
            if options is not None:
                part.Options = options  # type: ignore[attr-defined]
            self.add(name, part)  # type: ignore[arg-type]  # a function that is more than T
            return part

        return decorate

    def named(self, part: P) -> P:
        """Register a class by its attribute `name`; a decorator of the class."""
        self.add(part.name, part)  # type: ignore[attr-defined, arg-type]
        return part

    def name_of(self, part: Any) -> str:
        """Return the name of a part, a class or function, and register it where it is not registered yet."""
        name = str(getattr(part, "name", part.__name__))
        if self.get(name) is not part:
            self.add(name, part)
        return name

    def remove(self, name: str) -> None:
        """Forget a part."""
        del self._parts[name]

    @property
    def allowed(self) -> list[str]:
        """The values that the option may have, for a message."""
        none = ["none"] if self.optional else []
        return [*none, *self._parts, *filter(None, self.prefixes.values())]

    def knows(self, value: Any) -> bool:
        """Return whether the option may have a value."""
        known = ("none", *self._parts) if self.optional else (*self._parts,)
        return isinstance(value, str) and (value in known or value.startswith(tuple(self.prefixes)))

    def in_use(self, value: Any, origin: str = "") -> dict[str, T]:
        """Return the part that a value of the option names; none for "none"."""
        if not self.knows(value):
            where = f" ({origin})" if origin else ""
            raise ConfigError(
                f"{self.option} = {one_line(repr(value))}{where}: "
                f"allowed values are {', '.join(self.allowed)}; --import loads parts of your own"
            )
        return {value: self._parts[value]} if value in self._parts else {}


def _same_place(old: Any, new: Any) -> bool:
    """Return whether two parts are one definition: a cell of a notebook that is run again defines it again."""
    name = getattr(new, "__qualname__", None)
    return name == getattr(old, "__qualname__", "") and old.__module__ == new.__module__


REGISTRIES: dict[str, Registry[Any]] = {}
"""Every registry by the kind of its parts."""


def options_of(part: Any) -> type[Options]:
    """Return the class of a part's own options."""
    return getattr(part, "Options", Options)


def parts() -> dict[tuple[str, str], type[Options]]:
    """Return the options of every part: (kind, name) -> their class."""
    return {
        (kind, name): options_of(part)
        for kind, registry in REGISTRIES.items()
        for name, part in registry.items()
    }


def owners(key: str) -> list[tuple[str, str]]:
    """Return which parts, (kind, name), have an option."""
    return [owner for owner, options in parts().items() if key in options.model_fields]


def all_options() -> dict[str, Any]:
    """Return every option there is: name -> pydantic's field; the common ones first."""
    found = dict(COMMON)
    for options in parts().values():
        found |= options.model_fields
    return found


def missing_part(values: Mapping[str, Any]) -> str | None:
    """Return the option that names a part which is not registered; None where all are."""
    for registry in REGISTRIES.values():
        if registry.option in values and not registry.knows(values[registry.option]):
            return registry.option
    return None
