from .split_kv import tree_attention

__all__ = ["tree_attention"]
