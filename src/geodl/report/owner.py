"""What the page of a model tells the person whose images it learned, as plain data for its template."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch

from geodl.data.images import Images, from_tensors
from geodl.errors import GeodlError
from geodl.files import interpreting, part, readable
from geodl.learner import Learner
from geodl.metrics import Confusion, confusions_of, finite
from geodl.predictors import Judged, default_classifier
from geodl.report.details import thumbnail, webp
from geodl.report.results import Run
from geodl.store import Phase, RunDirectory
from geodl.text import count, listed

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
FEW, WEAK, MIXED, WIDE = 10, 80.0, 0.05, 10.0
"""Called few: images of a class; weak: % of them right; mixed up: share of two classes; wide: points of the interval."""


def owner(run: Run, with_images: bool | None) -> dict[str, Any]:
    """Return what is shown of a model; pictures only where they are asked for."""
    directory = RunDirectory(run.path)
    done = directory.completed()
    if not done:
        return {"name": run.path.name, "classes": []}
    saved = directory.load_phase(done - 1)
    with interpreting(saved.path):
        learner, problem = _restored(saved)
        confusion = _confusion(saved.metrics, learner)
        unknown = [{"name": name, "step": 1, "images": 0} for name in saved.extra["classes"]]
        known = saved.extra.get("known", unknown)
        stored = part(saved.memory, "validation")
        checks = from_tensors(stored) if stored else None
        return {
            "name": run.path.resolve().name,
            "classes": saved.extra["classes"],
            "images": sum(each["images"] for each in known),
            "left_out": bool(saved.metrics and "analytic" in saved.metrics["confusions"]) or not saved.metrics,
            "confusion": confusion,
            "accuracy": finite(confusion.accuracy),
            "interval": confusion.interval,
            "steps": _steps(directory, run.history, confusion, known),
            "sure": how_sure(_judged(learner, checks)),
            "advice": advice(confusion, known),
            "pairs": mixed_up(confusion),
            "most": PAIRS,
            "bars": class_by_class(confusion),
            "shown": BARS,
            "named": NAMED,
            "pictures": _pictures(learner, checks, saved.extra, bool(with_images)),
            "problem": problem,
            "kept": _kept(learner, checks),
        }


def _restored(saved: Phase) -> tuple[Learner | None, str]:
    """Return the learner, or why there is none: what its network needs may not be installed here."""
    try:
        learner = Learner.restored(saved)
        assert learner.network is not None  # built here, so that a package it lacks is named
        return learner, ""
    except GeodlError as error:
        return None, str(error)


def _confusion(metrics: Mapping[str, Any], learner: Learner | None) -> Confusion:
    """Return how good the model is: as it was measured in the last step, or what leave-one-out says."""
    found = confusions_of(metrics) if metrics else {}
    if found:
        return found[default_classifier(found)]
    classes = learner.classes if learner else ()
    left_out = learner.left_out() if learner else None
    return left_out or Confusion(torch.zeros(len(classes), len(classes), dtype=torch.int64), classes)


def _judged(learner: Learner | None, checks: Images | None) -> Judged | None:
    """Return what is known image by image: by leave-one-out, or of the validation images."""
    if learner is None:
        return None
    return learner.validated() or (learner.judged(checks) if checks is not None and len(checks) else None)


def _steps(
    directory: RunDirectory, history: Sequence[Mapping[str, Any]], now: Confusion, known: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return what was done to the model, oldest first, and what each step brought."""
    steps: list[dict[str, Any]] = []
    # A learner that was saved by itself has left a phase, but no record.
    for phase, record in enumerate(history, directory.completed() - len(history)):
        when = datetime.fromisoformat(record["time"]) if record["time"] else None
        step = {"day": f"{when.day} {when:%B %Y}" if when else "", **record}
        if record["action"] == "learn":
            found = confusions_of(metrics) if (metrics := directory.load_metrics(phase)) else {}
            then = found[default_classifier(found)] if found else None
            mine = [i for i, each in enumerate(known) if each["step"] == record["step"]]
            several = then is not None and len(then.classes) > 1  # one class alone is always right
            step |= {"judged": then.images if then and several else 0, "now": finite(now.rate(mine))}
        steps.append(step)
    return steps


def how_sure(judged: Judged | None) -> dict[str, Any] | None:
    """Return how often the model is right when it is so sure, from the surest images to the least sure ones."""
    if judged is None or judged.confidences is None:
        return None
    known = judged.predictions >= 0
    right, said = (judged.predictions == judged.labels)[known].double(), judged.confidences[known].double()
    if len(said) < MEASURED:
        return None
    bands = []
    for low, high in zip(BANDS, (math.inf, *BANDS), strict=False):
        rows = (said >= low) & (said < high)
        if rows.any():
            found = (int(rows.sum()), 100 * float(right[rows].mean()), 100 * float(said[rows].mean()))
            bands.append((_band(low, high), *found))
    apart = sum(images * abs(accuracy - confidence) for _, images, accuracy, confidence in bands) / len(said)
    return {"bands": bands, "apart": apart}


def _band(low: float, high: float) -> str:
    if high > 1:
        return f"{100 * low:.0f} % and more"
    return f"{100 * low:.0f} to {100 * high:.0f} %" if low else f"under {100 * high:.0f} %"


def mixed_up(confusion: Confusion) -> list[dict[str, Any]]:
    """Return the classes that are taken for each other, the most frequent first."""
    totals, found = confusion.counts.sum(dim=1).tolist(), []
    both = confusion.counts + confusion.counts.T
    for i, j in both.triu(1).nonzero().tolist():
        there, back = int(confusion.counts[i, j]), int(confusion.counts[j, i])
        one, other = ((i, j, there), (j, i, back)) if there >= back else ((j, i, back), (i, j, there))
        ways = [(confusion.classes[a], confusion.classes[b], wrong, totals[a]) for a, b, wrong in (one, other) if wrong]
        names = ways[0][:2]
        found.append({"names": names, "wrong": there + back, "images": totals[i] + totals[j], "ways": ways})
    return sorted(found, key=lambda pair: (-pair["wrong"], pair["images"]))


def class_by_class(confusion: Confusion) -> list[dict[str, Any]]:
    """Return the accuracy on each class, the worst first, those that were not measured last."""
    totals, right = confusion.counts.sum(dim=1).tolist(), confusion.counts.diagonal().tolist()
    bars = [
        {"name": name, "accuracy": finite(confusion.rate([i])), "right": right[i], "judged": totals[i]}
        for i, name in enumerate(confusion.classes)
    ]
    return sorted(bars, key=lambda bar: (bar["accuracy"] is None, bar["accuracy"], -bar["judged"]))


def advice(confusion: Confusion, known: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return what would make the model better: a heading and what to do, the most useful first."""
    if len(known) == 1:
        return [("Add a second class", "There is nothing to tell apart until the model knows two classes or more.")]
    found = []
    for pair in mixed_up(confusion)[:3]:
        if pair["wrong"] >= 2 and pair["wrong"] >= MIXED * pair["images"]:
            words = f"{pair['wrong']} of their {pair['images']} images were taken for the other."
            remedy = "See that none lies in the wrong folder; then add images that show what tells them apart."
            found.append(("Look at " + " and ".join(pair["names"]), f"{words} {remedy}"))
    weak = [
        f"{bar['name']} ({bar['right']} of {bar['judged']} right)"
        for bar in class_by_class(confusion)
        if bar["judged"] >= 2 and bar["accuracy"] < WEAK
    ]
    if weak:
        found.append(("Add more, and more varied, images", f"Weak: {listed(weak)}."))
    few = [f"{each['name']} ({each['images']})" for each in known if 0 < each["images"] < FEW]
    if few:
        found.append(("Very few images", f"{listed(few)}. Predictions of them are shaky; {FEW} or more images help."))
    low, high = confusion.interval
    if confusion.images and high - low > WIDE:
        words = f"It rests on {confusion.images} images: it may as well be {low:.0f} % or {high:.0f} %. More images tell more."
        found.append(("Do not trust the accuracy too far", words))
    return found


def _pictures(
    learner: Learner | None, checks: Images | None, extra: Mapping[str, Any], wanted: bool
) -> dict[str, Any] | None:
    """Return the pictures among the validation images that are wrongly classified, the surest mistakes first."""
    if learner is None or checks is None or not len(checks):
        return None
    if not wanted:
        return {"wanted": False}
    judged = learner.judged(checks)
    confidences = judged.confidences if judged.confidences is not None else torch.zeros(len(checks))
    wrong = ((judged.predictions != judged.labels) & (judged.predictions >= 0)).nonzero().squeeze(1)
    order = wrong[confidences[wrong].argsort(descending=True, stable=True)].tolist()
    digests = checks.item_digests()
    shown = [
        {
            "own": learner.classes[int(judged.labels[i])],
            "other": learner.classes[int(judged.predictions[i])],
            "sure": 100 * float(confidences[i]) if judged.confidences is not None else None,
            "file": extra.get("stored", {}).get(digests[i], ""),
            "data": webp(thumbnail(checks.decode(i), SIDE)),
            "tiny": learner.transform is not None and learner.transform.size < TINY,
        }
        for i in order[:PICTURES]
    ]
    return {"wanted": True, "judged": int((judged.predictions >= 0).sum()), "wrong": len(order), "shown": shown}


def _kept(learner: Learner | None, checks: Images | None) -> str:
    """Say what the model keeps of the images."""
    if learner is None or learner.transform is None:
        return ""
    pictures = sum(len(part) for part in (learner.memory.images, checks) if part is not None)
    features = len(learner.memory.own.get("labels", ()))
    size = readable(pictures * 3 * learner.transform.size**2)
    parts = [
        f"{count(pictures, 'picture')}, {size}" if pictures else "no picture",
        f"the features of {count(features, 'image')}" if features else "",
    ]
    return " and ".join(filter(None, parts))
