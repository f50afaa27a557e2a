"""Plugin tests configure real engines on the demo model; no weight is loaded."""

import os
from pathlib import Path

# Read when Triton and vLLM are first imported. A machine with a GPU runs the same tests on its own platform.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    folder = ROOT / "examples" / "demo_model"
    assert (folder / "config.json").exists(), f"no demo model in {folder}"
    return folder


@pytest.fixture(scope="module", autouse=True)
def registries_left_as_found():
    """Whatever a module configured, the next one meets vLLM's own classes."""
    yield
    from bole_vllm import activation

    activation.deactivate()
