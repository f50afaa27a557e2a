"""What a round keeps of the Gated DeltaNet layers, and the commit that folds the accepted path into the states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_vllm.config import BoleConfig
from bole_vllm.gdn import TreeGatedDeltaNet
from bole_vllm.kernels.commit import LayerTable, commit_factor, commit_replay
from bole_vllm.kernels.factors import padded_nodes
from bole_vllm.kernels.topology import Forest


def solve_block(tree_size: int, device: torch.device) -> int:
    """Rows per block of the closed form's triangular system.

    32 rows spill registers in the solve on a GPU; the interpreter pays per operation and wants few large blocks.
    """
    return 16 if tree_size <= 16 or device.type == "cuda" else 32


@dataclass
class LayerFactors:
    """The buffers one layer writes during verification. Those marked * are shared by all layers (one layer's lifetime)."""

    q: torch.Tensor  # * [capacity, HK, DK] fp32, L2-normalised and scaled
    k: torch.Tensor  # [capacity, HK, DK] fp32, L2-normalised (* in replay)
    v: torch.Tensor  # * [capacity, HV, DV] activation dtype
    x: torch.Tensor  # [capacity, C] conv inputs
    g: torch.Tensor  # [capacity, HV] fp32 log decay (* in factor)
    beta: torch.Tensor  # [capacity, HV] fp32 (* in factor)
    p: torch.Tensor  # [capacity, HV] fp32 log decay summed over the path (* in replay)
    u: torch.Tensor  # [capacity, HV, DV] fp32 corrections (* in replay)
    decay_kk: torch.Tensor  # * [capacity, HV, T_pad] fp32: G, inverted on its diagonal blocks
    decay_qk: torch.Tensor  # * [capacity, HV, T_pad] fp32: C
    block: int
    precision: str


class RoundFactors:
    """Per-layer factors of one round in preallocated [layers, capacity, ...] buffers, and the launch that commits them."""

    def __init__(self, layers: list[TreeGatedDeltaNet], capacity: int, config: BoleConfig, dtype: torch.dtype, device: torch.device):
        self.layers, self.config = layers, config
        first = layers[0]
        hk, hv = first.num_k_heads // first.tp_size, first.num_v_heads // first.tp_size
        dk, dv = first.head_k_dim, first.head_v_dim
        block = solve_block(config.tree_size, torch.device(device))
        padded = padded_nodes(config.tree_size, block)
        keep = len(layers)
        factor_layers, replay_layers = (keep, 1) if config.commit == "factor" else (1, keep)

        def buffer(copies: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(copies, capacity, *shape, dtype=dtype, device=device)

        self.k = buffer(factor_layers, hk, dk)
        self.u = buffer(factor_layers, hv, dv)
        self.p = buffer(factor_layers, hv)
        self.g = buffer(replay_layers, hv)
        self.beta = buffer(replay_layers, hv)
        self.x = buffer(keep, 2 * hk * dk + hv * dv, dtype=dtype)
        shared = {
            "q": buffer(1, hk, dk)[0],
            "v": buffer(1, hv, dv, dtype=dtype)[0],
            "decay_kk": buffer(1, hv, padded)[0],
            "decay_qk": buffer(1, hv, padded)[0],
            "block": block,
            "precision": config.precision,
        }
        for i, layer in enumerate(layers):
            kept = {name: self._of_layer(getattr(self, name), i) for name in ("k", "u", "p", "g", "beta", "x")}
            layer.factors = LayerFactors(**kept, **shared)
        self.table: LayerTable | None = None

    @staticmethod
    def _of_layer(buffer: torch.Tensor, i: int) -> torch.Tensor:
        return buffer[i if buffer.shape[0] > 1 else 0]

    @property
    def bytes_per_node(self) -> int:
        """Bytes kept per tree node from a layer's verification to the commit, over all layers."""
        kept = (self.k, self.u, self.p, self.x) if self.config.commit == "factor" else (self.g, self.beta, self.x)
        return sum(t.shape[0] * t[0, 0].numel() * t.element_size() for t in kept)

    def bind(self, group_of_layer: list[int]) -> None:
        """Record where the layers' state tensors lie, once they are allocated. group_of_layer: layer -> row of the slot arrays."""
        views = [layer.state_views() for layer in self.layers]
        self.table = LayerTable.build(
            [ssm for _, ssm in views],
            [conv for conv, _ in views],
            group_of_layer,
            [layer.conv_weight() for layer in self.layers],
            [layer.conv1d.bias for layer in self.layers],
        )

    def commit(
        self,
        forest: Forest,
        path: torch.Tensor,
        path_len: torch.Tensor,
        src_slot: torch.Tensor,
        dst_slot: torch.Tensor,
        dst_len: torch.Tensor,
    ) -> None:
        """Fold each request's path into its states, in place: one launch over layers, heads and requests.

        path [R, D + 1] node indices, path_len [R]; src_slot [groups, R]: the state before node 0; dst_slot
        [groups, R, 2] and dst_len [R, 2]: the state after the first dst_len path nodes goes to dst_slot (0: nothing).
        """
        where = (forest, path, path_len, src_slot, dst_slot, dst_len)
        if self.config.commit == "factor":
            commit_factor(self.table, self.p, self.k, self.u, self.x, *where, precision=self.config.precision)
        else:
            commit_replay(self.table, self.g, self.beta, self.x, *where)


@dataclass
class CommitTargets:
    """Where the states of a batch are read and written."""

    src_slot: torch.Tensor  # [groups, R] int32
    dst_slot: torch.Tensor  # [groups, R, 2] int32
    dst_len: torch.Tensor  # [R, 2] int32 path nodes folded into each
    last_column: torch.Tensor  # [R] int64 block column of the running state afterwards


def commit_targets(
    block_tables: list[torch.Tensor], src_slot: torch.Tensor, num_computed: torch.Tensor, path_len: torch.Tensor, block_size: int | None
) -> CommitTargets:
    """Destinations of the commit.

    Without prefix caching (`block_size` None) the one state is updated in place. With it (vLLM's `align` mode) a state
    belongs to the block that its last token lies in: the final state goes to the column of token L + n - 1, and where
    the path crosses a block boundary the exact state at the boundary goes to the block that ends there, which is the
    one a later prefix hit resumes from. L = num_computed [R], n = path_len [R]; block tables [R, columns] per group.
    """
    length = path_len.to(torch.int32)
    no_second = torch.zeros_like(length)
    if block_size is None:
        dst_slot = torch.stack([src_slot, torch.zeros_like(src_slot)], dim=-1)
        return CommitTargets(src_slot, dst_slot, torch.stack([length, no_second], dim=-1), no_second.long())
    before = num_computed.long()
    after = before + path_len.long()
    last_column = (after - 1).clamp(min=0) // block_size
    boundary = after // block_size * block_size
    crossed = (boundary > before) & (boundary < after)
    boundary_len = torch.where(crossed, boundary - before, 0).to(torch.int32)
    boundary_column = (boundary // block_size - 1).clamp(min=0)
    columns = torch.stack([last_column, boundary_column], dim=-1)
    # [groups, R, 2]
    dst_slot = torch.stack([table.gather(1, columns) for table in block_tables]).to(torch.int32)
    return CommitTargets(src_slot, dst_slot, torch.stack([length, boundary_len], dim=-1), last_column)
