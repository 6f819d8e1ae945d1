"""LwF: the new network keeps the old network's outputs for the old classes (Li and Hoiem 2017; the paper's Eq. 2)."""

from typing import ClassVar

from geodl.config import Options
from geodl.methods.method import Method, register


class LwfOptions(Options):
    """Options of LwF."""

    defaults: ClassVar = {"distill": "lwf"}


@register
class Lwf(Method):
    """Cross-entropy + KL(teacher || student) over the old classes at temperature 2; linear head, CNN classifier."""

    name = "lwf"
    title = "LwF"
    summary = (
        "cross-entropy + distillation of the old classes' logits, linear head, evaluated by CNN"
    )
    paper = "Li, Hoiem: Learning without Forgetting, TPAMI 2017"
    Options = LwfOptions
    head = "linear"
    base_loss = "cross-entropy"
