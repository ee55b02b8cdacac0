"""Freed memory stays with the process: a step must not pay again for the previous step's pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tacit.engine.allocator import USERS_OWN

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have their own ways")

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


def faults(keep: bool, **settings: str) -> int:
    command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    clean = {name: value for name, value in os.environ.items() if name not in USERS_OWN}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **settings})
    return int(done.stdout)


@glibc
def test_memory_that_a_step_frees_is_there_for_the_next():
    assert faults(keep=True) < 1_000


@glibc
def test_settings_of_the_users_own_stay():
    every_block_goes_back = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults(keep=True, **every_block_goes_back) == faults(keep=False, **every_block_goes_back)


PIECES = """
import torch
from pathlib import Path
from tacit.engine import allocator

allocator.{way}()
blocks = [torch.ones(1 << 20) for _ in range(40)]
del blocks[::2]
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line).split()[1])
"""


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pieces_between_blocks_in_use_go_back_where_memory_counts():
    clean = {name: value for name, value in os.environ.items() if name not in USERS_OWN}
    found = {}
    for way in ("keep_freed_memory", "return_freed_memory"):
        command = [sys.executable, "-c", PIECES.format(way=way)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
        found[way] = int(done.stdout)
    assert found["return_freed_memory"] < found["keep_freed_memory"] - 60_000  # kB; 80 MB were freed
