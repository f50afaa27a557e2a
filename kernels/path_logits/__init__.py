from .bad_words import ban_words
from .penalties import PathPenalties
from .rows import PathRows
from .thinking_budget import force_end

__all__ = ["PathPenalties", "PathRows", "ban_words", "force_end"]
