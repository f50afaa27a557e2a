"""vLLM's scheduler with grammar masks for trees; everything else is its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from bole_vllm.draft_tokens import PAD, DraftedTree
from bole_vllm.tree_grammar import MaskedTree, fill_trees


class TreeGrammars:
    """Mixin before one of vLLM's schedulers.

    vLLM validates a request's drafts as one chain and cuts them where the grammar forbids one. Of a tree nothing is cut: every node gets
    the mask behind its own path, and the walk takes no token that its parent's mask forbids. Only while a reasoning parser decides where
    the grammar begins, a request's top-1 chain is all that may be accepted, by vLLM's own rule.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # request -> the tree that its latest drafts are
        self._trees: dict[str, DraftedTree] = {}
        self._tree_masks: torch.Tensor | None = None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        others, trees = self._taken_apart(draft_token_ids)
        super().update_draft_token_ids(others)
        for request_id, tree in trees.items():
            request = self.requests[request_id]
            request.spec_token_ids = [] if request.is_prefill_chunk else tree.tokens

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output) -> None:
        others, trees = self._taken_apart(draft_token_ids)
        super().update_draft_token_ids_in_output(others, scheduler_output)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, tree in trees.items():
            if placeholders := scheduled.get(request_id):
                tokens = tree.first(len(placeholders)).tokens
                scheduled[request_id] = tokens + [PAD] * (len(placeholders) - len(tokens))

    def _taken_apart(self, drafts: DraftTokenIds) -> tuple[DraftTokenIds, dict[str, DraftedTree]]:
        """(drafts of requests without a grammar, trees of the others, which are kept)."""
        others, trees = DraftTokenIds([], []), {}
        for request_id, codes in zip(drafts.req_ids, drafts.draft_token_ids):
            request, tree = self.requests.get(request_id), DraftedTree.unpack(codes)
            if request is None or request.is_finished():
                continue
            if request.use_structured_output:
                trees[request_id] = tree
            else:
                others.req_ids.append(request_id)
                others.draft_token_ids.append(tree.tokens)
        self._trees.update(trees)
        return others, trees

    def get_grammar_bitmask(self, scheduler_output) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        found, limits, trees, rows = [], [], [], 0
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and request.use_structured_output and not request.is_prefill_chunk:
                tokens = scheduled.get(request_id, [])
                found.append(request_id)
                tree = self._tree_of(request_id, tokens)
                if tree is not None and self._constrained_from_root(request):
                    trees.append(MaskedTree(request.structured_output_request.grammar, request_id, tree, rows))
                    limits.append(len(tokens))
                else:
                    chain = [] if tree is None else tree.spine()
                    limits.append(self._mask_chain(request, chain, self._masks()[rows : rows + len(tokens) + 1]))
                rows += len(tokens) + 1
        if not found:
            return None
        fill_trees(trees, self._masks())
        return GrammarOutput(found, self._masks()[:rows].numpy(), limits)

    def _masks(self) -> torch.Tensor:
        """[max_num_seqs * nodes, words] int32, made with the first grammar."""
        if self._tree_masks is None:
            rows = self.vllm_config.scheduler_config.max_num_seqs * (1 + self.vllm_config.num_speculative_tokens)
            self._tree_masks = self.structured_output_manager.backend.allocate_token_bitmask(rows)
        return self._tree_masks

    def _tree_of(self, request_id: str, tokens: list[int]) -> DraftedTree | None:
        """The tree that these drafts are; None where they are another one's, or none."""
        tree = self._trees.pop(request_id, None)
        tree = tree.first(len(tokens)) if tree is not None else None
        return tree if tree is not None and tree.tokens == tokens else None

    def _constrained_from_root(self, request) -> bool:
        """Whether the grammar holds already, as it does unless a reasoning parser waits for the reasoning's end."""
        return self.structured_output_manager._get_constraint_bounds(request, ()).constraint_start == 0

    def _mask_chain(self, request, chain: list[int], masks: torch.Tensor) -> int:
        """Fill the rows [1 + drafts, words] of the root and a chain, vLLM's own way; returns how many of its drafts may be accepted."""
        manager, drafts = self.structured_output_manager, len(masks) - 1
        valid = manager.validate_tokens(request, chain)
        padded = {request.request_id: valid + [PAD] * (drafts - len(valid))} if drafts else {}
        masks.numpy()[:] = manager.grammar_bitmask(self.requests, [request.request_id], padded)
        return len(valid)

    def _free_request(self, request, *args: Any, **kwargs: Any):
        self._trees.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


class TreeScheduler(TreeGrammars, Scheduler):
    """Without asynchronous scheduling."""


class TreeAsyncScheduler(TreeGrammars, AsyncScheduler):
    """With it."""


def make_scheduler(vllm_config, **kwargs: Any) -> Scheduler:
    """What `scheduler_cls` names: one of the two, as vLLM itself chooses, once all options are settled."""
    kind = TreeAsyncScheduler if vllm_config.scheduler_config.async_scheduling else TreeScheduler
    return kind(vllm_config=vllm_config, **kwargs)
