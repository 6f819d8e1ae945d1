"""What ``info`` says about a model: nothing but what is in its directory."""

import re
from typing import Any

from geodl.app.choices import VALIDATION
from geodl.app.doubts import doubtful
from geodl.app.state import State, accuracy_of
from geodl.core.files import directory_size
from geodl.model.classifiers import default_classifier
from geodl.model.metrics import Confusion, confusions_of
from geodl.store import Directory

UNJUDGED = {"judged": 0, "accuracy": None, "interval": None}
"""What is known of a class of which no image was judged."""


def describe(store: Directory, state: State) -> dict[str, Any]:
    """Collect the facts, ready for JSON."""
    steps = _steps(store, state)
    found = confusions_of(state.metrics) if state.metrics else {}
    confusion = found[default_classifier(found)] if found else None
    default = state.model.default
    return {
        "model": str(store.path),
        "classes": _classes(state, steps, confusion),
        "steps": steps,
        "accuracy": accuracy_of(state.metrics),
        "left_out": default.left_out() is not None,
        # Whether single images can be moved or forgotten.
        "mendable": default.stored().images > 0,
        "confusions": _confusions(confusion) if confusion else [],
        # [true class, predicted class, images] by position, without zeros.
        "matrix": confusion.to_json() if confusion else [],
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
    state: State, steps: list[dict[str, Any]], confusion: Confusion | None
) -> list[dict[str, Any]]:
    """List the classes: since when they are known, their images, and how well they are predicted."""
    learned = {record["step"]: record["time"] for record in steps if record["action"] == "learn"}
    judged = _judged(confusion) if confusion else {}
    checks, exemplars = state.checks, state.model.memory.per_class()
    return [
        {
            "name": known.name,
            "step": known.step,
            "learned": learned.get(known.step),
            "images": known.images,
            "exemplars": exemplars.get(i, 0),
            "validation": checks[i],
            **judged.get(known.name, UNJUDGED),
        }
        for i, known in enumerate(state.classes)
    ]


def _history(store: Directory) -> dict[str, Any]:
    """Say how many steps can be undone and redone, which were undone, and whether one was interrupted."""
    phases, undone = [store.phase(t) for t in range(store.completed())], store.undone()
    return {
        # Back to each earlier state that is kept; and from the first to nothing.
        "undo": sum(not phase.forgotten for phase in (*phases[:-1], phases[0])),
        "redo": len(undone),
        "undone": undone,
        "unfinished": store.load_progress() is not None,
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


def _judged(confusion: Confusion) -> dict[str, dict[str, Any]]:
    """Return, for each class, on how many images it is judged, its accuracy in %, and the 95 % interval of that."""
    found, totals = {}, confusion.counts.sum(dim=1).tolist()
    for i, name in enumerate(confusion.classes):
        if totals[i]:
            interval, accuracy = confusion.interval_of([i]), confusion.rate([i])
            found[name] = {"judged": totals[i], "accuracy": accuracy, "interval": interval}
    return found


def _confusions(confusion: Confusion) -> list[dict[str, Any]]:
    """List the most frequent mistakes on the validation images."""
    totals, names = confusion.counts.sum(dim=1).tolist(), confusion.classes
    return [
        {"class": names[i], "taken_for": names[j], "images": number, "of": int(totals[i])}
        for i, j, number in confusion.mistakes(10)
    ]


def _stored(state: State) -> list[dict[str, str]]:
    """List the stored images: class, what for, and where it came from."""
    found = []
    for use, images in (
        ("exemplar", state.model.memory.images),
        ("validation", state.validation),
    ):
        if images is None:
            continue
        for label, digest in zip(images.labels.tolist(), images.item_digests(), strict=True):
            found.append(
                {
                    "class": state.names[label],
                    "use": use,
                    "from": state.stored.get(digest, "unknown"),
                }
            )
    return found
