from .grow import Candidates, Tree, TreeShape, extend, select, start, start_from
from .rows import PAD_SLOT, place_rows, slots_by_depth
from .top_children import top_children

__all__ = [
    "PAD_SLOT",
    "Candidates",
    "Tree",
    "TreeShape",
    "extend",
    "place_rows",
    "select",
    "slots_by_depth",
    "start",
    "start_from",
    "top_children",
]
