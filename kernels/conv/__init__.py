from .gates import tree_gates
from .path_conv import tree_conv

__all__ = ["tree_conv", "tree_gates"]
