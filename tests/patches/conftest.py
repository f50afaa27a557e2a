"""Patch tests run on the installed vLLM, on a CPU or on a GPU."""

from __future__ import annotations

import os

# read when vLLM is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
