"""Configuration of the small model that is trained to be scaled up to a large shape."""

from __future__ import annotations

from benchmarks.models.demo import model as demo
from benchmarks.models.placement import Placement
from benchmarks.models.shapes import SHAPES, scaled_config

RATIO = {"9b": 16, "27b": 16, "35b-a3b": 4}  # hidden size of the shape over that of its small model: powers of four
TINY_RATIO = 64
TINY = {"vocab_size": 512, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def small_config(shape: str, tiny: bool = False) -> dict:
    """The demo model's configuration with the head and hidden sizes that `shape` asks for; `tiny`: two layers for tests on a CPU.

    ValueError where the large shape could not hold it.
    """
    sizes = SHAPES[shape]
    hidden = sizes["hidden_size"] // (TINY_RATIO if tiny else RATIO[shape])
    room = sizes.get("intermediate_size", sizes.get("shared_expert_intermediate_size"))
    config = {**demo.CONFIG, "hidden_size": hidden, "intermediate_size": min(demo.CONFIG["intermediate_size"], room)}
    config |= {key: sizes[key] for key in ("head_dim", "linear_key_head_dim", "linear_value_head_dim")}
    config |= TINY if tiny else {}
    Placement(config, scaled_config(shape, config))
    return config
