from .chain_order import chain_order
from .counts import COUNTS, add_counts
from .edge_walk import walk_tree

__all__ = ["COUNTS", "add_counts", "chain_order", "walk_tree"]
