"""Fine-tuning: cross-entropy on the new images and the exemplars; with a distillation, the paper's ablations (Tables 2, 3)."""

from geodl.methods.method import Method, register


@register
class Finetune(Method):
    """L_CE, and L_CE + L_LwF, L_CE + L_Cos, L_CE + L_GeoDL by ``distill``; cosine head."""

    name = "finetune"
    title = "CE"
    summary = "cross-entropy alone; with --distill the ablations CE + LwF, CE + Cos, CE + GeoDL"
    paper = "Simon, Koniusz, Harandi: On Learning the Geodesic Path for Incremental Learning, CVPR 2021, Table 2"
    base_loss = "cross-entropy"
