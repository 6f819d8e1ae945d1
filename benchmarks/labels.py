"""Detection of wrong labels: how many `learn` reports, and how many correct ones.

Run with `python -m benchmarks.labels DATA [--draws 3] [--out docs/labels.md]`. DATA has the folders flowers20 and signs12. The training images of
each are learned once; then, for each draw, a share of them gets wrong labels and the closed form is fitted again, which yields the same model as
learning them with these labels.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from geodl import IncrementalClassifier
from geodl.app.state import load
from geodl.model.classifiers import ClosedForm
from geodl.store import Directory

SHARE = 0.05
TABLE = """# Wrong labels

Written by `python -m benchmarks.labels DATA --out docs/labels.md`, do not edit. In two sets of photographs, randomly drawn images are moved into
the folder of another class: 20 kinds of flowers, and frames of 12 kinds of traffic signs from drive-bys of 30 frames each. "Found" is the share of moved
images that `learn` reports as mislabelled; "wrongly reported" is the number of reported images that were not moved, some of which look wrong in the
original data, too. Means over {draws}.

| images | moved | found | wrongly reported |
|---|---|---|---|
"""


def learned(weeks: list[Path], scratch: Path) -> Path:
    """Learn the class folders of several folders in one step; return the model."""
    images = scratch / "images"
    for file in sorted(each for week in weeks for each in week.glob("*/*")):
        link = images / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    IncrementalClassifier(scratch / "model").learn(images, threads=1, workers=1)
    return scratch / "model"


def moved(count: int, units: Tensor, labels: Tensor, draw: int) -> Tensor:
    """Return labels (N,) of which a share is wrong. units: (N,), equal for images that are moved together."""
    generator = torch.Generator().manual_seed(draw)
    some = units.unique()
    some = some[torch.randperm(len(some), generator=generator)[: round(SHARE * len(some))]]
    found = labels.clone()
    for unit in some.tolist():
        shift = int(torch.randint(1, count, (1,), generator=generator))
        found[units == unit] = (labels[units == unit] + shift) % count
    return found


def measure(model: Path, by_track: bool, draws: int) -> dict[str, float]:
    """Return the mean numbers of images that were moved, reported, and correctly reported."""
    state = load(Directory(model))
    assert state is not None
    closed, names = state.model.default, state.ledger.names
    assert isinstance(closed, ClosedForm)
    labels = state.ledger.labels
    units = torch.arange(len(labels))
    if by_track:
        tracks = [name.rpartition("_")[0] for name in names]
        units = torch.tensor([sorted(set(tracks)).index(track) for track in tracks])
    totals = {"moved": 0.0, "found": 0.0, "named": 0.0}
    for draw in range(draws):
        wrong = moved(len(state.names), units, labels, draw)
        doubts = closed.relabelled(wrong).left_out().doubts
        assert doubts is not None
        truth = wrong != labels
        totals["moved"] += float(truth.sum()) / draws
        totals["named"] += len(doubts.rows) / draws
        totals["found"] += float(truth[doubts.rows].sum()) / draws
    return totals


def row(title: str, found: dict[str, float]) -> str:
    """Return a line of the table."""
    share = found["found"] / found["moved"]
    wrongly = found["named"] - found["found"]
    rate = wrongly / found["named"] if found["named"] else 0.0
    return f"| {title} | {found['moved']:.0f} | {share:.0%} | {wrongly:.1f} ({rate:.0%}) |"


def main() -> None:
    """Measure, print the table, and write it to a page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name, kinds in (("flowers20", ("images",)), ("signs12", ("images", "tracks"))):
        with tempfile.TemporaryDirectory() as scratch:
            weeks = sorted((arguments.data / name).glob("week*"))
            model = learned(weeks, Path(scratch))
            clean = len(IncrementalClassifier(model).doubtful())
            for kind in kinds:
                found = measure(model, kind == "tracks", arguments.draws)
                what = f"one {'image' if kind == 'images' else 'drive-by'} in {1 / SHARE:.0f}"
                title = f"{name}, {what} moved ({clean} reported before)"
                lines.append(row(title, found))
                print(lines[-1], flush=True)
    if arguments.out:
        draws = "one draw" if arguments.draws == 1 else f"{arguments.draws} draws"
        arguments.out.write_text(TABLE.format(draws=draws) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
