"""``geodl run`` and ``geodl compare``."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from geodl.bench.experiment import follows, load_data, run_config
from geodl.bench.report import page
from geodl.bench.report.results import Setting, label_of, read_settings
from geodl.bench.work import Progress
from geodl.cli.display import Display, Json, Quiet, Stopper, echo, number, plain, print_json
from geodl.cli.grids import legend, results_table
from geodl.cli.options import Flags, effective
from geodl.cli.runs import result_json
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError, Interrupted
from geodl.core.text import count, listed
from geodl.data import Dataset
from geodl.model.classifiers import CLASSIFIERS
from geodl.model.metrics import Confusion, confusions_of, finite
from geodl.store import Directory


@Parameter(name="*")
@dataclass(frozen=True)
class How:
    """Options of the command that do not change the results.

    Attributes:
        fresh: Start over, removing an earlier run in this directory.
        allow_environment_change: Resume with another number of threads or kind of device: last digits may differ.
        cache: Share trained base phases between runs.
    """

    fresh: bool = False
    allow_environment_change: bool = False
    cache: Annotated[bool, Parameter(negative="--no-cache")] = True
    quiet: Quiet = False
    as_json: Json = False

    @property
    def silent(self) -> bool:
        """Whether only the result is printed."""
        return self.quiet or self.as_json


def run(
    *,
    flags: Flags = Flags(),  # type: ignore[valid-type]  # noqa: B008
    out: Path | None = None,
    how: How = How(),  # noqa: B008  # frozen
) -> None:
    """Run one incremental experiment.

    Args:
        out: Directory of the run; unset: runs/NAME-HASH.
    """
    config = effective(flags).config
    store = _execute(config, _load(config, how.silent), how, Stopper(), out)
    if follows():
        return
    settings = _write_page([store])
    if how.as_json:
        print_json({"directory": str(store.path), **result_json(store)})
        return
    _print_results(f"{settings[0].label} on {config.data}", settings)
    _print_where([store])


def compare(
    specs: list[str],
    /,
    *,
    flags: Flags = Flags(),  # type: ignore[valid-type]  # noqa: B008
    how: How = How(),  # noqa: B008  # frozen
) -> None:
    """Run several methods under one protocol.

    Args:
        specs: Methods as METHOD or METHOD+DISTILLATION.
    """
    seeds = str(flags.seed).split(",") if flags.seed else [None]  # type: ignore[attr-defined]
    configs = {}
    for spec in specs:
        for seed in seeds:
            config = _config(spec, seed, flags)
            configs[config.hash()] = config
    first, *_ = configs.values()
    data, stopper = _load(first, how.silent), Stopper()
    stores = [_execute(config, data, how, stopper) for config in configs.values()]
    if follows():
        return
    if len(stores) > 1:
        for store in stores:
            _write_page([store])
    settings = _write_page(stores)
    if how.as_json:
        print_json({str(store.path): result_json(store) for store in stores})
        return
    _print_results(first.data, settings)
    _print_where(stores)
    if len(stores) > 1:
        echo(f"all in one report: {_page_of(stores)}")


def _config(spec: str, seed: str | None, flags: Any) -> RunConfig:
    method, _, distill = spec.partition("+")
    if flags.method is not None or (distill and flags.distill is not None):
        raise ConfigError(
            "compare takes methods and distillations as METHOD+DISTILLATION, not by --method or --distill"
        )
    more = {"method": method, "distill": distill or None, "seed": seed}
    return effective(flags, **{key: value for key, value in more.items() if value}).config


def _load(config: RunConfig, quiet: bool) -> Dataset:
    data = load_data(config)
    if not quiet and not follows():
        for line in data.summary().split("\n"):
            echo(line)
    return data


def _execute(
    config: RunConfig, data: Dataset, how: How, stopper: Stopper, out: Path | None = None
) -> Directory:
    watch = Watch(label_of(config.method, config.distill), quiet=how.silent)
    # Not polled: until training begins there is nothing to save, and Ctrl-C quits at once.
    if stopper.asked:
        raise Interrupted("stopped between two runs; the same command continues")
    with stopper.watching(), watch.bar:
        try:
            return run_config(
                config,
                out=out,
                fresh=how.fresh,
                allow_environment_change=how.allow_environment_change,
                cache=Cache() if how.cache else None,
                listener=watch,
                stop=stopper,
                data=data,
            )
        except Interrupted as stop:
            raise Interrupted(f"{stop}; the same command continues") from None


def _page_of(stores: list[Directory]) -> Path:
    """Return the file of the page: in the directory of a single run, beside the directories of several."""
    path = stores[0].path
    return (path if len(stores) == 1 else path.parent) / "report.html"


def _write_page(stores: list[Directory]) -> list[Setting]:
    """Write the page of some runs and return its settings."""
    settings = read_settings([store.path for store in stores])
    page.write(settings, _page_of(stores))
    return settings


def _print_results(title: str, settings: list[Setting]) -> None:
    classes = len(settings[0].first.classes)
    echo(results_table(f"{title}, {count(classes, 'class')}", settings))
    held_out = [setting.held_out for setting in settings if setting.held_out]
    if held_out:
        echo(results_table("on the held-out training images", held_out))
    echo(legend(settings))


def _print_where(stores: list[Directory]) -> None:
    for store in stores:
        echo(f"run directory: {store.path}, its report: {_page_of([store])}")


# -------------------------------------------------------------------------------------------------- progress


class Watch(Display):
    """Shows the progress of a run, and the accuracy after each phase."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.title, self.progress, self._base = title, Progress(), 0
        self._epochs = 1
        self.shows = {
            events.RunStarted: self._started,
            events.Advised: lambda event: echo(f"  {event.sentence}", "yellow"),
            events.PhaseStarted: self._phase,
            events.BaseAwaited: lambda _: echo(
                "    waiting for the run that trains this base phase"
            ),
            events.BaseCached: lambda _: echo("    base phase from the cache"),
            events.StageStarted: self._stage,
            events.StepTaken: self._step,
            events.EpochEnded: self.epoch,
            events.PhaseEvaluated: self._evaluated,
        }

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        self.progress.hear(event.kind, vars(event), time.time())
        super().__call__(event)

    def _started(self, event: events.RunStarted) -> None:
        sizes, self._base = event.sizes, event.sizes[0]
        classes = f": {count(sum(sizes), 'class')}, learned as {' + '.join(map(str, sizes))}"
        echo(plain(self.title, "bold") + plain(classes))
        if event.done == len(sizes):
            echo(f"  already complete: {event.directory}")
        elif event.done:
            echo(f"  resuming with phase {event.done} of {len(sizes) - 1}: {event.directory}")

    def _phase(self, event: events.PhaseStarted) -> None:
        echo(f"  phase {event.phase}: {listed(event.classes)} ({count(event.images, 'image')})")

    def _stage(self, event: events.StageStarted) -> None:
        self._epochs = event.epochs
        if 0 < event.epoch < event.epochs:
            echo(f"    resuming with epoch {event.epoch + 1} of {event.epochs}")

    def _step(self, event: events.StepTaken) -> None:
        state = f"phase {event.phase} {event.stage}, epoch {event.epoch + 1}/{self._epochs}, loss {event.loss:.3f}, {event.rate:.0f} images/s"
        self.advance("training", self.progress.reached, sum(self.progress.work), state)

    def _evaluated(self, event: events.PhaseEvaluated) -> None:
        found = confusions_of(event.metrics)
        classes, base = range(len(event.metrics["classes"])), range(self._base)
        echo(
            f"    accuracy (%) on all {len(classes)} classes: {_rates(found, classes)}; on the base classes: {_rates(found, base)}"
        )


def _rates(confusions: Mapping[str, Confusion], classes: Sequence[int]) -> str:
    used = [kind for kind in CLASSIFIERS.values() if kind.name in confusions and not kind.oracle]
    rates = [(kind.title, finite(confusions[kind.name].rate(classes))) for kind in used]
    return ", ".join(f"{title} {number(rate)}" for title, rate in rates)
