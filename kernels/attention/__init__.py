from .merge import merge_tree_attention
from .split_kv import tree_attention

__all__ = ["merge_tree_attention", "tree_attention"]
