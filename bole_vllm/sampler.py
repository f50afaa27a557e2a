"""Lossless acceptance: sample once per node from the target, then walk the tree along the samples."""

from __future__ import annotations

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from bole_vllm.kernels.path_logits import PathRows
from bole_vllm.kernels.walk import walk_tree
from bole_vllm.path_processors import follow_paths


def needs_chain(params, model_config) -> bool:
    """Whether a request's logits depend on the flat order of a step's rows, so that only the top-1 chain may be accepted.

    Custom logits processors take the rows before a row for its predecessors. On the chain, which occupies rows 1..d, they are.
    """
    return params is not None and bool(model_config.logits_processors)


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
        # which rows are nodes, for the processors that look at earlier tokens
        self.current = follow_paths(sampler)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None) -> SamplerOutput:
        """logits [num_logits, vocab]: one row per tree node, one per prefill row."""
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        max_num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        want_logprobs = max_num_logprobs != NO_LOGPROBS
        sampled, processed = self._sample_nodes(logits, input_batch, want_logprobs)
        tokens, num_sampled = self._walk(sampled, input_batch, invalid_drafts)
        logprobs = None
        if want_logprobs:
            scored = processed if processed is not None else logits
            logprobs = self._get_logprobs_tensors(
                tokens, num_sampled, scored[self._rows_along_path(input_batch, num_sampled)], input_batch.cu_num_logits,
                input_batch.cu_num_logits_np, max_num_logprobs,
            )  # fmt: skip
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping, self.sampler.req_states.prefill_len.gpu
        )
        return SamplerOutput(tokens, logprobs, num_nans, num_sampled, num_rejected)

    def _sample_nodes(self, logits, input_batch, want_logprobs: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One target sample per logits row, in chunks of whole requests; the processed logits where they are asked for."""
        cu, positions = input_batch.cu_num_logits_np, self.model_state.positions
        # Node positions are L + depth; a row's position is that of the token it reads.
        if int(cu[-1]) == input_batch.num_tokens:  # a logits row for every row, as where no request is in its prompt
            pos, input_ids = positions[: input_batch.num_tokens], input_batch.input_ids[: input_batch.num_tokens]
        else:
            pos, input_ids = positions[input_batch.logits_indices], input_batch.input_ids[input_batch.logits_indices]
        keep = want_logprobs and self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        sampled, processed = [], []
        for start, end in _iter_request_chunks(cu, get_max_chunk_logits(logits.shape[1])):
            lo, hi = int(cu[start]), int(cu[end])
            if self.sampler.needs_logits_processing[input_batch.idx_mapping_np[start:end]].any():  # what reads the rows is called then only
                self.current.rows = PathRows.of_round(
                    self.model_state.full_forest, input_batch.cu_num_logits, input_batch.idx_mapping, start, end, lo
                )
            tokens, scores = self.sampler.sample(
                logits[lo:hi], input_batch.expanded_idx_mapping[lo:hi], input_batch.idx_mapping[start:end],
                input_batch.idx_mapping_np[start:end], pos[lo:hi], input_ids[lo:hi], input_batch.expanded_local_pos[lo:hi],
                input_batch.seq_lens_cpu_upper_bound.numpy()[start:end], return_logprobs=want_logprobs,
            )  # fmt: skip
            sampled.append(tokens)
            processed += [scores] if keep else []
        self.current.rows = None
        return _joined(sampled), _joined(processed) if keep else None

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
        if not state.chain_only_np[input_batch.idx_mapping_np].any():
            return None if invalid_drafts is None else ~invalid_drafts
        chain_only = async_tensor_h2d(state.chain_only_np, device=local.device)
        rows = input_batch.logits_indices
        depth = state.positions[rows] - (input_batch.positions[rows] - local)
        on_chain = depth == local
        acceptable = on_chain | ~chain_only[input_batch.expanded_idx_mapping]
        return acceptable if invalid_drafts is None else acceptable & ~invalid_drafts

    def _rows_along_path(self, input_batch, num_sampled) -> torch.Tensor:
        """[num_logits] where row start + j is the logits row that token j of the request was sampled from."""
        state, num_reqs = self.model_state, input_batch.num_reqs
        start = input_batch.cu_num_logits[:num_reqs, None].long()
        path = state.path[:num_reqs].long()
        step = torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(input_batch.expanded_idx_mapping.shape[0] + 1, device=path.device)
        taken = step < state.path_len[:num_reqs, None]
        # entries beyond a path go to the spare last element
        where = torch.where(taken, start + step, rows.shape[0] - 1)
        rows[where] = torch.where(taken, start + path, rows.shape[0] - 1)
        return rows[:-1]


def _joined(chunks: list[torch.Tensor]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
