"""What the tests in this folder and below share."""

from __future__ import annotations

import os

import pytest
import torch

# Read when Triton is first imported, which no module of tests does before this. A machine with a GPU runs the same tests on it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread():
    """Tiny products gain nothing from more threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
