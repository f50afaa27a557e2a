"""A profiler trace of one verify round, summed up by kernel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.options import SEED
from benchmarks.kernels.problem import Round
from benchmarks.shapes import LAYERS, TINY_LAYER
from benchmarks.trees import draft_trees

MAX_DEPTH = 8


def trace_round(folder: Path | None, device: torch.device, tiny: bool, commit: str) -> str:
    """Returns the summary of a T=64, B=16 round, inputs as cold as rotation leaves them; writes it and the trace into `folder`."""
    shape, nodes, requests = (TINY_LAYER, 5, 2) if tiny else (LAYERS["9b"], 64, 16)
    r = Round(shape, draft_trees(requests, nodes, MAX_DEPTH, SEED + nodes), SEED, device)
    on_gpu = device.type == "cuda"
    for i in range(len(r.sets)):
        r.tree_core(i, commit)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        r.tree_core(0, commit)
        if on_gpu:
            torch.cuda.synchronize()
    order = "device_time_total" if on_gpu else "cpu_time_total"
    text = found.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=45)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / "trace-kernels.json.gz"))
        (folder / "trace-kernels.txt").write_text(text + "\n")
    return text
