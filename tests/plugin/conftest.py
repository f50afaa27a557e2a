"""Plugin tests configure real engines on the demo model; no weight is loaded."""

from __future__ import annotations

import os

# read when vLLM is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest


@pytest.fixture(scope="module", autouse=True)
def registries_left_as_found():
    """Whatever a module configured, the next one meets vLLM's own classes."""
    yield
    from bole_vllm import activation

    activation.deactivate()


@pytest.fixture(autouse=True)
def fresh_environment():
    """An engine started earlier in the session makes vLLM cache every environment variable; these tests change some."""
    from vllm import envs

    envs.disable_envs_cache()
