from .grow import Candidates, Tree, TreeShape, extend, select, start

__all__ = ["Candidates", "Tree", "TreeShape", "extend", "select", "start"]
