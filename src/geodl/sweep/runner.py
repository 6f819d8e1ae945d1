"""One run of a grid: complete ones are found, failures are told and do not stop the others."""

from collections.abc import Callable
from pathlib import Path

from geodl.cache import Cache
from geodl.config import RunConfig
from geodl.data.sources import Dataset
from geodl.errors import TrainingError
from geodl.events import Listener, ignore
from geodl.experiment import run_config
from geodl.training import Interrupted


def run_job(
    config: RunConfig,
    out: Path,
    *,
    data: Dataset | None = None,
    listener: Listener = ignore,
    stop: Callable[[], bool] = lambda: False,
    allow_environment_change: bool = False,
) -> str | None:
    """Run an experiment of a grid, or go on with it; return why it failed, None where it did not."""
    try:
        run_config(
            config,
            out=out,
            allow_environment_change=allow_environment_change,
            cache=Cache(),
            listener=listener,
            stop=stop,
            data=data,
        )
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; the same command continues") from None
    except TrainingError as error:
        return str(error)
    return None
