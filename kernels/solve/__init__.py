from .forward_substitution import tree_solve

__all__ = ["tree_solve"]
