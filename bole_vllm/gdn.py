"""The Gated DeltaNet layer: tree rows go through the closed form, all other rows through vLLM's own code."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from bole_vllm.kernels.conv import tree_inputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.serial import serial_tree
from bole_vllm.kernels.solve import tree_solve
from bole_vllm.kernels.topology import Forest
from bole_vllm.state_shape import one_state_per_request

if TYPE_CHECKING:
    from bole_vllm.state_cache import LayerFactors


@dataclass
class TreeGDNMetadata(GDNAttentionMetadata):
    """vLLM's metadata plus what the tree rows need. vLLM's "spec" rows are the tree rows."""

    # [num_reqs] request -> state slot of this cache group (rows outside the forest: not read)
    state_slot: torch.Tensor | None = None
    # the round's topology, set by the model state; None: no row is a tree (dummy runs)
    forest: Forest | None = None

    def without_trees(self) -> GDNAttentionMetadata:
        """vLLM's metadata of the prefill rows alone, as a batch of their own (its rows: `non_spec_token_indx`)."""
        base = {field.name: getattr(self, field.name) for field in fields(GDNAttentionMetadata)}
        return replace(
            GDNAttentionMetadata(**base),
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=self.num_prefill_tokens,
            spec_query_start_loc=None,
            spec_state_indices_tensor=None,
            spec_sequence_masks=None,
            spec_sequence_masks_cpu=None,
            spec_token_indx=None,
            non_spec_token_indx=None,
            num_accepted_tokens=None,
        )


class TreeGDNBackend(GDNAttentionBackend):
    """vLLM's GDN backend with one state slot a request."""

    @staticmethod
    def get_builder_cls() -> type[TreeGDNMetadataBuilder]:
        return TreeGDNMetadataBuilder


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """Builds vLLM's metadata with state indices of width one."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM sizes this for one slot per draft and would broadcast ours over it.
        self.spec_state_indices_tensor = self.spec_state_indices_tensor[:, :1].contiguous()
        # [max_num_reqs] fixed address, so that captured graphs can read it
        self.state_slot = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len, common_attn_metadata, num_accepted_tokens=None, num_decode_draft_tokens_cpu=None, fast_build=False
    ) -> TreeGDNMetadata:
        m = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        block_table = mamba_get_block_table_tensor(m.block_table_tensor, m.seq_lens, self.kv_cache_spec, mode)
        state_slot = self.state_slot[: m.num_reqs]
        state_slot.copy_(block_table[:, 0], non_blocking=True)
        num_trees = _trees_alone(m.query_start_loc_cpu, num_decode_draft_tokens_cpu)
        if num_trees:
            # Of vLLM's metadata a tree row reads nothing: sixty operations of the host, in every group and round, are left out.
            return TreeGDNMetadata(
                num_prefills=0, num_prefill_tokens=0, num_decodes=0, num_decode_tokens=0, num_spec_decodes=num_trees,
                num_spec_decode_tokens=m.num_actual_tokens, num_actual_tokens=m.num_actual_tokens, state_slot=state_slot,
            )  # fmt: skip
        metadata = super().build(common_prefix_len, m, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build)
        return TreeGDNMetadata(**vars(metadata), state_slot=state_slot)


def _trees_alone(query_start_cpu: torch.Tensor, num_drafts_cpu: torch.Tensor | None) -> int:
    """How many requests a batch holds, if all of them are tree rows and the rest is padding; else 0.

    query_start_cpu [R + 1], num_drafts_cpu [R] as vLLM gives them: -1 marks a row that is no tree.
    """
    if num_drafts_cpu is None:
        return 0
    is_tree, rows = num_drafts_cpu.numpy() >= 0, np.diff(query_start_cpu.numpy())
    return 0 if rows[~is_tree].any() else int(is_tree.sum())


class TreeGatedDeltaNet(QwenGatedDeltaNetAttention):
    """Replaces vLLM's layer at construction while Bole is on.

    The verify pass reads the request's one committed state and never writes it; what the commit needs is kept in
    `factors` (set by the model state) until the end of the round.
    """

    factors: LayerFactors | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # The fused decode kernel indexes one state per draft; with one column it would accept any tree and be wrong.
        self.enable_fused_gdn_spec_decode = False

    def get_state_shape(self):
        return one_state_per_request(super().get_state_shape(), self.num_spec)

    def get_kv_cache_spec(self, vllm_config):
        return replace(super().get_kv_cache_spec(vllm_config), num_speculative_blocks=0)

    def get_attn_backend(self):
        return TreeGDNBackend

    # [S, C, width - 1] and [S, HV, DK, DV]: logical views of the state cache
    def state_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        conv, ssm = self.kv_cache
        conv = conv if is_conv_state_dim_first() else conv.transpose(-1, -2)
        if current_platform.is_cpu():
            # vLLM's CPU kernels keep [K, V] in a tensor declared [V, K]
            return conv, ssm.view(ssm.shape[0], ssm.shape[1], ssm.shape[3], ssm.shape[2])
        return conv, ssm.transpose(-1, -2)

    def conv_weight(self) -> torch.Tensor:
        """[C, width] plain conv weight (vLLM packs it in place on some CPUs, and a LoRA wrapper hides the plain one)."""
        conv1d = getattr(self.conv1d, "base_layer", self.conv1d)
        weight = getattr(conv1d, "_cpu_unpacked_conv_weight", None)
        return conv1d.weight.view(conv1d.weight.shape[0], -1) if weight is None else weight

    def _forward_core(self, mixed_qkv, b, a, core_attn_out) -> None:
        self._core(super()._forward_core, mixed_qkv, b, a, core_attn_out)

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's CPU forward with the core exchanged (its core is a custom op that knows no trees)."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        mixed_qkv, z, b, a = self._split_projections(qkvz, ba)
        heads = self.num_v_heads // self.tp_size
        core_attn_out = hidden_states.new_zeros(hidden_states.shape[0], heads, self.head_v_dim)
        self._core(self._stock_cpu_core, mixed_qkv, b, a, core_attn_out)
        return self._output_projection(core_attn_out, z)

    def _split_projections(self, qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            return torch.cat([t.flatten(1) for t in (query, key, value)], dim=-1), z, b, a
        qkv_size = (self.key_dim * 2 + self.value_dim) // self.tp_size
        mixed_qkv, z = qkvz.split([qkv_size, self.value_dim // self.tp_size], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return mixed_qkv, z.reshape(z.size(0), -1, self.head_v_dim), b, a

    def _stock_cpu_core(self, mixed_qkv, b, a, core_attn_out) -> None:
        from vllm.utils.torch_utils import _encode_layer_name

        torch.ops.vllm.cpu_gdn_attention_core(mixed_qkv, b, a, core_attn_out, _encode_layer_name(self.prefix))

    def _core(self, stock, mixed_qkv, b, a, core_attn_out) -> None:
        metadata = _layer_metadata(self.prefix)
        if metadata is None or metadata.forest is None or metadata.num_spec_decodes == 0:
            stock(mixed_qkv, b, a, core_attn_out)
            return
        self._verify(metadata, mixed_qkv, b, a, core_attn_out)
        if metadata.num_prefills > 0:
            rows = metadata.non_spec_token_indx.long()
            out = core_attn_out.new_zeros(rows.shape[0], *core_attn_out.shape[1:])
            with _metadata_for(self.prefix, metadata.without_trees()):
                stock(mixed_qkv[rows], b[rows], a[rows], out)
            core_attn_out.index_copy_(0, rows, out)

    def _verify(self, metadata: TreeGDNMetadata, mixed_qkv, b, a, core_attn_out) -> None:
        """Outputs of every tree node from the committed state; keeps the factors of the round. State is read only."""
        forest, slot, keep = metadata.forest, metadata.state_slot, self.factors
        conv_state, ssm_state = self.state_views()
        tree_inputs(
            mixed_qkv, a, b, self.conv_weight(), self.conv1d.bias, self.A_log, self.dt_bias, conv_state, slot, forest, keep.inputs, keep.x,
            overlap=True,
        )  # fmt: skip
        if keep.snapshots is not None:
            serial_tree(keep.inputs, ssm_state, slot, forest, keep.snapshots, core_attn_out)
            return
        tree_factors(keep.inputs, forest, keep.z, keep.y, overlap=True)
        tree_solve(keep.inputs, keep.z, keep.y, ssm_state, slot, forest, core_attn_out, keep.u, keep.r, keep.precision, overlap=True)


def _layer_metadata(prefix: str) -> TreeGDNMetadata | None:
    metadata = get_forward_context().attn_metadata
    return metadata.get(prefix) if isinstance(metadata, dict) else None


class _metadata_for:
    """Shows a layer other metadata for the length of a `with` block."""

    def __init__(self, prefix: str, metadata: GDNAttentionMetadata) -> None:
        self.prefix, self.metadata = prefix, metadata

    def __enter__(self) -> None:
        table = get_forward_context().attn_metadata
        self.saved = table[self.prefix]
        table[self.prefix] = self.metadata

    def __exit__(self, *_exc) -> None:
        get_forward_context().attn_metadata[self.prefix] = self.saved
