"""Per-step state of a model that verifies trees: topology, positions, attention metadata, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from bole_vllm.attention import TreeRows
from bole_vllm.commit_graphs import CommitGraphs
from bole_vllm.config import BoleConfig
from bole_vllm.forest import Forest, TreeStore, check_integrity
from bole_vllm.gdn import TreeGatedDeltaNet, TreeGDNMetadata, TreeGDNMetadataBuilder
from bole_vllm.kernels.commit import block_targets, in_place_targets
from bole_vllm.kernels.kv_move import KVTable, move_kv
from bole_vllm.kernels.topology import begin_round, tree_positions
from bole_vllm.lora import TreeLoraState
from bole_vllm.metrics import TreeStats
from bole_vllm.sampler import TreeSampler
from bole_vllm.state_cache import RoundFactors, memory_advice

logger = init_logger("vllm.bole")


class TreeModelState(MambaHybridModelState):
    """vLLM's hybrid model state with one committed recurrent state per request and a forest per step.

    One round: `prepare_attn` turns the stored trees into the batch's forest and marks the tree rows in the attention
    metadata; `prepare_inputs` gives nodes their RoPE positions; the sampler leaves the accepted path in `path`;
    `postprocess_state` commits it. The drafter then writes the next trees into `trees`.
    """

    def __init__(self, vllm_config, model, encoder_cache, device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.config = BoleConfig.from_vllm(vllm_config)
        size, depth = self.config.tree_size, self.config.deepest
        self.trees = TreeStore(self.max_num_reqs, size, device)
        self.full_forest = Forest.allocate(self.max_num_reqs, size, depth, device)
        # [max_num_tokens] RoPE positions of the step, at a fixed address
        self.positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        # [max_num_reqs] slot of each request in this step, -1: none; nodes of its tree; tokens before its root
        self.slots = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.num_rows = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        # [max_num_reqs, depth + 1] accepted nodes of each request of the batch, root first; [max_num_reqs] how many
        self.path = torch.zeros(self.max_num_reqs, depth + 1, dtype=torch.int32, device=device)
        self.path_len = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        # [max_num_reqs] what `is_tree` is where no request is in its prompt
        self.all_trees = torch.ones(self.max_num_reqs, dtype=torch.bool, device=device)
        layers = get_layers_from_vllm_config(vllm_config, TreeGatedDeltaNet)
        self.factors = RoundFactors(list(layers.values()), self.full_forest, self.config, self.dtype, device)
        self.gdn_layer_names = list(layers)
        self.stats_counters = TreeStats(device)
        # set by the drafter: counts the tokens of a new request's prompt for its vocabulary
        self.count_prompt: Callable[[list[int] | None], None] | None = None
        # and counts of the tokens that are served, [vocabulary]
        self.token_counts: torch.Tensor | None = None
        # set by the worker where adapters are served
        self.lora_state: TreeLoraState | None = None
        self._step: _Step | None = None
        # graphs of the commit, None: it runs as it is; and of every GDN group, [max_num_reqs] request -> its state's slot
        self.commit_graphs: CommitGraphs | None = None
        self._state_slots: list[torch.Tensor] = []

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data) -> None:
        super().add_request(req_index, new_req_data)
        self.trees.reset(req_index)
        if self.count_prompt is not None:
            self.count_prompt(new_req_data.prompt_token_ids)

    # -- start-up ------------------------------------------------------------------------------------------------

    def custom_sampler(self, sampler):
        return sampler, TreeSampler(sampler, self.vllm_config.speculative_config, self.device, self)

    def initialize_kv_cache(self, kv_cache_config, block_tables) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        group_of = {name: g for g, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        gdn_groups = [group_of[name] for name in self.gdn_layer_names]
        self._gdn_groups = sorted(set(gdn_groups))  # rows of the slot arrays -> cache group
        self._slot_row = {name: self._gdn_groups.index(g) for name, g in zip(self.gdn_layer_names, gdn_groups)}
        self.factors.bind(list(self._slot_row.values()))
        logger.info_once(
            "Bole keeps %.3f MiB per tree node until the commit: %d nodes a request, %.2f GiB for %d requests at once (max_num_seqs).",
            self.factors.bytes_per_node / 2**20,
            self.config.tree_size,
            self.factors.allocated_bytes / 2**30,
            self.max_num_reqs,
        )
        if self.device.type == "cuda":
            advice = memory_advice(
                self.factors.allocated_bytes, torch.cuda.get_device_properties(self.device).total_memory, self.max_num_reqs
            )
            if advice:
                logger.warning_once(advice)
        attention = get_layers_from_vllm_config(self.vllm_config, Attention)
        # Only the target's layers: the drafter rewrites its own KV over the accepted path.
        targets = {name: layer for name, layer in attention.items() if not getattr(layer, "is_draft_layer", False)}
        self._kv_table = KVTable.build([layer.kv_cache for layer in targets.values()], [group_of[name] for name in targets])
        self._block_size = self._gdn_block_size(kv_cache_config) if self._align_mode else None
        self.commit_graphs, self._state_slots = None, []

    def _gdn_block_size(self, kv_cache_config) -> int:
        block_size = kv_cache_config.kv_cache_groups[self._gdn_groups[0]].kv_cache_spec.block_size
        if block_size < self.config.tree_size:
            raise ValueError(
                f"The state block size {block_size} is smaller than the tree of {self.config.tree_size} nodes: raise --block-size, or "
                "lower num_speculative_tokens."
            )
        return block_size

    def capture_inner_cudagraphs(self, input_buffers, block_tables, attn_groups, kv_cache_config) -> None:
        super().capture_inner_cudagraphs(input_buffers, block_tables, attn_groups, kv_cache_config)
        self._find_state_slots(attn_groups)
        self.path_len.zero_()  # of earlier dummy steps: nothing is committed while graphs are made
        self.commit_graphs = CommitGraphs(self.vllm_config, self.device)
        self.commit_graphs.capture(lambda num_reqs: self._commit(num_reqs, block_tables.input_block_tables, block_tables.slot_mappings))

    def _find_state_slots(self, attn_groups) -> None:
        """Where the metadata builders leave the states' slots: one buffer a GDN group, at a fixed address."""
        if not self._state_slots:
            builders = [group.get_metadata_builder(0) for g in self._gdn_groups for group in attn_groups[g]]
            self._state_slots = [builder.state_slot for builder in builders if isinstance(builder, TreeGDNMetadataBuilder)]

    # -- a step --------------------------------------------------------------------------------------------------

    def preprocess_state(self, input_batch, *args, **kwargs) -> None:
        super().preprocess_state(input_batch, *args, **kwargs)
        if self.lora_state is not None:
            self.lora_state.num_logits_np = np.diff(input_batch.cu_num_logits_np)

    def prepare_attn(
        self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture=False, **kwargs
    ) -> dict[str, Any]:
        padded = cudagraph_mode == CUDAGraphMode.FULL
        num_reqs = input_batch.num_reqs_after_padding if padded else input_batch.num_reqs
        step = self._begin_step(input_batch, num_reqs, block_tables, slot_mappings, for_capture)
        metadata = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture=for_capture, **kwargs
        )
        # rows of a graph that stand for no request are in nobody's way
        rows = TreeRows.of_forest(step.forest, self.num_rows[:num_reqs], step.num_computed, step.only_trees)
        marked: dict[int, Any] = {}
        for name, layer_metadata in metadata.items():
            if id(layer_metadata) not in marked:
                marked[id(layer_metadata)] = self._mark(layer_metadata, step, rows)
            metadata[name] = marked[id(layer_metadata)]
        self._find_state_slots(attn_groups)
        if not for_capture:
            self._clear_new_states(input_batch, step)
        return metadata

    def _begin_step(self, input_batch, num_reqs: int, block_tables, slot_mappings, for_capture: bool) -> _Step:
        query_start = input_batch.query_start_loc[: num_reqs + 1]
        is_tree_np = np.zeros(num_reqs, dtype=bool)
        is_tree_np[: input_batch.num_reqs] = True if for_capture else self._verify_rows(input_batch)
        only_trees = bool(is_tree_np[: input_batch.num_reqs].all())
        is_tree = self.all_trees if only_trees else async_tensor_h2d(is_tree_np, device=self.device)
        forest, slots, num_computed = self.full_forest.for_requests(num_reqs), self.slots[:num_reqs], self.num_computed[:num_reqs]
        # A step without drafts never reaches the tree sampler: its trees are roots, and roots are always committed.
        # The device's own lengths: under async scheduling the host's are upper bounds.
        begin_round(
            input_batch.idx_mapping[: input_batch.num_reqs], is_tree, query_start, input_batch.seq_lens, forest.max_nodes, slots,
            num_computed, self.num_rows[:num_reqs], self.path[:num_reqs], self.path_len,
        )  # fmt: skip
        self.trees.build(forest, slots, is_tree, query_start, input_batch.input_ids)
        if self.config.debug:
            check_integrity(forest, num_reqs)
        self._step = _Step(input_batch, forest, is_tree_np, only_trees, num_computed, block_tables, slot_mappings)
        return self._step

    def _verify_rows(self, input_batch) -> np.ndarray:
        """[num_reqs] rows that are trees: all decode rows, those without drafts included (as vLLM's own state decides)."""
        prefilling = input_batch.is_prefilling_np
        if input_batch.prefill_runs_as_decode_np is not None:
            prefilling = prefilling & ~input_batch.prefill_runs_as_decode_np
        scheduled = input_batch.num_scheduled_tokens
        return ~prefilling & (scheduled > 0) & (scheduled <= self.config.tree_size)

    def _mark(self, metadata, step: _Step, rows: TreeRows):
        if isinstance(metadata, TreeGDNMetadata):
            metadata.forest = step.forest
            return metadata
        return metadata.with_tree(rows)

    def _clear_new_states(self, input_batch, step: _Step) -> None:
        """A one-token prompt is scheduled as a tree row at once: its slot still holds its last owner's state."""
        new = np.flatnonzero(step.is_tree_np[: input_batch.num_reqs] & (input_batch.num_computed_tokens_np == 0))
        if new.size:
            rows = async_tensor_h2d(new, device=self.device)
            for name, layer in zip(self.gdn_layer_names, self.factors.layers):
                slots = self._state_slots[self._slot_row[name]][rows].long()
                for state in layer.state_views():
                    state[slots] = 0

    def prepare_inputs(self, input_batch, req_states) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        step = self._step if self._step is not None and self._step.batch is input_batch else None  # None: a run without attention
        positions = self.positions[: input_batch.num_tokens_after_padding]
        if step is None or not step.only_trees or "positions" in inputs:
            positions.copy_(input_batch.positions)
        if step is not None:
            tree_positions(step.forest, step.num_computed, positions, input_batch.input_ids)
        if "positions" in inputs:  # multi-dimensional RoPE: shift every section alike
            inputs["positions"] += positions - input_batch.positions
            return inputs
        return {**inputs, "positions": positions}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        inputs.setdefault("positions", self.positions[:num_tokens])
        return inputs

    def postprocess_state(self, idx_mapping, num_sampled, num_computed_tokens=None) -> None:
        """Fold the accepted paths into the recurrent states and make their KV contiguous.

        vLLM's own accepted-token bookkeeping stays at its neutral 1: states are exact after every commit.
        """
        step, self._step = self._step, None
        if step is None or idx_mapping.shape[0] == 0:
            return
        num_reqs = idx_mapping.shape[0]
        if self.commit_graphs is None or not self.commit_graphs.run(num_reqs):
            self._commit(num_reqs, step.block_tables, step.slot_mappings)

    def _commit(self, num_reqs: int, block_tables, slot_mappings: torch.Tensor) -> None:
        """Of the first rows of the batch, those without a path included. block_tables: per cache group [>= R, columns]; slot_mappings
        [groups, token rows]. Device work only: all that changes from step to step lies at fixed addresses."""
        forest = self.full_forest.for_requests(num_reqs)
        path, path_len = self.path[:num_reqs], self.path_len[:num_reqs]
        # [groups, R] the state that each GDN group's verification read
        src_slot = torch.stack([slots[:num_reqs] for slots in self._state_slots])
        if self._block_size is None:
            dst_slot, dst_len = in_place_targets(src_slot, path_len)
        else:
            tables = [block_tables[g][:num_reqs] for g in self._gdn_groups]
            dst_slot, dst_len = block_targets(
                tables, self.num_computed[:num_reqs], path_len, self._block_size, self.slots[:num_reqs], self._mamba_state_idx_gpu
            )
        self.factors.commit(forest, path, path_len, src_slot, dst_slot, dst_len)
        move_kv(self._kv_table, slot_mappings, forest, path, path_len)
        self.stats_counters.add(forest, path, path_len, self.token_counts)

    def stats(self) -> dict[str, Any]:
        """What bole_vllm.metrics documents."""
        spec = self.vllm_config.cache_config
        return {
            **self.stats_counters.read(),
            "bytes_per_node": self.factors.bytes_per_node,
            "spec_blocks_per_request": max(
                layer.get_kv_cache_spec(self.vllm_config).num_speculative_blocks for layer in self.factors.layers
            ),
            "tree_size": self.config.tree_size,
            "mamba_cache_mode": spec.mamba_cache_mode,
        }


class _Step:
    """What a step's commit needs to remember from its preparation."""

    def __init__(
        self, batch, forest: Forest, is_tree_np: np.ndarray, only_trees: bool, num_computed: torch.Tensor, block_tables, slot_mappings
    ) -> None:
        self.batch = batch
        self.forest = forest
        self.is_tree_np = is_tree_np
        self.only_trees = only_trees  # no request of the batch is in its prompt
        self.num_computed = num_computed  # [R] tokens before each request's rows
        self.block_tables = block_tables  # per cache group [R, columns]
        self.slot_mappings = slot_mappings  # [groups, token rows]
