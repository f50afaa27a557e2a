"""Patch tests run on the installed vLLM, on a CPU or on a GPU."""

from __future__ import annotations

import os

# Read when Triton and vLLM are first imported. A machine with a GPU runs the same tests on its own platform.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
