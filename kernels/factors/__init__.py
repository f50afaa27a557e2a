from .rows import tree_factors

__all__ = ["tree_factors"]
