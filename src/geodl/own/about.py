"""What ``info`` says about a model: nothing but what is in its directory."""

from typing import Any

import torch

from geodl.nets.network import parameter_count
from geodl.own.state import State
from geodl.store import RunDirectory, directory_size


def describe(store: RunDirectory, state: State) -> dict[str, Any]:
    """Collect the facts, ready for JSON."""
    times = store.times("learned")
    learns = [i for i, record in enumerate(state.history) if record["action"] == "learn"]
    count = len(state.classes)
    checked, right = [0] * count, [0] * count
    for true, guess, number in state.metrics["confusions"]["nme"]:
        checked[true] += number
        right[true] += number * (true == guess)
    exemplars = state.memory.per_class()
    checks = [] if state.validation is None else torch.bincount(state.validation.labels, minlength=count).tolist()
    classes = [
        {
            "name": known.name,
            "step": known.step,
            "learned": times.get(learns[known.step - 1]),
            "images": known.images,
            "exemplars": exemplars.get(i, 0),
            "checks": checks[i] if checks else 0,
            "accuracy": 100 * right[i] / checked[i] if checked[i] else None,
        }
        for i, known in enumerate(state.classes)
    ]
    return {
        "model": str(store.path),
        "classes": classes,
        "steps": [dict(record) | {"time": times.get(i)} for i, record in enumerate(state.history)],
        "accuracy": state.metrics["accuracy"]["nme"],
        "network": state.config.network,
        "parameters": parameter_count(state.network),
        "image_size": state.transform.size,
        "preprocessing": state.transform.to_dict(),
        "budget": {"exemplars": state.config.exemplars, "counted": state.config.budget},
        "stored_images": state.stored_images,
        "stored_bytes": state.stored_bytes,
        "stored": _stored(state),
        # Back to each earlier state that is kept; and from the first to nothing.
        "undo": sum(store.remembers(t) for t in range(store.completed() - 1)) + store.remembers(0),
        "unfinished": store.load_progress() is not None,
        "directory_bytes": directory_size(store.path),
    }


def _stored(state: State) -> list[dict[str, str]]:
    """List the stored images: class, what for, and where it came from."""
    found = []
    for use, images in (("exemplar", state.memory.images), ("check", state.validation)):
        if images is None:
            continue
        for label, digest in zip(images.labels.tolist(), images.item_digests(), strict=True):
            found.append({"class": state.names[label], "use": use, "from": state.stored.get(digest, "unknown")})
    return found
