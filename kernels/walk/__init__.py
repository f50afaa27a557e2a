from .edge_walk import walk_tree

__all__ = ["walk_tree"]
