"""Closed form: a backbone that is trained in phase 0 or not at all; ridge regression on its features in every phase."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from geodl.config import MANY, RunConfig
from geodl.methods.adaptation import Adaptation
from geodl.methods.method import Method, Schedule, Stage, WithoutDistillation, register
from geodl.model.classifiers.fitting import ClosedFormOptions
from geodl.model.memory import Memory
from geodl.model.phase import Phase


class AnalyticOptions(WithoutDistillation):
    """Options of learning in closed form."""

    defaults: ClassVar = {"exemplars": 0}
    # The seed determines the random features, on which the fit depends.
    fixed: ClassVar = frozenset({"distill", "seed", "adapt"})
    research: ClassVar = frozenset({"train_base", "adapt_epochs", "adapt_lr"})

    adapt: Literal["no", "auto", "yes"] = "no"
    """Train the last stages of a network with given weights on the first group, then freeze it; auto: keep the result only if it
    is right on clearly more of the images set apart. It can lower the accuracy on later classes."""
    adapt_epochs: int = Field(5, ge=1, le=MANY)
    """Epochs of the adaptation."""
    adapt_lr: float = Field(5e-4, gt=0)
    """Peak learning rate of the adaptation."""
    train_base: bool | None = None
    """Train the backbone in phase 0, true or false; unset: unless its weights are given."""

    def check(self, config: RunConfig) -> None:
        """Raise an error for a distillation, and for adapting a network without pre-trained weights."""
        super().check(config)
        if self.adapt != "no" and not _given(config):
            raise ValueError(
                f"adapt = {self.adapt}: only a network that comes with weights is adapted"
            )


@register
class Analytic(Method):
    """The closed form on a backbone that is trained or adapted in phase 0, or not at all."""

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
        """Return whether the phase trains the backbone: phase 0 does, unless it is pre-trained."""
        train_base = self.options.train_base
        trained = not _given(self.config) if train_base is None else train_base
        return phase == 0 and (trained or self.adapts)

    @property
    def adapts(self) -> bool:
        """Whether a pre-trained network is adapted in phase 0."""
        return self.options.adapt != "no"

    def configure(self, config: RunConfig) -> None:
        """Set the options; other methods cannot share an adapted network."""
        super().configure(config)
        self.base_loss = "" if self.adapts else type(self).base_loss

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield the adaptation, or the ordinary training, in phase 0."""
        if not self.adapts:
            yield from super().stages(phase)
        elif phase.index == 0:
            options = self.options
            schedule = Schedule(
                options.adapt_epochs,
                options.adapt_lr,
                kind="onecycle",
                weight_decay=0.01,
                norm_decay=False,
                algorithm="adamw",
            )
            yield Adaptation(self, phase, schedule, always=options.adapt == "yes").stage()

    def exemplars(self, phase: Phase, quota: int) -> Memory:
        """Keep exemplars only if no features are kept: they would serve only k-NME."""
        if self.config.of(ClosedFormOptions).keep_features:
            return replace(phase.memory, images=None)
        return super().exemplars(phase, quota)


def _given(config: RunConfig) -> bool:
    """Return whether the backbone has pre-trained weights."""
    return config.pretrained or config.weights is not None
