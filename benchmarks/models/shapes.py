"""The large shapes, and the configuration of a checkpoint of one of them that holds a given small model.

Sizes only. What decides the function (epsilon, rotary positions, activation, special tokens, context length) is the small model's.
The 9B sizes are transformers' defaults of `Qwen3_5TextConfig`, those of 35B-A3B its defaults of `Qwen3_5MoeTextConfig`. UNVERIFIED lists
what no source on hand states.
"""

from __future__ import annotations

PERIOD = 4  # three Gated DeltaNet layers, then one of full attention

_HEADS = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320, "mtp_num_hidden_layers": 1, **_HEADS}
_MOE = {**_DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}

SHAPES = {
    "9b": {
        **_DENSE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "27b": {
        **_DENSE,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
    },
    "35b-a3b": {
        **_MOE,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}
UNVERIFIED = {
    "9b": ["mtp_num_hidden_layers"],
    "27b": ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "mtp_num_hidden_layers"],
    "35b-a3b": ["mtp_num_hidden_layers"],
}


def layer_types(config: dict) -> list[str]:
    """Kind of every layer: as the configuration says, else every PERIOD-th layer is full attention."""
    kinds = ("linear_attention",) * (PERIOD - 1) + ("full_attention",)
    return list(config.get("layer_types") or (kinds[i % PERIOD] for i in range(config["num_hidden_layers"])))


def is_moe(config: dict) -> bool:
    """Whether the feed-forward layers are mixtures of experts."""
    return config["model_type"] == "qwen3_5_moe_text"


def scaled_config(shape: str | dict, small: dict) -> dict:
    """Configuration of a checkpoint of `shape` (a name of SHAPES, or sizes) that holds the model of configuration `small`; heads untied."""
    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    config = {**small, **sizes, "tie_word_embeddings": False}
    config["layer_types"] = layer_types({**config, "layer_types": sizes.get("layer_types")})
    if is_moe(config):
        config.pop("intermediate_size", None)
    return config
