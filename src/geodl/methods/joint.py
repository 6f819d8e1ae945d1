"""Joint training: all images of all classes seen, the upper bound of the paper's phase figure (joint-CNN)."""

from typing import Literal

from geodl.config import RunConfig, restate
from geodl.methods.base import Method, register


class JointConfig(RunConfig):
    """Options of joint training."""

    method: Literal["joint"] = restate("method", "joint")
    distill: Literal["none"] = restate("distill", "none")


@register
class Joint(Method):
    """Cross-entropy on everything, a new network each phase; ``phases = 0`` trains once, on all the classes."""

    name = "joint"
    title = "Joint training"
    summary = "upper bound: train anew on all images of all classes seen (--phases 0: once, on all classes)"
    paper = "the joint-CNN of Simon, Koniusz, Harandi, CVPR 2021, Fig. 4"
    Config = JointConfig
    base_loss = "cross-entropy"
    keeps_all_data = True
