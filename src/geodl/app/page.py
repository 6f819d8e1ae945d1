"""The HTML page of a model for its owner."""

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from geodl.app import state as states
from geodl.app.advice import advice, mixed_up, uncertain
from geodl.app.info import describe
from geodl.app.kept import doubtful, find
from geodl.app.state import State
from geodl.core.content import interpreting
from geodl.core.errors import GeodlError
from geodl.core.text import count, readable
from geodl.data.images import Images
from geodl.model.classifiers import LeftOut
from geodl.model.metrics import Confusion, finite
from geodl.model.model import Model
from geodl.model.page import templates, thumbnail, webp
from geodl.store import Directory

SHOWN = {"pairs": 8, "pictures": 60, "bars": 40, "names": 12}
"""The number of items that are shown of a long list: pairs mixed up, pictures, bars of classes, names of a step."""
SIDE = 160
"""Largest side of a picture in pixels."""
TINY = 48
"""Pictures with fewer pixels a side are enlarged without smoothing."""
BANDS = (0.95, 0.9, 0.8, 0.6, 0.0)
"""Lower ends of the ranges of confidence."""
MEASURED = 20
"""With fewer images, confidence and accuracy are not compared."""


def render(path: Path, *, with_images: bool | None = None, research: str = "") -> str:
    """Return the page. research: HTML for researchers.

    with_images: True shows pictures, None only names the doubtful ones, False names no image.
    """
    page = templates("geodl.app").get_template("owner.html")
    return page.render(owner=owner(path, with_images), research=Markup(research))


def owner(path: Path, with_images: bool | None = None) -> dict[str, Any]:
    """Return the content of the page; with_images: as for `render`."""
    store = Directory(path)
    name, state = path.resolve().name, states.load(store)
    if state is None:
        return {"name": name, "classes": []}
    with interpreting(path):
        facts = describe(store, state)
        model, problem = _usable(state)
        # As measured in the last step, or by leave-one-out.
        left_out = model.left_out() if model and not state.metrics else None
        confusion = left_out or state.confusion
        images = {each["name"]: each["images"] for each in facts["classes"]}
        return {
            "name": name,
            "classes": state.names,
            "images": sum(images.values()),
            "left_out": facts["left_out"],
            "confusion": confusion,
            "measured": len(confusion.classes) > 1 and confusion.images > 0,
            "steps": _steps(store, facts, confusion, named=with_images is not False),
            "sure": how_sure(_judged(state, model)),
            "advice": [*advice(confusion, images), *uncertain(confusion)],
            "pairs": mixed_up(confusion),
            "shown": SHOWN,
            "pictures": _pictures(state, model, bool(with_images)),
            "doubtful": [] if with_images is False else _doubtful(state, bool(with_images)),
            "problem": problem,
            "kept": _kept(facts) if model else "",
        }


def _usable(state: State) -> tuple[Model | None, str]:
    """Return the model, or why it cannot predict: a package that its network needs may be missing."""
    try:
        state.model.network  # noqa: B018  # built here, so that the missing package is named
        return state.model, ""
    except GeodlError as error:
        return None, str(error)


def _judged(state: State, model: Model | None) -> LeftOut | None:
    """Return the predictions of single images: by leave-one-out, or of the validation images."""
    if model is None:
        return None
    found, checks = model.default.left_out(), state.validation
    return found or (model.judged(checks) if checks is not None and len(checks) else None)


def _steps(
    store: Directory, facts: Mapping[str, Any], now: Confusion, *, named: bool
) -> list[dict[str, Any]]:
    """Return the steps, oldest first, with their accuracies; named: with the names of images."""
    steps: list[dict[str, Any]] = []
    # `Learner.save` adds a phase, but no record.
    for phase, record in enumerate(facts["steps"], store.completed() - len(facts["steps"])):
        when = datetime.fromisoformat(record["time"]) if record["time"] else None
        day = f"{when.day} {when:%B %Y}" if when else ""
        step = {"day": day, **(record if named else states.unnamed(record))}
        if record["action"] == "learn":
            then = states.confusion_of(store.phase(phase).json("metrics.json"))
            known = enumerate(facts["classes"])
            mine = [i for i, each in known if each["step"] == record["step"]]
            several = then is not None and len(then.classes) > 1  # one class alone is always right
            step["judged"] = then.images if then is not None and several else 0
            step["now"] = finite(now.rate(mine)) if len(now.classes) > 1 else None
        steps.append(step)
    return steps


def how_sure(judged: LeftOut | None) -> dict[str, Any] | None:
    """Return the accuracy by ranges of confidence, the highest first; None if too few images were judged."""
    if judged is None or judged.confidences is None:
        return None
    known = judged.predictions >= 0
    confidences = judged.confidences[known].double()
    right = (judged.predictions == judged.labels)[known].double()
    if len(right) < MEASURED:
        return None
    bands, apart = [], 0.0
    for low, high in zip(BANDS, (math.inf, *BANDS), strict=False):
        rows = (confidences >= low) & (confidences < high)
        if rows.any():
            images, accuracy = int(rows.sum()), 100 * float(right[rows].mean())
            confidence = 100 * float(confidences[rows].mean())
            bands.append((_band(low, high), images, accuracy, confidence))
            apart += images * abs(accuracy - confidence)
    return {"bands": bands, "apart": apart / len(right)}


def _band(low: float, high: float) -> str:
    if high > 1:
        return f"{100 * low:.0f} % and more"
    return f"{100 * low:.0f} to {100 * high:.0f} %" if low else f"under {100 * high:.0f} %"


def _pictures(state: State, model: Model | None, visible: bool) -> dict[str, Any] | None:
    """Return the misclassified pictures among the validation images, the most certain mistakes first."""
    checks = state.validation
    if model is None or checks is None or not len(checks):
        return None
    if not visible:
        return {"visible": False}
    judged = model.judged(checks)
    sure = judged.confidences
    wrong = ((judged.predictions != judged.labels) & (judged.predictions >= 0)).nonzero().squeeze(1)
    if sure is not None:
        wrong = wrong[sure[wrong].argsort(descending=True, stable=True)]
    digests, shown = checks.item_digests(), []
    for i in wrong.tolist()[: SHOWN["pictures"]]:
        picture = {
            "own": model.classes[int(judged.labels[i])],
            "other": model.classes[int(judged.predictions[i])],
            "sure": None if sure is None else 100 * float(sure[i]),
            "file": state.stored.get(digests[i], ""),
        }
        shown.append(picture | _shown(state, checks, i))
    judged_images = int((judged.predictions >= 0).sum())
    return {"visible": True, "judged": judged_images, "wrong": len(wrong), "shown": shown}


def _doubtful(state: State, visible: bool) -> list[dict[str, Any]]:
    """Return the images that look mislabelled, the most certain mistakes first; `visible`: with the stored pictures."""
    found = []
    for each in doubtful(state):
        sure = 100 * (each.confidence or 0)
        picture = {"own": each.label, "other": each.likely, "sure": sure, "file": each.name}
        picture["data"] = ""
        if visible and each.use:
            picture |= _shown(state, *find(state, each.id))
        found.append(picture)
    return found


def _shown(state: State, images: Images, row: int) -> dict[str, Any]:
    """Return a picture as data, and whether it is tiny."""
    data = webp(thumbnail(images.decode(row), SIDE))
    return {"data": data, "tiny": state.transform.size < TINY}


def _kept(facts: Mapping[str, Any]) -> str:
    """Return what the model stores of the images."""
    pictures, features = facts["stored_images"], facts["features"]["images"]
    size = readable(facts["stored_bytes"])
    kept = f"{count(pictures, 'picture')}, {size}" if pictures else "no picture"
    return f"{kept} and the features of {count(features, 'image')}" if features else kept
