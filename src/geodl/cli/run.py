"""``geodl run`` and ``geodl compare``."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from geodl.bench.experiment import follows, load_data, run_config
from geodl.bench.report import page
from geodl.bench.report.results import Setting, label_of, read_settings
from geodl.cli.display import Stopper, say
from geodl.cli.grids import Watch, legend, results_table
from geodl.cli.options import Flags, effective
from geodl.cli.runs import result_json
from geodl.config import RunConfig
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError, Interrupted
from geodl.core.text import count
from geodl.data import Dataset
from geodl.store import Directory

_how = partial(Parameter, group=Group("How to run", sort_key=6), negative=())


@dataclass(frozen=True)
class How:
    """What does not change what is computed."""

    fresh: Annotated[
        bool, _how(help="Start over, removing what a run with this directory left.")
    ] = False
    allow_environment_change: Annotated[
        bool,
        _how(
            help="Resume with another number of threads or kind of device: last digits may differ."
        ),
    ] = False
    cache: Annotated[
        bool, _how(help="Share trained base phases between runs.", negative="--no-cache")
    ] = True
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
    settings = _write_page([store])
    if how.as_json:
        print(json.dumps({"directory": str(store.path), **result_json(store)}))
        return
    _say_results(f"{settings[0].label} on {config.data}", settings)
    _say_where([store])


def compare(
    specs: Annotated[
        list[str], Parameter(help="Methods as METHOD or METHOD+DISTILLATION.", negative=())
    ],
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*")] = Flags(),  # type: ignore[valid-type]  # noqa: B008
    how: Annotated[How, Parameter(name="*")] = How(),  # noqa: B008  # frozen
) -> None:
    """Run several methods under one protocol."""
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
    for store in stores:
        _write_page([store])
    settings = _write_page(stores) if len(stores) > 1 else read_settings([stores[0].path])
    if how.as_json:
        print(json.dumps({str(store.path): result_json(store) for store in stores}))
        return
    _say_results(first.data, settings)
    _say_where(stores)
    if len(stores) > 1:
        say(f"all in one report: {_page_of(stores)}")


def _config(spec: str, seed: str | None, flags: Any) -> RunConfig:
    method, _, distill = spec.partition("+")
    if flags.method is not None or (distill and flags.distill is not None):
        raise ConfigError(
            "compare takes methods and distillations as METHOD+DISTILLATION, not by --method and --distill"
        )
    more = {"method": method, "distill": distill or None, "seed": seed}
    return effective(flags, **{key: value for key, value in more.items() if value}).config


def _load(config: RunConfig, quiet: bool) -> Dataset:
    data = load_data(config)
    if not quiet and not follows():
        for words in data.summary().split("\n"):
            say(words)
    return data


def _execute(
    config: RunConfig, data: Dataset, how: How, stopper: Stopper, out: Path | None = None
) -> Directory:
    watch = Watch(label_of(config.method, config.distill), quiet=how.silent)
    # Not asked by calling it: before training begins there is nothing to save, and Ctrl-C quits at once.
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
    """Return where the page of some runs is: in the directory of one, beside those of several."""
    path = stores[0].path
    return (path if len(stores) == 1 else path.parent) / "report.html"


def _write_page(stores: list[Directory]) -> list[Setting]:
    """Write the page of some runs; return what it shows."""
    settings = read_settings([store.path for store in stores])
    page.write(settings, _page_of(stores))
    return settings


def _say_results(title: str, settings: list[Setting]) -> None:
    classes = len(settings[0].first.classes)
    say(results_table(f"{title}, {count(classes, 'class')}", settings))
    held_out = [each for setting in settings if (each := setting.held_out)]
    if held_out:
        say(results_table("on the held-out training images", held_out))
    say(legend(settings))


def _say_where(stores: list[Directory]) -> None:
    for store in stores:
        say(f"run directory: {store.path}, its report: {_page_of([store])}")
