"""Benchmarks: ratios, peak memory, and the table compared with the paper's."""

from dataclasses import replace

import pytest
import torch
from benchmarks.steps import Ratio, peak, ratio
from benchmarks.time_memory import time_memory

from geodl.learning.timing import Shape


def test_ratio_of_pairs():
    assert ratio([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == Ratio(2.0, 1.5, 4.0, 3)
    hundred = ratio([float(i) for i in range(1, 101)], [1.0] * 100)
    assert hundred.median == 50.5
    # the 40th and the 61st of 100: the binomial distribution has 96.5 % between them, 94.3 % one rank further in
    assert (hundred.low, hundred.high) == (40.0, 61.0)


def test_peak_is_measured_in_a_separate_process():
    # 600 MB allocated in this process are not part of it.
    lean, ballast = Shape("convnet", 8, batch=8, old=3, new=2), torch.ones(150_000_000)
    assert 0 <= peak("none", lean) < 300e6 < ballast.nbytes
    assert peak("none", replace(lean, size=64, batch=128)) > 100e6  # the first map alone is 32 MB


def test_time_and_memory_compared_with_the_paper():
    tenths = {"none": 0.1, "lwf": 0.2, "cosine": 0.2, "geodesic": 0.3}
    peaks = dict.fromkeys(tenths, 2.0**30) | {"geodesic": 2.0**31}
    table = time_memory({name: [each] * 3 for name, each in tenths.items()}, peaks, "a network")
    rows = {row[0]: row[1:] for row in table.rows}
    times, memory = ["1.50 (1.50 to 1.50)", 1.4], [2.0, pytest.approx(2.4 / 1.7)]
    assert rows["CE + LwF"] == [pytest.approx(200), 1024, *times, *memory]
    assert rows["CE + Cos"][3] == 1.3
    assert rows["CE"][3] is None
    assert rows["CE + GeoDL"] == [pytest.approx(300), 2048, None, None, None, None]
    assert table.notes[0].startswith("a network. Steps took turns (3 each)")
