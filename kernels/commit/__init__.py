from .factor import commit_factor
from .layers import LayerTable
from .replay import commit_replay
from .snapshot import commit_snapshot
from .targets import block_targets, in_place_targets
from .work import ReplayWork

__all__ = ["LayerTable", "ReplayWork", "block_targets", "commit_factor", "commit_replay", "commit_snapshot", "in_place_targets"]
