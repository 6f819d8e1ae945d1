"""Training: the one loop, its checkpoints, shared base phases, and the angles along the way."""

from geodl.errors import Interrupted
from geodl.training.checkpoint import Progress
from geodl.training.loop import Trainer
from geodl.training.settling import means_of_exemplars, settled
from geodl.training.stages import Base, run_stages

__all__ = [
    "Base",
    "Interrupted",
    "Progress",
    "Trainer",
    "means_of_exemplars",
    "run_stages",
    "settled",
]
