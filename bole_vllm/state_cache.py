"""What a round keeps of the Gated DeltaNet layers, and the commit that folds the accepted path into the states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bole_vllm.config import BoleConfig
from bole_vllm.gdn import TreeGatedDeltaNet
from bole_vllm.kernels.commit import LayerTable, ReplayWork, commit_factor, commit_replay, commit_snapshot
from bole_vllm.kernels.conv import NodeInputs
from bole_vllm.kernels.solve import NODE_BLOCK
from bole_vllm.kernels.topology import Forest

# requests that a launch of the replay commit takes: at 64 a 9B model's scratch is 170 MiB, and the card is full long before
REPLAY_REQUESTS = 64
# share of the device's memory
MUCH_MEMORY = 0.02


@dataclass
class LayerFactors:
    """The buffers one layer writes during verification. Those marked * are shared by all layers (one layer's lifetime)."""

    inputs: NodeInputs  # q, v *; k, k_scale, p * in replay; g, beta * in factor
    x: torch.Tensor  # [capacity, C] conv inputs
    u: torch.Tensor | None  # [capacity, HV, DV] fp32 corrections; None in replay
    z: torch.Tensor | None  # * [capacity, HV, D] fp32 rows of Z; None in replay
    y: torch.Tensor  # * [capacity, HV, D] fp32 rows of Y
    r: torch.Tensor | None  # * [capacity, HV, DV] fp32 scratch of large trees
    snapshots: torch.Tensor | None  # [capacity, HV, DV, DK] fp32 state after every node; serial verification only
    precision: str


class RoundFactors:
    """Per-layer factors of one round in preallocated [layers, capacity, ...] buffers, and the launch that commits them."""

    def __init__(self, layers: list[TreeGatedDeltaNet], forest: Forest, config: BoleConfig, dtype: torch.dtype, device: torch.device):
        self.layers, self.config = layers, config
        first = layers[0]
        hk, hv = first.num_k_heads // first.tp_size, first.num_v_heads // first.tp_size
        dk, dv = first.head_k_dim, first.head_v_dim
        columns, keep, capacity = forest.path.shape[1], len(layers), forest.capacity
        serial = config.verify == "serial"
        factor = not serial and config.commit == "factor"

        def buffer(copies: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(copies, capacity, *shape, dtype=dtype, device=device)

        shared = NodeInputs.allocate(capacity, hk, dk, hv, dv, dtype, device)
        self.x = buffer(keep, 2 * hk * dk + hv * dv, dtype=dtype)
        self.u = buffer(keep, hv, dv) if factor else None
        # what the commit reads of a layer's node inputs, by name
        names = () if serial else ("k", "k_scale", "p") if factor else ("g", "beta")
        self.kept = {name: torch.stack([getattr(shared, name)] * keep) for name in names}
        z = buffer(1, hv, columns)[0] if factor else None
        y = buffer(1, hv, columns)[0]
        r = buffer(1, hv, dv)[0] if config.tree_size > NODE_BLOCK else None
        width = config.deepest + 1
        self.snapshots = buffer(keep, hv, dv, dk) if serial else None
        at_once = min(forest.max_requests, REPLAY_REQUESTS)
        self.work = None if factor or serial else ReplayWork.allocate(keep, at_once, width, hk, dk, hv, dv, dtype, device)
        for i, layer in enumerate(layers):
            inputs = replace(shared, **{name: tensor[i] for name, tensor in self.kept.items()})
            u, snapshots = (None if kept is None else kept[i] for kept in (self.u, self.snapshots))
            layer.factors = LayerFactors(inputs, self.x[i], u, z, y, r, snapshots, config.precision)
        self.table: LayerTable | None = None

    @property
    def _until_commit(self) -> list[torch.Tensor]:
        """[layers, capacity, ...] what the commit reads of the nodes."""
        return [self.x, *self.kept.values(), *(t for t in (self.u, self.snapshots) if t is not None)]

    @property
    def bytes_per_node(self) -> int:
        """Bytes kept per tree node from a layer's verification to the commit, over all layers."""
        return sum(t.shape[0] * t[0, 0].numel() * t.element_size() for t in self._until_commit)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything a round keeps or works in, for as many trees as the forest holds."""
        first = self.layers[0].factors
        tensors = [*self._until_commit, *vars(first.inputs).values(), *(t for t in (first.z, first.y, first.r) if t is not None)]
        tensors += [] if self.work is None else vars(self.work).values()
        # a layer's inputs are partly views of what is kept
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

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
        if self.snapshots is not None:
            commit_snapshot(self.table, self.snapshots, self.x, *where)
        elif self.config.commit == "factor":
            commit_factor(self.table, self.kept["p"], self.kept["k"], self.kept["k_scale"], self.u, self.x, *where)
        else:
            commit_replay(self.table, self.kept["g"], self.kept["beta"], self.x, *where, self.work)


def memory_advice(round_bytes: int, device_bytes: int, max_num_seqs: int) -> str | None:
    """What to change where a round's buffers take much of the device, which the KV cache then lacks; None where they do not."""
    if round_bytes <= MUCH_MEMORY * device_bytes:
        return None
    share = f"{round_bytes / 2**30:.1f} GiB, {round_bytes / device_bytes:.0%} of the device"
    return (
        f"Bole's buffers take {share}: they hold a whole tree for each of max_num_seqs={max_num_seqs} requests. "
        "Lower --max-num-seqs to what you serve at once, or num_speculative_tokens."
    )
