from .node_inputs import NodeInputs, tree_inputs

__all__ = ["NodeInputs", "tree_inputs"]
