from .grow import Candidates, Tree, TreeShape, extend, select, start, start_from
from .int8_head import int8_logits, quantize_rows
from .next_depth import RowInputs, RowOutputs
from .rows import PAD_SLOT, place_rows, slots_by_depth
from .top_children import top_children

__all__ = [
    "PAD_SLOT",
    "Candidates",
    "RowInputs",
    "RowOutputs",
    "Tree",
    "TreeShape",
    "extend",
    "int8_logits",
    "place_rows",
    "quantize_rows",
    "select",
    "slots_by_depth",
    "start",
    "start_from",
    "top_children",
]
