"""The page of a model, for the person whose images it learned."""

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from geodl.app import state as states
from geodl.app.about import describe
from geodl.app.advice import advice, mixed_up, uncertain
from geodl.app.kept import doubtful, find
from geodl.app.state import State
from geodl.core.content import interpreting
from geodl.core.errors import GeodlError
from geodl.core.text import count, readable
from geodl.model.classifiers import LeftOut
from geodl.model.metrics import Confusion, finite
from geodl.model.model import Model
from geodl.model.page import templates, thumbnail, webp
from geodl.store import Directory

PAIRS = 8
"""Pairs of classes that are shown as mixed up."""
PICTURES = 60
"""Wrongly classified pictures that are shown."""
SIDE = 160
"""Largest side of such a picture in pixels."""
TINY = 48
"""Pictures with fewer pixels a side are shown as squares of color, not smoothed."""
BARS = 40
"""Of more classes than these the best are folded."""
NAMED = 12
"""Of more classes than these in a step the others are folded."""
BANDS = (0.95, 0.9, 0.8, 0.6, 0.0)
"""Confidences from which on images are counted together."""
MEASURED = 20
"""With fewer images, nothing is said about how sure the model is."""


def render(path: Path, *, with_images: bool | None = None, research: str = "") -> str:
    """Return the page as text. research: more, for researchers.

    with_images: show pictures; None: only name the doubtful ones; False: no image is named.
    """
    page = templates("geodl.app").get_template("owner.html")
    return page.render(owner=owner(path, with_images), research=Markup(research))


def owner(path: Path, with_images: bool | None = None) -> dict[str, Any]:
    """Return what is shown of a model; with_images: as for `render`."""
    store = Directory(path)
    name, state = path.resolve().name, states.load(store)
    if state is None:
        return {"name": name, "classes": []}
    with interpreting(path):
        facts = describe(store, state)
        model, problem = _usable(state)
        # As it was measured in the last step, or by leave-one-out.
        left_out = model.left_out() if model and not state.metrics else None
        confusion = left_out or state.confusion
        images = {each["name"]: each["images"] for each in facts["classes"]}
        return {
            "name": name,
            "classes": state.names,
            "images": sum(images.values()),
            "left_out": facts["left_out"],
            "confusion": confusion,
            "accuracy": finite(confusion.accuracy),
            "interval": confusion.interval,
            "steps": _steps(store, facts, confusion, named=with_images is not False),
            "sure": how_sure(_judged(state, model)),
            "advice": [*advice(confusion, images), *uncertain(confusion)],
            "pairs": mixed_up(confusion),
            "most": PAIRS,
            "bars": confusion.weakest,
            "shown": BARS,
            "named": NAMED,
            "named_doubts": PICTURES,
            "pictures": _pictures(state, model, bool(with_images)),
            "doubtful": [] if with_images is False else _doubtful(state, bool(with_images)),
            "problem": problem,
            "kept": _kept(facts) if model else "",
        }


def _usable(state: State) -> tuple[Model | None, str]:
    """Return the model, or why it cannot predict: what its network needs may not be installed here."""
    try:
        state.model.network  # noqa: B018  # built here, so that a package it lacks is named
        return state.model, ""
    except GeodlError as error:
        return None, str(error)


def _judged(state: State, model: Model | None) -> LeftOut | None:
    """Return what is known image by image: by leave-one-out, or of the validation images."""
    if model is None:
        return None
    found, checks = model.default.left_out(), state.validation
    return found or (model.judged(checks) if checks is not None and len(checks) else None)


def _steps(
    store: Directory, facts: Mapping[str, Any], now: Confusion, *, named: bool
) -> list[dict[str, Any]]:
    """Return what was done to the model, oldest first, and what each step brought; named: to which image."""
    steps: list[dict[str, Any]] = []
    # A learner that was saved by itself has left a phase, but no record.
    for phase, record in enumerate(facts["steps"], store.completed() - len(facts["steps"])):
        when = datetime.fromisoformat(record["time"]) if record["time"] else None
        day = f"{when.day} {when:%B %Y}" if when else ""
        step = {"day": day, **(record if named else states.unnamed(record))}
        if record["action"] == "learn":
            then = states.confusion_of(store.phase(phase).json("metrics.json"))
            known = enumerate(facts["classes"])
            mine = [i for i, each in known if each["step"] == record["step"]]
            several = then is not None and len(then.classes) > 1  # one class alone is always right
            step["judged"] = then.images if then and several else 0
            step["now"] = finite(now.rate(mine)) if len(now.classes) > 1 else None
        steps.append(step)
    return steps


def how_sure(judged: LeftOut | None) -> dict[str, Any] | None:
    """Return how often the model is right when it is so sure, from the surest images to the least sure ones."""
    if judged is None or judged.confidences is None:
        return None
    known = judged.predictions >= 0
    right, said = (
        (judged.predictions == judged.labels)[known].double(),
        judged.confidences[known].double(),
    )
    if len(said) < MEASURED:
        return None
    bands = []
    for low, high in zip(BANDS, (math.inf, *BANDS), strict=False):
        rows = (said >= low) & (said < high)
        if rows.any():
            found = (
                int(rows.sum()),
                100 * float(right[rows].mean()),
                100 * float(said[rows].mean()),
            )
            bands.append((_band(low, high), *found))
    apart = sum(
        images * abs(accuracy - confidence) for _, images, accuracy, confidence in bands
    ) / len(said)
    return {"bands": bands, "apart": apart}


def _band(low: float, high: float) -> str:
    if high > 1:
        return f"{100 * low:.0f} % and more"
    return f"{100 * low:.0f} to {100 * high:.0f} %" if low else f"under {100 * high:.0f} %"


def _pictures(state: State, model: Model | None, wanted: bool) -> dict[str, Any] | None:
    """Return the pictures among the validation images that are wrongly classified, the surest mistakes first."""
    checks = state.validation
    if model is None or checks is None or not len(checks):
        return None
    if not wanted:
        return {"wanted": False}
    judged = model.judged(checks)
    confidences = judged.confidences if judged.confidences is not None else torch.zeros(len(checks))
    wrong = ((judged.predictions != judged.labels) & (judged.predictions >= 0)).nonzero().squeeze(1)
    order = wrong[confidences[wrong].argsort(descending=True, stable=True)].tolist()
    digests, shown = checks.item_digests(), []
    for i in order[:PICTURES]:
        picture = {
            "own": model.classes[int(judged.labels[i])],
            "other": model.classes[int(judged.predictions[i])],
            "sure": 100 * float(confidences[i]) if judged.confidences is not None else None,
            "file": state.stored.get(digests[i], ""),
            "data": webp(thumbnail(checks.decode(i), SIDE)),
            "tiny": state.transform.size < TINY,
        }
        shown.append(picture)
    judged_images = int((judged.predictions >= 0).sum())
    return {"wanted": True, "judged": judged_images, "wrong": len(order), "shown": shown}


def _doubtful(state: State, wanted: bool) -> list[dict[str, Any]]:
    """Return the images that look mislabelled, the surest mistakes first, with their pictures where they are wanted and stored."""
    found = []
    for each in doubtful(state):
        picture = {
            "own": each.label,
            "other": each.likely,
            "sure": 100 * (each.confidence or 0),
            "file": each.name,
            "data": "",
            "tiny": state.transform.size < TINY,
        }
        if wanted and each.use:
            images, row = find(state, each.id)
            picture["data"] = webp(thumbnail(images.decode(row), SIDE))
        found.append(picture)
    return found


def _kept(facts: Mapping[str, Any]) -> str:
    """Return what the model keeps of the images."""
    pictures, features = facts["stored_images"], facts["features"]["images"]
    size = readable(facts["stored_bytes"])
    kept = f"{count(pictures, 'picture')}, {size}" if pictures else "no picture"
    return f"{kept} and the features of {count(features, 'image')}" if features else kept
