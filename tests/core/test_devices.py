"""Memory that is returned to the system."""

import platform

import pytest
from tests.helpers.command import completed

LARGE_BLOCKS = """
import torch
from geodl.core.devices import return_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

return_memory()
size = 8 << 20
[torch.ones(size, dtype=torch.uint8) for _ in range(20)]  # glibc keeps blocks as large as those freed before
blocks, between = [], []
for _ in range(20):
    blocks.append(torch.ones(size, dtype=torch.uint8))
    between.append(torch.ones(1000))
full = resident()
blocks.clear()
print(full - resident() > 19 * size)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is asked to return memory"
)
def test_large_blocks_are_returned_to_the_system():
    assert completed(code=LARGE_BLOCKS).stdout.strip() == "True"
