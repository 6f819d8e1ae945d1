"""What ``info`` says about a model: nothing but what is in its directory."""

import re
from typing import Any

from geodl.app.choices import VALIDATION
from geodl.app.kept import doubtful
from geodl.app.state import State
from geodl.core.files import directory_size
from geodl.model.metrics import ClassRow, Confusion, finite
from geodl.store import Directory


def describe(store: Directory, state: State) -> dict[str, Any]:
    """Collect the facts, ready for JSON."""
    steps = _steps(store, state)
    confusion, default = state.confusion, state.model.default
    return {
        "model": str(store.path),
        "classes": _classes(state, steps, confusion),
        "steps": steps,
        "accuracy": finite(confusion.accuracy),
        "left_out": default.left_out() is not None,
        # Whether single images can be moved or forgotten.
        "mendable": default.stored().images > 0,
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
        "stored": _stored(state),
        "doubtful": [each.to_json() for each in doubtful(state)],
        "features": _features(state),
        # The `score` below which an image is unknown; None where none is.
        "threshold": default.threshold(),
        **_history(store),
        "directory_bytes": directory_size(store.path),
    }


def _steps(store: Directory, state: State) -> list[dict[str, Any]]:
    """List the steps with the times at which they were taken."""
    times = store.times("learned", "renamed", "removed", "relabelled", "forgotten")
    # A state of `Learner.save` before the first step has no record.
    first = store.completed() - len(state.history)
    return [dict(record) | {"time": times.get(t)} for t, record in enumerate(state.history, first)]


def _classes(
    state: State, steps: list[dict[str, Any]], confusion: Confusion
) -> list[dict[str, Any]]:
    """List the classes: since when they are known, their images, and how well they are predicted."""
    learned = {record["step"]: record["time"] for record in steps if record["action"] == "learn"}
    rows = {row.name: row for row in confusion.rows}
    checks, exemplars = state.checks, state.model.memory.per_class()
    found = []
    for i, known in enumerate(state.classes):
        row = rows.get(known.name, ClassRow(known.name))
        found.append(
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
    return found


def _history(store: Directory) -> dict[str, Any]:
    """Say how many steps can be undone and redone, which were undone, and whether one was interrupted."""
    phases, undone = [store.phase(t) for t in range(store.completed())], store.undone()
    return {
        # Back to each earlier state that is kept; and from the first to nothing.
        "undo": sum(not phase.forgotten for phase in (*phases[:-1], phases[0])),
        "redo": len(undone),
        "undone": undone,
        "unfinished": store.unfinished,
    }


def _features(state: State) -> dict[str, Any]:
    """Count the images whose features are kept one by one; `sums`: over all images are kept."""
    stored = state.model.default.stored()
    return {"images": stored.images, "bytes": stored.bytes, "sums": stored.sums}


def _parameters(state: State) -> int:
    """Count what training can change of the network, without building it: that may need a package that is not there."""
    others = re.compile(r"(running_mean|running_var|num_batches_tracked|head\.(order|alpha|beta))$")
    return sum(
        tensor.numel()
        for name, tensor in state.model.weights.tensors().items()
        if not others.search(name)
    )


def _confusions(confusion: Confusion) -> list[dict[str, Any]]:
    """List the most frequent mistakes on the validation images."""
    rows = confusion.rows
    return [
        {"class": rows[i].name, "taken_for": rows[j].name, "images": n, "of": rows[i].judged}
        for i, j, n in confusion.mistakes(10)
    ]


def _stored(state: State) -> list[dict[str, str]]:
    """List the stored images: class, what for, and where it came from."""
    found = []
    for use, images in state.parts():
        for label, digest in zip(images.labels.tolist(), images.item_digests(), strict=True):
            source = state.stored.get(digest, "unknown")
            found.append({"class": state.names[label], "use": use, "from": source})
    return found
