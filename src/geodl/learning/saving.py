"""Saving and loading models: tensors and record as the files of a phase in a directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from geodl.config import RunConfig
from geodl.core.content import interpreting
from geodl.core.errors import ConfigError, StoreError
from geodl.core.tensors import part
from geodl.data.dataset import data_directory
from geodl.methods import build, not_loaded, stored_config
from geodl.model.classifiers import CLASSIFIERS
from geodl.model.model import STATISTICS, Model
from geodl.nets import Own
from geodl.store import Directory, File, SavedPhase

NETWORK, MEMORY, SUMS = "model.safetensors", "memory.safetensors", "statistics.safetensors"
METRICS, RECORD = "metrics.json", "extra.json"
Tensors = Mapping[str, Tensor]


def model_directory(path: Path) -> Directory:
    """Create or open the directory of a model; each phase stores its own configuration."""
    return Directory.create_or_open(path, {}, kind="model")


def save_model(
    store: Directory,
    model: Model,
    *,
    action: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
    files: Mapping[str, bytes | File] | None = None,
    states: int | None = None,
    drop_statistics: bool = False,
) -> None:
    """Save a model as the next phase of a directory, atomically.

    Args:
        store: the directory.
        model: the model.
        action: what created the phase.
        metrics: the content of metrics.json.
        notes: further entries of the record.
        tensors: further tensors.
        files: further files.
        states: how many phases are kept in full; of earlier ones only the metrics; None: all.
        drop_statistics: whether to drop the statistics of earlier phases, which only learning needs.
    """
    everything = model.to_tensors() | dict(tensors or {})
    statistics = part(everything, STATISTICS.removesuffix("."))
    apart = ("network.", STATISTICS)
    rest = {key: each for key, each in everything.items() if not key.startswith(apart)}
    record = model.record() | dict(notes or {})
    # The network under the names that `--weights` expects.
    network = part(everything, "network")
    contents = {NETWORK: network, MEMORY: rest, METRICS: dict(metrics or {}), RECORD: record}
    store.commit(
        {**contents, **({SUMS: statistics} if statistics else {}), **(files or {})},
        action,
        newest_only=(SUMS,) if drop_statistics else (),
        states=states,
        lasting=(METRICS,),
    )


def load_model(
    saved: SavedPhase,
    config: RunConfig | None = None,
    *,
    data_dir: Path | None = None,
    network: Own | None = None,
) -> Model:
    """Return the model of a phase.

    config: instead of the model's own; data_dir: where referenced image files are, by default that of `config`; files
    elsewhere are not read, since the model may be a stranger's; network: the backbone, if it was passed as an object.
    """
    if config is not None and data_dir is None:
        data_dir = data_directory(config.data_dir)
    with interpreting(saved.path):
        record, tensors = _current(saved)
        config = config or stored_config(record["config"])
        unknown = [name for name in record["classifiers"] if name not in CLASSIFIERS]
        if unknown:
            raise ConfigError(
                f"{saved.path}: {not_loaded('classifier', unknown[0], record['config'])}"
            )
        return Model.from_tensors(config, record, tensors, data_dir, network)


def _current(saved: SavedPhase) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return record and tensors under their current names."""
    tensors = {f"network.{key}": each for key, each in saved.tensors(NETWORK).items()}
    record, memory = saved.json(RECORD), saved.tensors(MEMORY)
    sums = saved.tensors(SUMS) if SUMS in saved.files else {}
    if "classifiers" not in record:
        return _version_2(saved, record, tensors, memory, sums)
    statistics = {f"{STATISTICS}{key}": each for key, each in sums.items()}
    return record, tensors | memory | statistics


def _version_2(
    saved: SavedPhase, record: dict[str, Any], network: Tensors, memory: Tensors, sums: Tensors
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert what version 0.2 wrote: class means and the closed form were in the memory."""
    if not record.get("trained", True):
        raise StoreError(
            f"{saved.path}: a model of version 0.2 with one class, never trained, cannot be read"
        )
    tensors = dict(network)
    names = {"means": "ncm.means", "exemplar_means": "nme.means", "own": "analytic"}
    for key, each in memory.items():
        first, _, rest = key.partition(".")
        tensors[".".join(filter(None, [names.get(first, f"memory.{first}"), rest]))] = each
    tensors |= {f"{STATISTICS}analytic.{key}": each for key, each in sums.items()}
    classifiers = [name for name in ("nme", "ncm", "analytic") if any(part(tensors, name))]
    if build(stored_config(record["config"])).trains(int(record["phases"]) - 1):
        classifiers.insert(0, "cnn")
    return dict(record) | {"classifiers": classifiers}, tensors
