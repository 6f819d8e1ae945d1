"""TensorBoard logs of a run."""

from pathlib import Path

from geodl.core.errors import MissingExtraError
from geodl.core.events import EpochEnded, Event, Listener, PhaseEvaluated, RunEnded
from geodl.core.files import make_below


def curves(directory: Path) -> Listener:
    """Return a listener that logs the losses of each epoch and the accuracies of each phase to TensorBoard files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "--tensorboard") from None
    board = SummaryWriter(str(make_below(directory, "tensorboard")))

    def draw(event: Event) -> None:
        if isinstance(event, EpochEnded):
            for name, value in event.parts.items():
                board.add_scalar(f"phase {event.phase} {event.stage}/{name}", value, event.epoch)
        elif isinstance(event, PhaseEvaluated):
            for name, accuracy in event.metrics["accuracy"].items():
                if accuracy is not None:  # None: no test images
                    board.add_scalar(f"accuracy/{name}", accuracy, event.phase)
        elif isinstance(event, RunEnded):
            board.close()

    return draw
