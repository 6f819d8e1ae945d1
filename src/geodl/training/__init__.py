"""Training: the one loop, its checkpoints, shared base phases, and the angles along the way."""

from geodl.training.checkpoint import Checkpoint, NoProgress, Progress
from geodl.training.loop import Interrupted, Trainer

__all__ = ["Checkpoint", "Interrupted", "NoProgress", "Progress", "Trainer"]
