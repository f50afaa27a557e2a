from .factor import commit_factor
from .layers import LayerTable
from .replay import commit_replay

__all__ = ["LayerTable", "commit_factor", "commit_replay"]
