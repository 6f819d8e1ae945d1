"""``geodl run`` and ``geodl compare``."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from geodl.cache import Cache
from geodl.cli.display import LEGEND, Stopper, Watch, comparison_table, result_table, say
from geodl.cli.options import Flags, effective
from geodl.cli.runs import result_json
from geodl.config import RunConfig
from geodl.data.sources import Dataset
from geodl.errors import ConfigError
from geodl.experiment import follows, load_data, results_of, run_config
from geodl.report import page
from geodl.report.results import label_of, read_settings
from geodl.store import RunDirectory
from geodl.text import count
from geodl.training import Interrupted

_how = partial(Parameter, group=Group("How to run", sort_key=6), negative=())


@dataclass(frozen=True)
class How:
    """What does not change what is computed."""

    fresh: Annotated[bool, _how(help="Start over, removing what a run with this directory left.")] = False
    allow_environment_change: Annotated[
        bool, _how(help="Continue with another number of threads or kind of device: last digits may differ.")
    ] = False
    cache: Annotated[bool, _how(help="Share trained base phases between runs.", negative="--no-cache")] = True
    quiet: Annotated[bool, _how(name=("--quiet", "-q"), help="Print the result alone.")] = False
    as_json: Annotated[bool, _how(name="--json", help="Print the result as JSON.")] = False

    @property
    def silent(self) -> bool:
        """Whether nothing is said before the result."""
        return self.quiet or self.as_json


def run(
    *,
    flags: Annotated[Flags, Parameter(name="*")] = Flags(),  # type: ignore[valid-type]  # noqa: B008
    out: Annotated[Path | None, _how(help="Directory of the run; unset: runs/NAME-HASH.")] = None,
    how: Annotated[How, Parameter(name="*")] = How(),  # noqa: B008  # frozen
) -> None:
    """Run one incremental experiment."""
    config = effective(flags).config
    store = _execute(config, _load(config, how.silent), how, Stopper(), out)
    if follows():
        return
    results = results_of(store)
    _write_pages([store])
    if how.as_json:
        print(json.dumps({"directory": str(store.path), **result_json(store)}))
        return
    say(result_table(f"{label_of(config.method, config.distill)} on {config.data}", results))
    say(f"{LEGEND}{'; AME sees the images of the old classes: an oracle' if 'ame' in results else ''}")
    _say_where([store])


def compare(
    specs: Annotated[list[str], Parameter(help="Methods as METHOD or METHOD+DISTILLATION.", negative=())],
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*")] = Flags(),  # type: ignore[valid-type]  # noqa: B008
    how: Annotated[How, Parameter(name="*")] = How(),  # noqa: B008  # frozen
) -> None:
    """Run several methods under one protocol."""
    configs = list({config.hash(): config for config in (_spec(spec, flags) for spec in specs)}.values())
    data, stopper = _load(configs[0], how.silent), Stopper()
    stores = [_execute(config, data, how, stopper) for config in configs]
    if follows():
        return
    rows = {
        label_of(config.method, config.distill): results_of(store)
        for config, store in zip(configs, stores, strict=True)
    }
    together = _write_pages(stores)
    if how.as_json:
        print(json.dumps({str(store.path): result_json(store) for store in stores}))
        return
    classes = len(next(iter(next(iter(rows.values())).values())).classes)
    say(comparison_table(f"{configs[0].data}, {count(classes, 'class')} (%)", rows))
    say(LEGEND)
    _say_where(stores)
    if together is not None:
        say(f"all in one report: {together}")


def _spec(spec: str, flags: Any) -> RunConfig:
    method, _, distill = spec.partition("+")
    if flags.method is not None or (distill and flags.distill is not None):
        raise ConfigError(
            "compare takes methods and distillations as METHOD+DISTILLATION, not by --method and --distill"
        )
    return effective(flags, method=method, **({"distill": distill} if distill else {})).config


def _load(config: RunConfig, quiet: bool) -> Dataset:
    data = load_data(config)
    if not quiet and not follows():
        for words in data.summary().split("\n"):
            say(words)
    return data


def _execute(config: RunConfig, data: Dataset, how: How, stopper: Stopper, out: Path | None = None) -> RunDirectory:
    watch = Watch(label_of(config.method, config.distill), quiet=how.silent)
    # Not asked by calling it: before training begins there is nothing to save, and Ctrl-C leaves at once.
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


def _write_pages(stores: list[RunDirectory]) -> Path | None:
    """Write each run's page and, where there are several, one for all; say where that is."""
    for store in stores:
        page.write(read_settings([store.path]), store.path / "report.html")
    if len(stores) == 1:
        return None
    return page.write(read_settings([store.path for store in stores]), stores[0].path.parent / "report.html")


def _say_where(stores: list[RunDirectory]) -> None:
    for store in stores:
        say(f"run directory: {store.path}, its report: {store.path / 'report.html'}")
