"""The outcome of a learn step: the state that is saved, with its metrics, pictures and notes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from geodl.app.choices import VALIDATION, in_closed_form
from geodl.app.ledger import Ledger
from geodl.app.pictures import Pictures, as_pictures, pictures_of, together
from geodl.app.preparing import Prepared
from geodl.app.state import State, confusion_of, counted
from geodl.app.training import fitted
from geodl.config import RunConfig
from geodl.data.images import ArrayImages, Images, concat, short_hashes
from geodl.learning.learner import Learner
from geodl.model.metrics import finite, to_metrics
from geodl.model.model import Model


@dataclass(frozen=True)
class Outcome:
    """A model that has learned the images of a step.

    last: the state before; held: (N,) bool, the images that were set aside.
    """

    last: State | None
    ready: Prepared
    held: Tensor
    config: RunConfig
    model: Model

    def state(self, step: int, phase: int, key: str) -> State:
        """Evaluate the model on all validation images, or by leave-one-out, and return the new state.

        step: the number of the learn step; phase: that of the state in its directory; key: of the images.
        """
        model, ready, last = self.model, self.ready, self.last
        checks = self._shown() if in_closed_form(self.config.method) else self._checks()
        left_out = model.left_out()
        if left_out is None:
            learner = Learner(self.config, model=model)
            found = learner.evaluate(replace(checks, names=ready.names_of_classes))
        else:
            found = {model.default.name: left_out}
        metrics = to_metrics(phase, found)
        validation = checks if self.config.exemplars and len(checks) else None
        return State(
            model=model,
            validation=validation,
            seen=self._seen(),
            classes=counted(ready.classes, model),
            stored=self._sources(model.memory.images, validation),
            learned=key,
            history=(*(last.history if last else ()), self._record(step, metrics)),
            metrics=metrics,
            ledger=self._ledger,
        )

    @cached_property
    def _ledger(self) -> Ledger:
        """The images learned so far; not recorded for a trained network."""
        before = self.last.ledger if self.last else Ledger.empty()
        left_out, ready = self.model.default.left_out(), self.ready
        if left_out is None:
            return before
        return before.learned(ready.digests, ready.names, ready.images.labels, left_out)

    @cached_property
    def _counted(self) -> Tensor:
        """The step's images that count, (N,) bool: not near-duplicates of learned ones in closed form."""
        keys = short_hashes(self.ready.digests)
        if not in_closed_form(self.config.method):
            return torch.ones(len(keys), dtype=torch.bool)
        return torch.isin(keys, self._ledger.keys)

    def _checks(self) -> ArrayImages:
        """Return all validation images, sorted by class."""
        held = self.ready.images.select(self.held)
        before = self.last.validation if self.last else None
        checks = fitted(concat([held] if before is None else [before, held]), self.config)
        return checks.select(checks.labels.argsort(stable=True))

    def _shown(self) -> Pictures:
        """Return the pictures to show: the earlier ones, and those that each class lacks, mistaken images first."""
        ready, labels = self.ready, self.ready.images.labels
        order, left_out = torch.arange(len(labels)), self.model.default.left_out()
        if left_out is not None and left_out.mistaken is not None:
            order = (~left_out.mistaken).long().argsort(stable=True)
        order = order[self._counted[order]]
        before = self.last.validation if self.last else None
        counts = self.last.checks if self.last else Counter[int]()
        if before is not None:
            shown = short_hashes(before.item_digests())
            order = order[~torch.isin(short_hashes(ready.digests), shown)[order]]
        chosen = torch.zeros(len(labels), dtype=torch.bool)
        for label in ready.present:
            lacking = min(self.config.exemplars, VALIDATION) - counts[label]
            chosen[order[labels[order] == label][: max(lacking, 0)]] = True
        added = pictures_of(
            ready.originals.select(chosen),
            ready.images.select(chosen),
            self.model.transform.size,
            as_they_came=self.config.crop != "resized",
            whole=self.model.transform.whole,
        )
        return together([added] if before is None else [as_pictures(before), added])

    def _record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        names, known = self.ready.names_of_classes, self.ready.known
        found = confusion_of(metrics)
        assert found is not None
        return {
            "action": "learn",
            "step": step,
            "new": list(names[known:]),
            "returning": [names[i] for i in self.ready.present if i < known],
            "images": int((~self.held).sum()),
            "accuracy": finite(found.accuracy),
            "validated": int(found.counts.any(dim=1).sum()),
        }

    def _seen(self) -> Tensor:
        """Return the short hashes of all images trained on so far."""
        now = short_hashes(self.ready.digests)[~self.held & self._counted]
        if self.last is None:
            return now
        return torch.cat([self.last.seen, now[~torch.isin(now, self.last.seen)]])

    def _sources(self, *parts: Images | None) -> dict[str, str]:
        """Return where each stored image came from, by its digest."""
        before = dict(self.last.stored) if self.last else {}
        known = before | dict(zip(self.ready.digests, self.ready.names, strict=True))
        digests = [digest for part in parts if part is not None for digest in part.item_digests()]
        return {digest: known.get(digest, "unknown") for digest in digests}
