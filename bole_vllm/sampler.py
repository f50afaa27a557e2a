"""Lossless acceptance: sample once per node from the target, then walk the tree along the samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from bole_vllm.candidate_sampler import most_candidates, sample_candidates
from bole_vllm.kernels.path_logits import PathRows
from bole_vllm.kernels.walk import walk_tree
from bole_vllm.path_processors import follow_paths
from bole_vllm.path_reports import PathReports, rows_of_paths


@dataclass(frozen=True)
class Chunk:
    """Some requests of a round that follow each other, with their logits."""

    requests: slice
    logits_rows: slice
    # [rows, V]
    logits: torch.Tensor
    rows: PathRows
    # what vLLM's sampler is told: the rows' slots, the requests' slots on device and host, then of the rows positions, input tokens and
    # places in the request, and bounds of the requests' lengths
    of_sampler: tuple

    @property
    def slots_np(self) -> np.ndarray:
        return self.of_sampler[2]


class TreeSampler(RejectionSampler):
    """Called by the runner in place of rejection sampling in steps that hold drafts.

    Every node's logits are sampled with vLLM's own sampler at the node's position, with the random numbers that plain
    decoding uses there (they are keyed by seed and position). The walk starts at the root and follows the child that
    holds the sampled token; where there is none, the sample is the bonus token. The emitted tokens are samples of the
    target and nothing else, so the output distribution is the target's for any tree.
    """

    def __init__(self, sampler, spec_config, device, model_state) -> None:
        super().__init__(sampler, spec_config, device)
        self.model_state = model_state
        # which rows are nodes, for the logits processors, and what these do with a request
        self.current = follow_paths(sampler)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None) -> SamplerOutput:
        """logits [num_logits, vocab]: one row per tree node, one per prefill row."""
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        reports = PathReports(self.sampler, input_batch.idx_mapping_np)
        chunks = self._chunks(logits, input_batch)
        sampled, processed = self._sample_nodes(chunks, reports)
        tokens, num_sampled = self._walk(sampled, input_batch, invalid_drafts)
        logprobs, masks = self._report(chunks, reports, sampled, processed, num_sampled) if reports.wanted else (None, None)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping, self.sampler.req_states.prefill_len.gpu
        )
        return SamplerOutput(tokens, logprobs, num_nans, num_sampled, num_rejected, masks)

    def _chunks(self, logits, input_batch) -> list[Chunk]:
        """The round's requests in parts whose fp32 logits keep vLLM's limit."""
        cu, positions = input_batch.cu_num_logits_np, self.model_state.positions
        # Node positions are L + depth; a row's position is that of the token it reads.
        if int(cu[-1]) == input_batch.num_tokens:  # a logits row for every row, as where no request is in its prompt
            pos, input_ids = positions[: input_batch.num_tokens], input_batch.input_ids[: input_batch.num_tokens]
        else:
            pos, input_ids = positions[input_batch.logits_indices], input_batch.input_ids[input_batch.logits_indices]
        forest, bounds, found = self.model_state.full_forest, input_batch.seq_lens_cpu_upper_bound.numpy(), []
        for start, end in _iter_request_chunks(cu, get_max_chunk_logits(logits.shape[1])):
            lo, hi = int(cu[start]), int(cu[end])
            rows = PathRows.of_round(forest, input_batch.cu_num_logits, input_batch.idx_mapping, start, end, lo)
            of_sampler = (
                input_batch.expanded_idx_mapping[lo:hi], input_batch.idx_mapping[start:end], input_batch.idx_mapping_np[start:end],
                pos[lo:hi], input_ids[lo:hi], input_batch.expanded_local_pos[lo:hi], bounds[start:end],
            )  # fmt: skip
            found.append(Chunk(slice(start, end), slice(lo, hi), logits[lo:hi], rows, of_sampler))
        return found

    def _sample_nodes(self, chunks: list[Chunk], reports: PathReports) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One target sample per logits row; the processed logits where reports need them and there is one chunk."""
        sampled, processed = [], None
        for chunk in chunks:
            tokens = None if reports.need_processed else self._sample_fast(chunk)
            if tokens is None:
                with self.current.at(chunk.rows):
                    tokens, scores = self.sampler.sample(chunk.logits, *chunk.of_sampler, return_logprobs=reports.dims is not None)
                processed = scores if reports.need_processed and len(chunks) == 1 else None
            sampled.append(tokens)
        return sampled[0] if len(sampled) == 1 else torch.cat(sampled), processed

    def _sample_fast(self, chunk: Chunk) -> torch.Tensor | None:
        """The same samples where the settings of all requests allow another way; None where they do not."""
        slots, states = chunk.slots_np, self.sampler.sampling_states
        slot_of_row, _, _, position, *_ = chunk.of_sampler
        untouched = not self.current.processed_np[slots].any()
        if untouched and self._only_tempered(slots):
            # vLLM's sampling kernel divides by the temperature as its own kernel for that does: no fp32 copy of the logits is made
            return gumbel_sample(
                chunk.logits, slot_of_row, states.temperature.gpu, states.seeds.gpu, position, apply_temperature=True, is_drafting=False,
                use_fp64=self.sampler.use_fp64_gumbel,
            )  # fmt: skip
        if (most := most_candidates(states, slots)) is None:
            return None
        logits = chunk.logits
        if not untouched:
            with self.current.at(chunk.rows):
                logits = self.sampler.apply_sampling_params(logits, *chunk.of_sampler, skip_top_k_top_p=True)
        return sample_candidates(logits, slot_of_row, position, states, most, not untouched, self.sampler.use_fp64_gumbel)

    def _report(
        self, chunks: list[Chunk], reports: PathReports, sampled: torch.Tensor, processed: torch.Tensor | None, num_sampled: torch.Tensor
    ) -> tuple[LogprobsTensors | None, SamplingMaskTensors | None]:
        """Chunk by chunk: processed logits of several chunks are made once more rather than kept."""
        logprobs, masks, state = [], [], self.model_state
        for chunk in chunks:
            if processed is None and reports.need_processed:
                with self.current.at(chunk.rows):
                    scores = self.sampler.apply_sampling_params(chunk.logits, *chunk.of_sampler)
            else:
                scores = processed
            path, path_len = state.path[chunk.requests], state.path_len[chunk.requests]
            rows = rows_of_paths(path, path_len, chunk.rows.row_start[:-1] - chunk.rows.first_row)
            scored = scores if reports.processed else chunk.logits
            logprobs.append(reports.logprobs(scored, sampled[chunk.logits_rows], rows, chunk.rows.slot))
            masks.append(reports.sampling_mask(scores, rows, num_sampled[chunk.requests]))
        return reports.joined_logprobs(logprobs, num_sampled.shape[0], state.path.shape[1]), reports.joined_masks(masks)

    def _only_tempered(self, slots: np.ndarray) -> bool:
        """Whether no request in these slots has any of min_p, top_k and top_p."""
        states = self.sampler.sampling_states
        cut = (states.min_p.np[slots] != 0.0) | (states.top_k.np[slots] != states.vocab_size) | (states.top_p.np[slots] != 1.0)
        return not cut.any()

    def _walk(self, sampled, input_batch, invalid_drafts) -> tuple[torch.Tensor, torch.Tensor]:
        """([R, T] tokens emitted per request, [R] how many); leaves the paths in the model state."""
        state, num_reqs = self.model_state, input_batch.num_reqs
        forest = state.full_forest.for_requests(num_reqs)
        # new ones, since they are copied to the host while the next round runs; columns beyond the deepest path are nobody's
        tokens = torch.empty(num_reqs, forest.max_nodes, dtype=torch.int64, device=sampled.device)
        num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=sampled.device)
        acceptable = self._acceptable(input_batch, invalid_drafts)
        walk_tree(
            sampled, input_batch.cu_num_logits, forest, acceptable, tokens, num_sampled, state.path[:num_reqs], state.path_len[:num_reqs]
        )
        return tokens, num_sampled

    def _acceptable(self, input_batch, invalid_drafts) -> torch.Tensor | None:
        """[num_logits] rows that may be accepted: all (None), or the chain alone for requests that need it."""
        state, local = self.model_state, input_batch.expanded_local_pos
        if not self.current.chain_only_np[input_batch.idx_mapping_np].any():
            return None if invalid_drafts is None else ~invalid_drafts
        chain_only = async_tensor_h2d(self.current.chain_only_np, device=local.device)
        rows = input_batch.logits_indices
        depth = state.positions[rows] - (input_batch.positions[rows] - local)
        on_chain = depth == local
        acceptable = on_chain | ~chain_only[input_batch.expanded_idx_mapping]
        return acceptable if invalid_drafts is None else acceptable & ~invalid_drafts
