"""The runs of a sweep: points of grids or random draws, each validated before anything starts."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_args

from geodl.bench.experiment import load_data, run_name, scenario_of
from geodl.bench.report.results import label_of
from geodl.config import SECTIONS, Layer, RunConfig, all_options, file_layers, imported
from geodl.core.content import JSON_LIMIT, fingerprint
from geodl.core.errors import ConfigError
from geodl.core.files import atomic_write, make_below, names_in, read_file, unlink
from geodl.core.keys import derive
from geodl.core.text import printable
from geodl.data.dataset import Dataset, source_options
from geodl.learning.learner import Learner
from geodl.learning.shared_base import base_options
from geodl.methods import build, configure
from geodl.store import Directory, exists

FOLDER = ".sweep"
"""The directory of a sweep's own files beside its runs; hidden, so that `runs/*` matches the runs only."""

Point = dict[str, Any]
"""Values of the varied options."""


def completed(out: Path) -> int:
    """Return the number of complete phases of a run, 0 if it does not exist yet."""
    return Directory(out).completed() if exists(out) else 0


@dataclass(frozen=True)
class Job:
    """One run of a sweep: configuration, directory and label."""

    config: RunConfig
    out: Path
    label: str
    allow_environment_change: bool = field(default=False, kw_only=True)

    def file(self, kind: str) -> Path:
        """Return the path of a file of the sweep about this run; kind: toml (the options), log, error or stopped."""
        return self.out.parent / FOLDER / f"{self.out.name}.{kind}"

    def done(self) -> int:
        """Return the number of complete phases."""
        return completed(self.out)

    def complete(self) -> bool:
        """Return whether all phases are complete."""
        return exists(self.out) and self.done() == Directory(self.out).phases

    def resolved(self) -> Self:
        """Return the job with an absolute directory, for a process with another working directory."""
        return replace(self, out=self.out.resolve())

    def toml(self) -> str:
        """Return a file for `geodl run --config`: the label as comment, and all options that are set."""
        values = self.config.flat("json") | {"import": imported()}
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in values.items()
            if value is not None
        ]
        return "\n".join([f"# {printable(self.label)}", *lines, ""])

    def prepare(self) -> None:
        """Write the options file for the run's process and remove the marks of an earlier attempt."""
        make_below(self.out.parent, FOLDER)
        atomic_write(self.file("toml"), self.toml().encode())
        for kind in ("error", "stopped"):
            unlink(self.file(kind))


def named(config: RunConfig, root: Path, label: str) -> Job:
    """Return the job of a configuration; below `root` its directory has the name that `geodl run` uses."""
    if config.threads is None:  # runs share the cores; not part of the hash
        config = config.model_copy(update={"threads": 1})
    return Job(config, root / run_name(config), label)


def jobs_in(root: Path) -> list[Job]:
    """Return all jobs of the sweeps in a directory, started or not."""
    jobs = []
    for name in names_in(root / FOLDER):
        if name.endswith(".toml"):
            path = root / FOLDER / name
            text = read_file(path, limit=JSON_LIMIT).decode(errors="replace")
            label = text.partition("\n")[0].removeprefix("# ")
            config = configure(file_layers(path, imports=False)).config
            jobs.append(Job(config, root / name.removesuffix(".toml"), label))
    return jobs


def expand(layers: Sequence[Layer], points: Sequence[Point], root: Path) -> list[Job]:
    """Return a job for each point applied over the layers of options; points with equal hashes give one job."""
    jobs: dict[str, Job] = {}
    for point in points:
        config = configure([*layers, Layer("sweep", _separated(point))]).config
        for key in point.keys() - config.identity().keys():
            raise ConfigError(
                f"{key} (sweep): this option does not change the results, so it cannot be varied"
            )
        varied = [f"{key} {point[key]}" for key in point if key not in ("method", "distill")]
        label = ", ".join([label_of(config.method, config.distill), *varied])
        jobs.setdefault(config.hash(), named(config, root, label))
    return list(jobs.values())


def _separated(point: Point) -> Point:
    """Split METHOD+DISTILLATION into two options."""
    method, plus, distill = str(point.get("method", "")).partition("+")
    if not plus:
        return point
    if "distill" in point:
        raise ConfigError(
            f"method = {method}+{distill}: the distillation is also set by distill = {point['distill']}"
        )
    return point | {"method": method, "distill": distill}


# ---------------------------------------------------------------------------------------------------------------- grids


@dataclass(frozen=True)
class Spec:
    """The description of a sweep: layers of options, grids, and ranges to draw from."""

    layers: Sequence[Layer] = ()
    grids: Sequence[Mapping[str, Sequence[Any]]] = ()
    over: Mapping[str, str] | None = None

    def count(self, trials: int) -> int:
        """Return the number of points."""
        points = sum(math.prod(map(len, grid.values())) for grid in self.grids)
        return (points or 1) * (trials if self.over else 1) if points or self.over else 0

    def points(self, trials: int, seed: int) -> list[Point]:
        """Return all combinations of each grid, and each with every random draw if there are ranges."""
        if not self.count(trials=1):
            raise ConfigError(
                "nothing to vary: give --grid OPTION=A,B, --search with --over, or a file with a table [grid]"
            )
        combined = [
            dict(zip(grid, values, strict=True))
            for grid in self.grids
            for values in itertools.product(*grid.values())
        ]
        drawn = draws(self.over, trials, seed) if self.over else [{}]
        return [draw | point for draw in drawn for point in combined or [{}]]


def read_spec(path: Path) -> Spec:
    """Read a sweep file: options as for `geodl run --config`, a table [grid] or several [[grid]], and [over]."""
    *below, layer = file_layers(path)
    values = dict(layer.values)
    grids, over = values.pop("grid", []), values.pop("over", {})
    grids = [grids] if isinstance(grids, Mapping) else grids
    tables = [*grids, over] if isinstance(grids, list) else [None]
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"config file {path}: grid and over are tables: [grid], [[grid]], [over]")
    return Spec([*below, Layer(layer.origin, values)], [_checked(grid) for grid in grids], over)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse OPTION=A,B,... of the command line; repeated options add values."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--grid {text}: expected OPTION=A,B,...")
        grid.setdefault(key.replace("-", "_"), []).extend(filter(None, values.split(",")))
    return _checked(grid)


def _checked(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid: {key} = {values!r}: expected a list with at least one value")
    return dict(grid)


# --------------------------------------------------------------------------------------------------------------- search


def parse_over(texts: Sequence[str]) -> dict[str, str]:
    """Parse OPTION=RANGE of the command line."""
    over = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.replace("-", "_")
        if not equals or name in over:
            raise ConfigError(
                f"--over {text}: expected OPTION=LOW:HIGH, OPTION=log:LOW:HIGH or OPTION=A,B,..., each option once"
            )
        over[name] = value
    return over


def draws(over: Mapping[str, str], trials: int, seed: int) -> list[Point]:
    """Return `trials` random points, reproducible by the seed; a larger number of trials begins with the same points."""
    if trials < 1:
        raise ConfigError(f"trials = {trials}: at least 1 is allowed")
    points: list[Point] = [{} for _ in range(trials)]
    for key, text in over.items():
        value = _range(key, str(text))
        for trial, point in enumerate(points):
            point[key] = value(derive(seed, "search", key, trial) / 2**63)
    return points


def _range(key: str, text: str) -> Callable[[float], Any]:
    """Return a function from [0, 1) to the values of a range."""
    if ":" not in text:
        choices = [choice for choice in text.split(",") if choice]
        if not choices:
            raise ConfigError(f"over: {key} = {text}: no values")
        return lambda part: choices[int(part * len(choices))]
    logarithmic = text.startswith("log:")
    try:
        low, high = map(float, text.removeprefix("log:").split(":"))
    except ValueError:
        low, high = math.nan, math.nan
    if not (-math.inf < low <= high < math.inf) or (logarithmic and low <= 0):
        raise ConfigError(
            f"over: {key} = {text}: expected LOW:HIGH, log:LOW:HIGH (above 0) or A,B,..."
        )
    whole = _whole(key)
    if whole:  # up to the next number, so that all numbers are equally likely
        low, high = math.ceil(low), math.floor(high) + 1
        if low == high:
            raise ConfigError(f"over: {key} = {text}: the range contains no whole number")

    def value(part: float) -> float | int:
        exact = low * (high / low) ** part if logarithmic else low + (high - low) * part
        return min(math.floor(exact), int(high) - 1) if whole else float(f"{exact:.4g}")

    return value


def _whole(key: str) -> bool:
    """Return whether an option is a whole number."""
    info = all_options().get(key)
    return info is not None and int in (info.annotation, *get_args(info.annotation))


# ----------------------------------------------------------------------------------------------------------- base phases


def base_of(config: RunConfig) -> str:
    """Return a key of the options that the base phase depends on; runs with equal keys share it."""
    method = build(config)
    if not method.base_loss:
        return config.hash()
    names = {*SECTIONS["Data"].model_fields, *SECTIONS["Images"].model_fields, "weights"}
    if config.base != 0 and config.phases:
        names.remove("phases")
    data = config.model_dump(mode="json", include=names)
    return fingerprint([base_options(method, max(config.base or 0, 1)), data])


def bases_first(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs so that those with different base phases come first, and those that share one find it trained."""
    seen: Counter[str] = Counter()
    turns = {}
    for job in jobs:
        base = base_of(job.config)
        turns[job] = seen[base]
        seen[base] += 1
    return sorted(jobs, key=turns.__getitem__)


def check(jobs: Sequence[Job]) -> None:
    """Raise an error if the data, scenario or network of a job is invalid."""
    data: dict[str, Dataset] = {}
    networks: dict[str, RunConfig] = {}
    for config in (job.config for job in jobs):
        source = config.model_dump_json(include={"data", "data_dir", *source_options(config.data)})
        if source not in data:
            data[source] = load_data(config)
        scenario_of(config, data[source])
        networks.setdefault(config.network, config)
    for config in networks.values():
        Learner(config).check()
