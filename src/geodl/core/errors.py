"""The exceptions of the package; each message is one line for the user."""

DISTRIBUTION = "geodl-cil"
"""The name of the package for pip; on PyPI, geodl is another project."""


def install(extra: str) -> str:
    """Return the pip command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class GeodlError(Exception):
    """Base class of the errors that geodl raises; the command line prints them and exits with code 2."""


class ConfigError(GeodlError):
    """An option has an unknown name, a wrong type, or an impossible value."""


class DataError(GeodlError):
    """A dataset or an image cannot be used."""


class StoreError(GeodlError):
    """A run or model directory is locked, damaged, or belongs to another configuration."""


class TrainingError(GeodlError):
    """Training cannot continue, for example because the loss is not finite."""


class Interrupted(GeodlError):  # noqa: N818  # the user's request, not an error
    """The user asked to stop; progress is saved, and the same command resumes."""


class MissingExtraError(GeodlError):
    """An optional package is missing; the message has the command that installs it."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs an optional package: {install(extra)}")
