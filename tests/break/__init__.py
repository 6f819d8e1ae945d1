"""Thousands of hostile cases: damaged input must be refused in one line or make no difference.

A failure is a traceback, a hang, a write outside, or a wrong result presented as right. A family is a function that makes
one case from a source of randomness and an empty folder; `python -m tests.break --cases 500` runs 500 cases of each.
"""

from . import (  # noqa: F401  # their families register themselves
    commands,
    directories,
    growth,
    inputs,
    links,
    models,
    servers,
    strangers,
    sweeps,
    times,
    writes,
)
