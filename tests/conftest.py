"""Fixtures of the tests in this folder and below."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Tiny products gain nothing from more threads, and lose much where other processes want the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
