from .parallel_solve import NODE_BLOCK, tree_solve

__all__ = ["NODE_BLOCK", "tree_solve"]
