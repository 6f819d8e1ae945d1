"""Joint training: all images of all classes seen, the upper bound of the paper's phase figure (joint-CNN)."""

from geodl.methods.method import Method, WithoutDistillation, register


@register
class Joint(Method):
    """Cross-entropy on everything, with a new network in each phase; ``phases = 0`` trains once, on all classes."""

    name = "joint"
    title = "Joint training"
    summary = "upper bound: retrain from scratch on all images of all classes seen (--phases 0: once, on all classes)"
    paper = "the joint-CNN of Simon, Koniusz, Harandi, CVPR 2021, Fig. 4"
    Options = WithoutDistillation
    base_loss = "cross-entropy"
    joint = True
