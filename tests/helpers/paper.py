"""The runs of the paper, as `geodl reproduce` plans them."""

from pathlib import Path

from geodl.bench.paper import grid
from geodl.bench.paper.grid import choose
from geodl.learning.timing import Speed

SPEED = Speed({"none": 100.0, "lwf": 50.0, "cosine": 40.0, "geodesic": 20.0}, 1e9)


def jobs_of(what, dataset=None, length="paper", phases=None, **options):
    dataset, chosen = choose(what, dataset, phases)
    return grid.grid(chosen, dataset, length, Path("runs"), **{"runs": 1} | options)
