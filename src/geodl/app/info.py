"""The facts about a model that ``info`` reports, read from its directory alone."""

import re
from typing import Any

from geodl.app.choices import VALIDATION
from geodl.app.kept import doubtful, kept_pictures
from geodl.app.state import State
from geodl.core.files import directory_size
from geodl.model.metrics import ClassRow, Confusion, finite
from geodl.store import Directory

_NOT_TRAINED = re.compile(
    r"(running_mean|running_var|num_batches_tracked|head\.(order|alpha|beta))$"
)


def describe(store: Directory, state: State) -> dict[str, Any]:
    """Return the facts, ready for JSON."""
    steps = _steps(store, state)
    confusion, default = state.confusion, state.model.default
    features = default.stored()
    return {
        "model": str(store.path),
        "classes": _classes(state, steps, confusion),
        "steps": steps,
        "accuracy": finite(confusion.accuracy),
        "left_out": default.left_out() is not None,
        # Whether single images can be moved or forgotten.
        "mendable": features.images > 0,
        "confusions": _confusions(confusion),
        # [true class, predicted class, images] by position, without zeros.
        "matrix": confusion.to_json(),
        "network": state.config.network,
        "parameters": _parameters(state),
        "image_size": state.transform.size,
        "preprocessing": state.transform.to_dict(),
        "memory_budget": {
            "exemplars": state.config.exemplars,
            "counted": state.config.memory_budget,
            "validation": VALIDATION,
        },
        "stored_images": state.stored_images,
        "stored_bytes": state.stored_bytes,
        "stored": [
            {"class": each.label, "use": each.use, "from": each.name or "unknown"}
            for each in kept_pictures(state)
        ],
        "doubtful": [each.to_json() for each in doubtful(state)],
        # How many images have their features stored; `sums`: sums over all images are stored.
        "features": {"images": features.images, "bytes": features.bytes, "sums": features.sums},
        # The `score` below which an image is unknown; None without a threshold.
        "threshold": default.threshold(),
        **_history(store),
        "directory_bytes": directory_size(store.path),
    }


def _steps(store: Directory, state: State) -> list[dict[str, Any]]:
    """Return the records of the steps with their times."""
    times = store.times("learned", "renamed", "removed", "relabelled", "forgotten")
    # A state of `Learner.save` before the first step has no record.
    first = store.completed() - len(state.history)
    return [dict(record) | {"time": times.get(t)} for t, record in enumerate(state.history, first)]


def _classes(
    state: State, steps: list[dict[str, Any]], confusion: Confusion
) -> list[dict[str, Any]]:
    """Return the classes: when each was learned, its images, and its accuracy."""
    learned = {record["step"]: record["time"] for record in steps if record["action"] == "learn"}
    rows = {row.name: row for row in confusion.rows}
    checks, exemplars = state.checks, state.model.memory.per_class()
    classes = []
    for i, known in enumerate(state.classes):
        row = rows.get(known.name, ClassRow(known.name))
        classes.append(
            {
                "name": known.name,
                "step": known.step,
                "learned": learned.get(known.step),
                "images": known.images,
                "exemplars": exemplars.get(i, 0),
                "validation": checks[i],
                "judged": row.judged,
                "accuracy": row.accuracy,
                "interval": row.interval,
            }
        )
    return classes


def _history(store: Directory) -> dict[str, Any]:
    """Return how many steps can be undone and redone, the undone ones, and whether one was interrupted."""
    phases, undone = [store.phase(t) for t in range(store.completed())], store.undone()
    return {
        # Back to each earlier state that is kept; and from the first to nothing.
        "undo": sum(not phase.forgotten for phase in (*phases[:-1], phases[0])),
        "redo": len(undone),
        "undone": undone,
        "unfinished": store.unfinished,
    }


def _parameters(state: State) -> int:
    """Count the parameters from the stored tensors: building the network may need a missing package."""
    tensors = state.model.weights.tensors().items()
    return sum(each.numel() for name, each in tensors if not _NOT_TRAINED.search(name))


def _confusions(confusion: Confusion) -> list[dict[str, Any]]:
    """Return the most frequent mistakes."""
    rows = confusion.rows
    return [
        {"class": rows[i].name, "taken_for": rows[j].name, "images": n, "of": rows[i].judged}
        for i, j, n in confusion.mistakes(10)
    ]
