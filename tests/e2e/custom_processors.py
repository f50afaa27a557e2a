"""Logits processors a user might write, for the tests of trees."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

STRENGTH = 15.0


class Custom(LogitsProcessor):
    """Of requests whose extra_args["custom"] is the class's name."""

    def __init__(self, vllm_config, req_states) -> None:
        self.requests = req_states
        self.active = torch.zeros(req_states.max_num_reqs, dtype=torch.bool, device=req_states.device)

    def add_request(self, req_idx, sampling_params) -> bool:
        wanted = (sampling_params.extra_args or {}).get("custom") == type(self).__name__
        self.active[req_idx] = wanted
        return wanted

    def raise_one(self, logits: torch.Tensor, ctx, token: torch.Tensor) -> torch.Tensor:
        """In place: one token of every row of the requests that asked."""
        amount = STRENGTH * self.active[ctx.expanded_idx_mapping].to(logits.dtype)
        return logits.scatter_add_(1, token.long()[:, None] % logits.shape[1], amount[:, None])


class AfterTwo(Custom):
    """Raises the token that follows from the last two tokens: of a draft's row they lie in the rows before it, as vLLM says."""

    def apply(self, logits, ctx):
        slot, local = ctx.expanded_idx_mapping, ctx.expanded_local_pos.long()
        rows = torch.arange(len(slot), device=slot.device)
        # a request's first row reads its last committed token
        committed = self.requests.all_token_ids.gpu[slot, self.requests.total_len.gpu[slot].long() - 2]
        before = torch.where(local > 0, ctx.input_ids[(rows - 1).clamp(min=0)].long(), committed.long())
        return self.raise_one(logits, ctx, 7 * ctx.input_ids + 3 * before)


class AfterOne(Custom):
    """Raises the token that follows from a row's own token and from how many tokens the request has then."""

    independent_rows = True

    def apply(self, logits, ctx):
        so_far = self.requests.total_len.gpu[ctx.expanded_idx_mapping] + ctx.expanded_local_pos
        return self.raise_one(logits, ctx, 7 * ctx.input_ids + 11 * so_far)
