"""LwF: the new network keeps the old one's answers on the old classes (Li and Hoiem 2017; the paper's Eq. 2)."""

from typing import Literal

from geodl.config import RunConfig, restate
from geodl.methods.base import Method, register


class LwfConfig(RunConfig):
    """Options of LwF."""

    method: Literal["lwf"] = restate("method", "lwf")
    distill: str = restate("distill", "lwf")


@register
class Lwf(Method):
    """Cross-entropy + KL(teacher || student) over the old classes at temperature 2; linear head, CNN classifier."""

    name = "lwf"
    title = "LwF"
    summary = "cross-entropy + distillation of the old classes' logits, linear head, read under CNN"
    paper = "Li, Hoiem: Learning without Forgetting, TPAMI 2017"
    Config = LwfConfig
    head = "linear"
    base_loss = "cross-entropy"
