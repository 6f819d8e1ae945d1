"""Make docs/geometry.svg, the picture of docs/geometry.md: `python docs/make_geometry_figure.py` (a few seconds).

Left: a small network learns the digits 5 to 9 after 0 to 4, and the principal angles between what its old self and its new
self span on one batch are followed. Middle: the flow between two lines. Right: what each loss sees of a displacement.
"""

import math
from importlib import resources
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

from geodl import CosineDistillation, GeodesicDistillation
from geodl.geometry import GeodesicFlow, principal_angles, subspace

BLUE, ORANGE, GREY, GREEN = "#2f6db5", "#d9702b", "#8a8a8a", "#3c8d5a"
DIM, BATCH, STEPS, WEIGHT = 8, 64, 160, 20.0


class Net(nn.Module):
    """Digits (batch, 64) to features (batch, 32) and logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits."""
        z = self.body(x)
        return z, self.head(F.relu(z))


def train(
    net: Net,
    x: Tensor,
    y: Tensor,
    steps: int,
    teacher: Net | None,
    loss: nn.Module | None,
    probe: Tensor,
) -> list[Tensor]:
    """Train with one distillation; return the principal angles, in degrees, on the probe after each step."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    angles = []
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=generator)[:BATCH]
        z, logits = net(x[rows])
        total = F.cross_entropy(logits, y[rows])
        if teacher is not None and loss is not None:
            with torch.no_grad():
                old = teacher(x[rows])[0]
            total = total + WEIGHT * loss(z, old)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if teacher is not None:
            with torch.no_grad():
                bases = [subspace(F.normalize(model(probe)[0]), DIM) for model in (teacher, net)]
            angles.append(principal_angles(*bases) * 180 / math.pi)
    return angles


def angles_along_training(axes: Axes) -> None:
    """Follow the angles for no distillation, cosine and geodesic distillation."""
    with np.load(resources.files("geodl.data") / "digits.npz") as digits:
        x = torch.tensor(digits["images"].reshape(-1, 64) / 16, dtype=torch.float32)
        y = torch.tensor(digits["labels"], dtype=torch.int64)
    old, new = y < 5, y >= 5
    torch.manual_seed(0)
    base = Net()
    train(base, x[old], y[old], 300, None, None, x[:1])
    kinds = (
        ("none", GREY, None),
        ("cosine", ORANGE, CosineDistillation()),
        ("geodesic", BLUE, GeodesicDistillation(DIM)),
    )
    for name, colour, loss in kinds:
        net = Net()
        net.load_state_dict(base.state_dict())
        path = torch.stack(train(net, x[new], y[new], STEPS, base, loss, x[old][:BATCH]))
        steps = np.arange(1, STEPS + 1)
        low, middle, high = path.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=path.dtype), dim=1)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
        axes.plot(steps, middle, color=colour, lw=1.8)
        axes.annotate(
            name, (STEPS, float(middle[-1])), (4, -3), textcoords="offset points", color=colour
        )
    axes.set(
        title="Principal angles along training",
        xlabel="step on the new classes",
        ylabel="angle to the old subspace (°)",
    )
    axes.set(xlim=(0, STEPS), ylim=(0, 90), yticks=range(0, 91, 15))


def the_flow(axes: Axes) -> None:
    """Draw the flow between two lines of the plane, and its kernel."""
    angle = math.radians(70)
    p = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    q = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
    flow = GeodesicFlow.between(p, q)
    colours = mpl.colormaps["viridis"]
    for v in np.linspace(0, 1, 11):
        x, y = flow.at(float(v))[:, 0] * torch.sign(flow.at(float(v))[0, 0])
        ends = v in (0.0, 1.0)
        axes.plot(
            [-x, x],
            [-y, y],
            color=colours(0.85 * v),
            lw=2.6 if ends else 0.9,
            alpha=1 if ends else 0.75,
        )
    circle = torch.tensor(np.stack([np.cos(t := np.linspace(0, 2 * np.pi, 200)), np.sin(t)]))
    x, y = flow.dense() @ circle
    axes.fill(x, y, facecolor=GREEN, alpha=0.22, edgecolor=GREEN, lw=1.4)
    axes.annotate(
        r"$\Pi(0)$: old", (1.0, 0.0), (6, -4), textcoords="offset points", color=colours(0.0)
    )
    axes.annotate(
        r"$\Pi(1)$: new", q[:, 0].tolist(), (4, 4), textcoords="offset points", color=colours(0.85)
    )
    axes.annotate(
        "the kernel Q: what it\nmakes of the unit circle", (0.25, 0.02), (0.28, -0.85), color=GREEN
    )
    axes.set(
        title="The flow between two subspaces, 70° apart",
        xlim=(-1.15, 1.55),
        ylim=(-1.15, 1.15),
        aspect="equal",
    )
    axes.axis("off")


def what_the_losses_see(axes: Axes) -> None:
    """Move one row in directions inside and outside the subspaces, the flow held fixed."""
    w = math.radians(30)
    eye = torch.eye(6, dtype=torch.float64)
    p, q = eye[:, :2], torch.stack([eye[0], math.cos(w) * eye[1] + math.sin(w) * eye[2]], 1)
    flow = GeodesicFlow.between(p, q)
    row = (eye[0] + 0.5 * eye[1]) / math.hypot(1, 0.5)
    moves = torch.linspace(0, 1.5, 100, dtype=torch.float64)[:, None]
    directions = (
        ("inside both subspaces", 0.5 * eye[0] - eye[1], "-"),
        ("along the flow", eye[2], "--"),
        ("outside both", eye[4], ":"),
    )
    for name, direction, style in directions:
        moved = row + moves * direction / direction.norm()
        seen = 1 - flow.inner(row[None], moved) / (flow.norm(row[None]) * flow.norm(moved))
        axes.plot(moves, seen, style, color=BLUE, lw=1.8, label=f"geodesic, {name}")
    # All three directions are at right angles to the row, so the cosine cannot tell them apart.
    axes.plot(
        moves,
        1 - F.cosine_similarity(row[None], moved),
        color=ORANGE,
        lw=1.8,
        label="cosine, any of the three",
    )
    axes.set(
        title="What a loss sees of a displacement", xlabel="size of the displacement of a unit row"
    )
    axes.set(ylabel="loss of the row", xlim=(0, 1.5), ylim=(-0.01, None))
    axes.legend(frameon=False, loc="upper left")


def main() -> None:
    """Draw the three panels."""
    mpl.rcParams.update(
        {"font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "geodl", "svg.fonttype": "none"}
    )
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
    angles_along_training(axes[0])
    the_flow(axes[1])
    what_the_losses_see(axes[2])
    figure.savefig(Path(__file__).with_name("geometry.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
