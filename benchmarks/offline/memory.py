"""What an engine's memory holds: KV cache, capacity, and what of it the MTP head took."""

from __future__ import annotations

from typing import Any

import torch

Row = dict[str, Any]


def bytes_of(worker: Any) -> dict[str, int]:
    """RPC: bytes of the KV cache (states included), of the MTP head's own weights, and state blocks set aside per request for drafts."""
    runner = getattr(worker, "worker", worker).model_runner
    groups = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    return {
        "kv_bytes": _kv_bytes(runner),
        "mtp_bytes": _mtp_bytes(runner),
        "spec_blocks": max((getattr(spec, "num_speculative_blocks", 0) for spec in groups), default=0),
    }


def _kv_bytes(runner: Any) -> int:
    """Of all allocations behind the layers' caches, each once: layers share them."""
    sizes: dict[int, int] = {}
    waiting = [getattr(layer, "kv_cache", None) for layer in runner.vllm_config.compilation_config.static_forward_context.values()]
    while waiting:
        cache = waiting.pop()
        if isinstance(cache, list | tuple):  # convolution and recurrent states
            waiting += cache
        elif isinstance(cache, torch.Tensor):
            storage = cache.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _mtp_bytes(runner: Any) -> int:
    """Of the draft model's parameters that are not the target's."""
    draft = getattr(runner.speculator, "model", None)
    if draft is None:
        return 0
    shared = {parameter.data_ptr() for parameter in runner.model.parameters()}
    return sum(p.numel() * p.element_size() for p in draft.parameters() if p.data_ptr() not in shared)


def capacity(llm: Any) -> Row:
    """What the engine reports: KV tokens, requests of full length at a time, most requests."""
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    return {
        "num_gpu_blocks": cache.num_gpu_blocks,
        "kv_tokens": cache.kv_cache_size_tokens,
        "max_concurrency": cache.kv_cache_max_concurrency,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


def compare(rows: list[Row]) -> list[Row]:
    """One shape's rows, with `x_plain` and `x_plain_mtp`: KV tokens over plain decoding's, and over those of a plain engine that holds the
    MTP head as well.

    No such engine exists in stock vLLM (a chain of one draft sets aside a state for it), so it is computed: plain decoding's KV bytes less
    the head's weights, filled as densely as a tree's engine fills its own, which has the head's attention layer and no state per draft.
    """
    plain = next((row for row in rows if row["arm"] == "plain"), None)
    tree = next((row for row in rows if row["mtp_bytes"] and not row["spec_blocks"]), None)
    found = []
    for row in rows:
        ratios: Row = {"x_plain": None, "x_plain_mtp": None}
        if plain is not None and row["kv_tokens"] and plain["kv_tokens"]:
            ratios["x_plain"] = round(row["kv_tokens"] / plain["kv_tokens"], 4)
            if tree is not None:
                reference = (plain["kv_bytes"] - tree["mtp_bytes"]) * tree["kv_tokens"] / tree["kv_bytes"]
                ratios["x_plain_mtp"] = round(row["kv_tokens"] / reference, 4)
        found.append(row | ratios)
    return found
