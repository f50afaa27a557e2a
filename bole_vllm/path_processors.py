"""vLLM's logits processors for rows that are tree nodes.

vLLM takes the rows before a row for its predecessors, which holds on a chain. Here each processor keeps its state and its settings, and a
node's row sees the drafts on the node's own path: never a sibling's, never another branch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from bole_vllm.kernels.path_logits import PathPenalties, PathRows, ban_words, force_end

# a row of vLLM's budget kernel that lies so far before its request's tokens has not used anything up
NOWHERE = -(2**30)


class CurrentRows:
    """What a tree sampler and its processors tell each other: the tree rows of the logits at hand, and notes on requests by their slot."""

    def __init__(self, max_num_reqs: int) -> None:
        # while a tree sampler works on them; None: rows as vLLM knows them
        self.rows: PathRows | None = None
        # a processor changes the request's logits; only the top-1 chain may be accepted, see CustomProcessor. On the host
        self.processed_np = np.zeros(max_num_reqs + 1, dtype=bool)
        self.chain_only_np = np.zeros(max_num_reqs + 1, dtype=bool)

    @contextmanager
    def at(self, rows: PathRows) -> Iterator[None]:
        """While the logits at hand are these rows'."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def begin(self, req_idx: int) -> None:
        """Forget the slot's earlier request."""
        self.processed_np[req_idx] = self.chain_only_np[req_idx] = False


class TreeProcessor(LogitsProcessor):
    """Around one of vLLM's, which keeps its state and its settings. This one's rows depend on nothing but themselves."""

    def __init__(self, inner: LogitsProcessor, current: CurrentRows) -> None:
        self.inner, self.current = inner, current

    def add_request(self, req_idx, sampling_params) -> bool:
        changes = self.inner.add_request(req_idx, sampling_params)
        self.current.processed_np[req_idx] |= changes
        return changes

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return self.inner.apply(logits, ctx)


class CustomProcessor(TreeProcessor):
    """A user's own. It may take the rows before a row for its predecessors, as vLLM lets it. On the top-1 chain, which occupies a request's
    rows 1, 2, ..., they are: then nothing else is accepted. A class with `independent_rows = True` promises that what it does to a row
    follows from the row's request, its position, its input token and the committed tokens; it works on whole trees, and finds the number of
    drafts before a row in `expanded_local_pos`.
    """

    def __init__(self, inner: LogitsProcessor, current: CurrentRows, total_len: torch.Tensor) -> None:
        """total_len [max_num_reqs] integers: committed tokens of each slot, on the device."""
        super().__init__(inner, current)
        self.total_len = total_len
        self.independent = bool(getattr(inner, "independent_rows", False))

    def add_request(self, req_idx, sampling_params) -> bool:
        changes = super().add_request(req_idx, sampling_params)
        self.current.chain_only_np[req_idx] |= changes and not self.independent
        return changes

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        if self.current.rows is not None and self.independent:
            depth = ctx.pos + 1 - self.total_len[ctx.expanded_idx_mapping]
            ctx = replace(ctx, expanded_local_pos=depth.to(ctx.expanded_local_pos.dtype))
        return self.inner.apply(logits, ctx)


class TreePenalties(TreeProcessor):
    """Repetition, frequency and presence penalties."""

    inner: PenaltiesState

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows, inner = self.current.rows, self.inner
        if rows is None or not inner.use_penalty[ctx.idx_mapping_np].any():
            return inner.apply(logits, ctx)
        settings = inner.repetition_penalty.gpu, inner.frequency_penalty.gpu, inner.presence_penalty.gpu
        of_drafts = PathPenalties(logits, rows, *settings, inner.output_bin_counts)
        # every row as one that follows the committed tokens
        logits = inner.apply(logits, replace(ctx, expanded_local_pos=torch.zeros_like(ctx.expanded_local_pos)))
        of_drafts.put(logits)
        return logits


class TreeBadWords(TreeProcessor):
    """Words that must not be completed."""

    inner: BadWordsState

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows, inner, requests = self.current.rows, self.inner, self.inner.req_states
        if rows is None:
            return inner.apply(logits, ctx)
        if most := int(inner.num_bad_words.np[ctx.idx_mapping_np].max()):
            ban_words(
                logits, rows, inner.bad_word_token_ids.gpu, inner.bad_word_offsets.gpu, inner.num_bad_words.gpu, most,
                requests.all_token_ids.gpu, requests.prompt_len.gpu, requests.total_len.gpu,
            )  # fmt: skip
        return logits


class TreeThinkingBudget:
    """Budgets of reasoning tokens; in place of the sampler's state, whose other attributes it shows."""

    def __init__(self, inner: ThinkingBudgetState, current: CurrentRows) -> None:
        self.inner, self.current = inner, current

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def add_request(self, req_idx, sampling_params) -> bool:
        """vLLM asks this one before the processors."""
        self.current.begin(req_idx)
        changes = self.inner.add_request(req_idx, sampling_params)
        self.current.processed_np[req_idx] |= changes
        return changes

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        rows, inner = self.current.rows, self.inner
        if rows is None or not inner.enabled or not inner.use_thinking_budget[ctx.idx_mapping_np].any():
            inner.apply(logits, ctx)
            return
        # Roots and rows without a tree as they are; it also finds the markers among the committed tokens.
        local = ctx.expanded_local_pos
        inner.apply(logits, replace(ctx, expanded_local_pos=torch.where(local > 0, NOWHERE, local)))
        requests = inner.req_states
        force_end(
            logits, rows, inner.thinking_token_budget.gpu, requests.all_token_ids.gpu, requests.total_len.gpu, inner.cached_last_start,
            inner.cached_last_end, inner.reasoning_start_token_ids, inner.natural_reasoning_end_token_ids, inner.reasoning_end_token_ids,
        )  # fmt: skip


def follow_paths(sampler: Sampler) -> CurrentRows:
    """Put one of these around each of the sampler's processors; returns what they and a tree sampler share."""
    current = CurrentRows(len(sampler.needs_logits_processing))
    kinds = {LogitBiasState: TreeProcessor, PenaltiesState: TreePenalties, BadWordsState: TreeBadWords}
    sampler.logits_processors[:] = [
        kinds[type(one)](one, current) if type(one) in kinds else CustomProcessor(one, current, sampler.req_states.total_len.gpu)
        for one in sampler.logits_processors
    ]
    sampler.thinking_budget_state = TreeThinkingBudget(sampler.thinking_budget_state, current)
    return current
