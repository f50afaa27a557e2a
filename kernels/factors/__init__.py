from .block_inverse import padded_nodes, tree_factors

__all__ = ["padded_nodes", "tree_factors"]
