"""Closed form: a backbone that is trained once, or never; ridge regression reads it in every phase."""

from dataclasses import replace
from typing import ClassVar

from geodl.config import Options, RunConfig
from geodl.methods.method import Method, Phase, register
from geodl.model.classifiers.analytic import ClosedFormOptions
from geodl.model.memory import Memory


class AnalyticOptions(Options):
    """Options of learning in closed form."""

    defaults: ClassVar = {"exemplars": 0}
    # The random features are drawn from the seed, and what was learned holds for these alone.
    fixed: ClassVar = frozenset({"distill", "seed"})
    research: ClassVar = frozenset({"train_base"})

    train_base: bool | None = None
    """Train the backbone in phase 0, true or false; unset: unless it comes with weights."""

    def check(self, config: RunConfig) -> None:
        """Refuse a distillation: later phases do not train."""
        if config.distill != "none":
            raise ValueError(
                f"distill = {config.distill!r}: with method analytic only none is allowed"
            )


@register
class Analytic(Method):
    """A backbone that is trained in phase 0, or never; the closed form reads it."""

    name = "analytic"
    title = "Closed form"
    summary = (
        "closed form: a backbone trained in phase 0 at most, then each phase is one linear system"
    )
    paper = (
        "Zhuang et al.: ACIL, NeurIPS 2022; McDonnell et al.: RanPAC, NeurIPS 2023; several levels: "
        "Ahrens et al.: LayUP, TMLR 2024; Zhuang et al.: REAL"
    )
    Options = AnalyticOptions
    base_loss = "cross-entropy"
    frozen = True
    options: AnalyticOptions

    def trains(self, phase: int) -> bool:
        """Return whether the backbone moves: in phase 0, unless it comes with weights."""
        given = self.config.pretrained or self.config.weights is not None
        wanted = self.options.train_base
        return phase == 0 and (not given if wanted is None else wanted)

    def exemplars(self, phase: Phase, quota: int) -> Memory:
        """Keep exemplars only where no features are kept: they would serve k-NME alone."""
        if self.config.of(ClosedFormOptions).keep_features:
            return replace(phase.memory, images=None)
        return super().exemplars(phase, quota)
