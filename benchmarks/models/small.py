"""Configuration of the small model that is trained to be scaled up: one for all large shapes."""

from __future__ import annotations

from benchmarks.models.demo import model as demo
from benchmarks.models.placement import Placement
from benchmarks.models.shapes import SHAPES, scaled_config

# what the large shapes need: their head sizes, a hidden size that divides all of theirs, an MLP that fits the shared expert of 35B-A3B
CONFIG = {
    **demo.CONFIG,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def small_config(tiny: bool = False) -> dict:
    """The demo model's configuration with other sizes; `tiny`: two layers for tests on a CPU. ValueError where a shape cannot hold it."""
    config = CONFIG | (TINY if tiny else {})
    for shape in SHAPES:
        Placement(config, scaled_config(shape, config))
    return config
