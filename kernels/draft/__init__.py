from .grow import Candidates, Tree, TreeShape, extend, select, start, start_from
from .top_children import top_children

__all__ = ["Candidates", "Tree", "TreeShape", "extend", "select", "start", "start_from", "top_children"]
