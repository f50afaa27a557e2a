from .begin import begin_round
from .build import build_forest, tree_positions
from .forest import Forest, num_mask_words, path_columns
from .integrity import check_integrity

__all__ = ["Forest", "begin_round", "build_forest", "check_integrity", "num_mask_words", "path_columns", "tree_positions"]
