"""Learning: Algorithm 1, the training loop and its checkpoints, shared base phases, ``Learner``."""

from geodl.learning.algorithm import learn
from geodl.learning.checkpoint import Checkpoints
from geodl.learning.learner import Learner
from geodl.learning.loop import Trainer
from geodl.learning.shared_base import SharedBase

__all__ = ["Checkpoints", "Learner", "SharedBase", "Trainer", "learn"]
