"""Drafts a tree per request with the model's MTP head, depth by depth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from bole_vllm.attention import TreeRows
from bole_vllm.config import BoleConfig
from bole_vllm.draft_head import DraftHead, build_draft_head
from bole_vllm.kernels.draft import (
    Candidates,
    RowInputs,
    RowOutputs,
    Tree,
    TreeShape,
    extend,
    place_rows,
    select,
    slots_by_depth,
    start_from,
    top_children,
)
from bole_vllm.kernels.walk import chain_order


@dataclass(frozen=True)
class RowPlaces:
    """Positions, slots and attention of a round's draft rows, `beam` a request and depth; see kernels.draft.place_rows."""

    beam: int
    starts: torch.Tensor  # [R] int32 a request's first row
    positions: torch.Tensor  # [depths, R * w] int64 RoPE positions
    slots: torch.Tensor | None  # [depths, groups, R * w] KV slots; None: a run without attention
    lengths: torch.Tensor  # [R] where the scratch KV begins
    num_rows: torch.Tensor  # [R] int32 w, or 0 where a row of the batch stands for no request
    room: torch.Tensor  # [R] int32 scratch positions that exist
    num_slots: int  # scratch positions of a request (E)

    def rows(self, frontier_mask: torch.Tensor) -> TreeRows:
        """What the rows of a depth attend to. frontier_mask [R, w, words]: their ancestors and themselves."""
        return TreeRows(
            token_start=self.starts,
            num_rows=self.num_rows,
            prefix_len=self.lengths,
            row_mask=frontier_mask.flatten(0, 1),
            mask_start=self.starts,
            num_slots=self.num_slots,
            max_rows=self.beam,
            covers_batch=True,
        )


class TreeSpeculator(MTPSpeculator):
    """vLLM's MTP speculator with a tree in place of the chain.

    The draft prefill is vLLM's: it runs the MTP layer over the rows that were accepted (moved to the front of each
    request first) and ends at the row of the pending token, whose output gives the root's children. Then one forward
    per depth runs `beam` frontier rows per request; row e of the tree's expanded rows keeps its KV at scratch position
    L + e, where L is the number of processed tokens, and attends to the prefix and its own ancestors.

    Both halves can be captured: what they read and leave behind lies at fixed addresses, and vLLM captures the draft prefill
    as for a chain and `_generate_fused_drafts`, here all depths and the selection, in place of a chain's steps.
    """

    def __init__(self, vllm_config, device) -> None:
        super().__init__(vllm_config, device)
        self.bole = BoleConfig.from_vllm(vllm_config)
        # set with the KV cache; None while vLLM profiles memory
        self.model_state = None
        # the LM head over a part of the vocabulary; None: the whole one
        self.draft_head: DraftHead | None = None
        rows = self.max_num_reqs
        # the root's children, left by the draft prefill: token ids and log-probabilities, best first
        self.root_token = torch.zeros(rows, self.bole.topk, dtype=torch.int64, device=device)
        self.root_logprob = torch.zeros(rows, self.bole.topk, dtype=torch.float32, device=device)
        # tokens processed once this round is committed (where the scratch KV begins), and tokens sampled in it
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.num_sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        # (requests, rows of each) -> attention metadata of the frontier rows, but for the tree
        self._row_metadata: dict[tuple[int, int], dict[str, Any]] = {}
        # (requests, rows of each, rows of each in all depths) -> where they start
        self._starts: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def load_model(self, target_model) -> None:
        super().load_model(target_model)
        self.draft_head = build_draft_head(self.model, self.bole)

    def set_attn(self, model_state, *args, **kwargs) -> None:
        super().set_attn(model_state, *args, **kwargs)
        self._row_metadata.clear()
        if self.draft_head is not None:
            model_state.count_prompt, model_state.token_counts = self.draft_head.count_prompt, self.draft_head.counts

    def _configure_decode_metadata_update(self) -> None:
        # of vLLM's two ways to capture drafting, the one that takes all steps at once: `_generate_fused_drafts`
        self.supports_decode_metadata_update = True

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """[rows, V] logits, or [rows, N] over the part of the vocabulary that drafts may name."""
        if self.draft_head is None:
            return super().compute_draft_logits(hidden_states, spec_step_idx)
        return self.draft_head.logits(hidden_states)

    @property
    def _draft_ids(self) -> torch.Tensor | None:
        """Column of the draft logits -> token id; None: they are the same."""
        return None if self.draft_head is None else self.draft_head.token_ids

    def sample_draft(self, hidden_states, *args, **kwargs) -> torch.Tensor:
        """Called by vLLM's draft prefill; keeps the root's children, which the tree's first level is made of."""
        num_reqs = hidden_states.shape[0]
        out = self.root_token[:num_reqs], self.root_logprob[:num_reqs]
        token, _ = top_children(self.compute_draft_logits(hidden_states, 0), self.bole.topk, self._draft_ids, out)
        return token[:, 0]

    @torch.inference_mode()
    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled,
        next_prefill_tokens, temperature, seeds, dp_sync_state=None, dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None,
        is_profile=False, num_speculative_tokens=None,
    ) -> torch.Tensor:  # fmt: skip
        """Draft tokens [num_reqs, num_speculative_tokens of the config] int64, node order; the trees go to the store.

        Arguments as BaseSpeculator.propose. `num_speculative_tokens` limits the nodes drafted in this step.
        """
        num_reqs = input_batch.num_reqs
        wanted = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if dummy_run:
            self._note_lengths(input_batch, num_sampled, num_rejected)
        else:
            input_batch, last_hidden_states = self._accepted_rows_first(input_batch, last_hidden_states, num_sampled, num_rejected)
        super().propose(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
            last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs,
            is_profile, num_speculative_tokens=min(wanted, 1),
        )  # fmt: skip
        if wanted == 0:
            if self.model_state is not None:
                self.model_state.trees.num_nodes[self.idx_mapping[:num_reqs]] = 1
            return self.draft_tokens[:num_reqs].fill_(-1)
        skip_attn = dummy_run and skip_attn_for_dummy_run
        if not skip_attn:
            self._map_block_tables()
        graph = self._graph_of(num_reqs, wanted, dummy_run or is_profile)
        if graph is not None:
            self.decode_cudagraph_manager.run_fullgraph(graph)
        else:
            self._store(self._grow(self._shape(wanted), num_reqs, skip_attn), num_reqs)
        if self.draft_head is not None and not dummy_run:
            self.draft_head.end_round()
        return self.draft_tokens[:num_reqs]

    def _graph_of(self, num_reqs: int, wanted: int, eager: bool) -> BatchExecutionDescriptor | None:
        """The captured graph that drafts trees of `wanted` nodes for this many requests, if there is one."""
        manager = self.decode_cudagraph_manager
        if eager or manager is None or self.dp_size > 1:
            return None
        dynamic = self.speculative_config.uses_dynamic_speculative_decoding()
        descriptor = manager.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        descriptor = manager.specialize_spec_tokens(descriptor, wanted) if dynamic else descriptor
        return descriptor if descriptor in manager.graphs and (dynamic or wanted == self.num_speculative_steps) else None

    # -- draft prefill -------------------------------------------------------------------------------------------

    def _note_lengths(self, input_batch, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Where trees begin, of a batch without paths. Rows of a graph that stand for no request have idx_mapping -1 and length 0."""
        num_reqs = input_batch.num_reqs
        self.lengths[num_reqs:].zero_()
        torch.sub(input_batch.seq_lens[:num_reqs], num_rejected, out=self.lengths[:num_reqs])
        self.num_sampled[:num_reqs].copy_(num_sampled)

    def _accepted_rows_first(self, input_batch, hidden_states, num_sampled, num_rejected) -> tuple[Any, torch.Tensor]:
        """The batch as a chain drafter expects it: accepted rows in path order at the front of each request. Notes the lengths, too.

        Positions, slots and lengths are linear already. Rejected rows follow in any order; they are cut off by
        num_rejected. Accepted on the spine, nothing moves.
        """
        state, num_reqs = self.model_state, input_batch.num_reqs
        rows = chain_order(
            input_batch.query_start_loc[: num_reqs + 1], state.path[:num_reqs], state.path_len[:num_reqs], hidden_states.shape[0],
            input_batch.seq_lens[:num_reqs], num_rejected, num_sampled, self.lengths, self.num_sampled,
        )  # fmt: skip
        ids = input_batch.input_ids
        return replace(input_batch, input_ids=ids[rows[: ids.shape[0]]]), hidden_states[rows]

    def _prefill(self, num_reqs, num_tokens, attn_metadata, *args, **kwargs) -> None:
        super()._prefill(num_reqs, num_tokens, self._causal(attn_metadata), *args, **kwargs)

    def _causal(self, attn_metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        """The target's metadata for the draft layers: the accepted rows are a chain now."""
        if attn_metadata is None:
            return None
        return {name: attn_metadata[name].with_tree(None) for name in self.draft_attn_layer_names if name in attn_metadata}

    # -- tree ----------------------------------------------------------------------------------------------------

    def _shape(self, num_drafts: int) -> TreeShape:
        return TreeShape.plan(num_drafts + 1, self.bole.topk, self.bole.depth_of(num_drafts + 1))

    def _generate_fused_drafts(
        self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode, num_speculative_steps
    ) -> None:
        """What vLLM captures per number of requests (rows without one included) and of drafts: every depth and the selection."""
        self._store(self._grow(self._shape(num_speculative_steps), num_reqs, skip_attn=False), num_reqs)

    def _grow(self, shape: TreeShape, num_reqs: int, skip_attn: bool) -> Tree:
        """Run the depths from what the draft prefill left. Device work only, but for the metadata's first use."""
        root = self.root_token[:num_reqs], self.root_logprob[:num_reqs]
        if shape.max_depth == 1:
            return select(start_from(*root, shape), shape)
        places, num_rows = self._place_rows(shape, num_reqs, skip_attn), num_reqs * shape.beam
        # the frontier's tokens, positions and its parents' outputs are the next depth's input
        inputs = RowInputs(self.hidden_states[:num_rows], self.input_buffers.positions[:num_rows])
        candidates = start_from(*root, shape, places.room, self.input_buffers.input_ids[:num_rows])
        # the root's output feeds every first-level row
        inputs.hidden.copy_(self.hidden_states[:num_reqs].repeat_interleave(shape.beam, dim=0))
        inputs.positions.copy_(places.positions[0])
        for depth in range(2, shape.max_depth + 1):
            logits, outputs = self._expand(candidates, places, depth)
            moved = (RowOutputs(outputs, places.positions[depth - 1]), inputs) if depth < shape.max_depth else (None, None)
            candidates, _ = extend(candidates, logits, depth, shape, self._draft_ids, *moved)
        return select(candidates, shape)

    def _place_rows(self, shape: TreeShape, num_reqs: int, skip_attn: bool) -> RowPlaces:
        """Where the rows of all depths lie; depends on the lengths alone."""
        requests, lengths = self.idx_mapping[:num_reqs], self.lengths[:num_reqs]
        positions, cache_pos, num_rows, room = place_rows(lengths, requests, shape, self.max_model_len)
        starts, first = self._row_starts(num_reqs, shape)
        slots = None
        if not skip_attn:
            slots = self.block_tables.compute_slot_mappings(requests, first, cache_pos.flatten(), cache_pos.numel())
            slots = slots_by_depth(slots, room, shape)
        return RowPlaces(shape.beam, starts, positions, slots, lengths, num_rows, room, shape.num_expanded)

    def _row_starts(self, num_reqs: int, shape: TreeShape) -> tuple[torch.Tensor, torch.Tensor]:
        """First row of every request in a depth [R] and in the whole tree [R + 1], int32. Made once, by the warm-up before a capture."""
        key = (num_reqs, shape.beam, shape.num_expanded)
        if key not in self._starts:
            every = torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device)
            self._starts[key] = every[:num_reqs] * shape.beam, every * shape.num_expanded
        return self._starts[key]

    def _expand(self, candidates: Candidates, places: RowPlaces, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft forward over the frontier of depth - 1, whose inputs (tokens, positions, parents' outputs) are in their buffers:
        ([R, w, vocab] logits, [R * w, hidden] outputs)."""
        num_reqs, beam = candidates.frontier.shape
        num_rows = num_reqs * beam
        metadata = slots_by_layer = None
        if places.slots is not None:
            rows = places.rows(candidates.frontier_mask)
            metadata = {name: layer.with_tree(rows) for name, layer in self._metadata_of_rows(num_reqs, beam).items()}
            slots_by_layer = build_slot_mappings_by_layer(places.slots[depth - 2], self.kv_cache_config)
        last_hidden, outputs = self._run_model(num_rows, metadata, slots_by_layer, num_tokens_across_dp=None)
        logits = self.compute_draft_logits(last_hidden[:num_rows], 0)
        return logits.view(num_reqs, beam, -1), outputs[:num_rows]

    def _map_block_tables(self) -> None:
        """The step's block tables in the attention kernel's block size, where it is another, in place: what the rows' metadata names."""
        for group in (group for groups in self.attn_groups for group in groups):
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])

    def _metadata_of_rows(self, num_reqs: int, beam: int) -> dict[str, Any]:
        """vLLM's metadata of `beam` rows per request. It names buffers at fixed addresses and sizes, so it is made once (before a graph
        is captured: by the warm-up) and its lengths, which only causal rows would read, mean nothing."""
        key = (num_reqs, beam)
        if key not in self._row_metadata:
            self._row_metadata[key] = self._build_uniform_attn_metadata(
                batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=num_reqs * beam, num_reqs=num_reqs),
                num_reqs=num_reqs,
                num_query_per_req=beam,
                seq_lens_cpu_upper_bound=torch.zeros(num_reqs, dtype=torch.int32),
                step=0,
            )
        return self._row_metadata[key]

    def _store(self, tree: Tree, num_reqs: int) -> None:
        """Keep the trees for the next step, and the tokens as the scheduler counts them. Rows without a request go to the store's spare."""
        # A request still in its prompt drafted from a row that means nothing.
        num_nodes = torch.where(self.num_sampled[:num_reqs] > 0, tree.num_nodes, 1)
        if self.model_state is not None:
            slots = self.idx_mapping[:num_reqs]
            self.model_state.trees.write(slots, tree.token, tree.parent, tree.logprob, num_nodes.to(torch.int32))
        drafts = self.draft_tokens[:num_reqs]
        drafts.fill_(-1)
        drafts[:, : tree.token.shape[1] - 1] = tree.token[:, 1:]
