"""vLLM's logits processors that look at earlier tokens, for rows that are tree nodes.

vLLM takes the rows before a row for its predecessors, which holds on a chain. Here each processor keeps its state and its settings, and a
node's row sees the drafts on the node's own path: never a sibling's, never another branch's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from bole_vllm.kernels.path_logits import PathPenalties, PathRows, ban_words, force_end

# a row of vLLM's budget kernel that lies so far before its request's tokens has not used anything up
NOWHERE = -(2**30)


class CurrentRows:
    """The tree rows of the logits at hand, while a tree sampler works on them; None: rows as vLLM knows them."""

    rows: PathRows | None = None


class TreeProcessor(LogitsProcessor):
    """Around one of vLLM's, which keeps its state and its settings."""

    def __init__(self, inner: LogitsProcessor, current: CurrentRows) -> None:
        self.inner, self.current = inner, current

    def add_request(self, req_idx, sampling_params) -> bool:
        return self.inner.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()


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
    """Exchange the sampler's processors of that kind; returns what tells them which rows are nodes. Custom processors stay as they are."""
    current = CurrentRows()
    kinds = {PenaltiesState: TreePenalties, BadWordsState: TreeBadWords}
    processors = sampler.logits_processors
    processors[:] = [kinds[type(one)](one, current) if type(one) in kinds else one for one in processors]
    sampler.thinking_budget_state = TreeThinkingBudget(sampler.thinking_budget_state, current)
    return current
