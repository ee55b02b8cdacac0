"""Freed memory stays with the process: a step must not pay for pages that the one before it had."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from tacit.engine.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.ones(1 << 20) for _ in range(20)]  # a step's activations: 80 MB in blocks of 4
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keep}:
    keep_freed_memory()
faults()
print(faults())
"""


def faults(keep: bool) -> int:
    command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have ways of their own")
def test_memory_that_a_step_frees_is_there_for_the_next():
    if faults(keep=False) < 10_000:
        pytest.skip("nothing to mend here: huge pages, or settings of the user's own")
    assert faults(keep=True) < 1_000
