"""The exceptions of the package: each message is one line for the person at the keyboard."""

DISTRIBUTION = "geodl-cil"
"""The name under which pip knows the package; the name geodl belongs to another project."""


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class GeodlError(Exception):
    """Base of every error that geodl raises on purpose; the command line prints it and exits with code 2."""


class ConfigError(GeodlError):
    """An option has an unknown name, a wrong type, or an impossible value."""


class DataError(GeodlError):
    """A dataset or an image cannot be used as it is."""


class StoreError(GeodlError):
    """A run or model directory is locked, damaged, or belongs to another configuration."""


class TrainingError(GeodlError):
    """Training cannot go on, for example because the loss is not finite."""


class Interrupted(GeodlError):  # noqa: N818  # it is a wish of the user's, not an error
    """The user asked to stop; progress is saved and the same command goes on."""


class MissingExtraError(GeodlError):
    """An optional package is needed; the message says what to install."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs an optional package: {install(extra)}")
