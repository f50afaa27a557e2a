"""Prefix caching (vLLM's `align` mode), preemption and async scheduling with trees."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from e2e_helpers import generate, params, stats, text_tokens

BLOCK = 288  # what vLLM makes of block_size=32 for the demo model: the attention page must hold a state page
CACHE = {"max_model_len": 3 * BLOCK, "max_num_seqs": 2, "block_size": 32, "max_num_batched_tokens": 1024}


def run(llm, prompt: list[int], sampling) -> tuple[list[int], int]:
    """(tokens, prompt tokens taken from the cache)."""
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@contextmanager
def async_scheduling():
    """Engines built inside schedule a step before the last one's tokens are known, as on a GPU; vLLM turns it off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def keep_async(cls, vllm_config):
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_async)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


@pytest.fixture(scope="module")
def llm(engines):
    with async_scheduling():
        llm = engines.tree(prefix_cache_retention_interval=None, **CACHE)
    assert type(llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "TreeAsyncScheduler"
    assert llm.llm_engine.vllm_config.cache_config.block_size == BLOCK
    assert stats(llm)["mamba_cache_mode"] == "align"
    return llm


def test_a_b_a(llm):
    """A, B, then A again from the cache: the same tokens, hits above zero."""
    a, b = text_tokens(0, 2 * BLOCK + 20), text_tokens(5, 2 * BLOCK + 20)
    first, _ = run(llm, a, params(10))
    run(llm, b, params(10))
    again, hits = run(llm, a, params(10))
    assert hits > 0
    assert again == first


def test_state_written_by_a_commit_is_reused(llm, engines):
    """A prefix hit on a block that was crossed during decoding resumes from the state that the commit wrote there.

    The blocks' KV went through rounds with rejected nodes, too. Compared with an engine that computes everything.
    """
    prompt = text_tokens(9, BLOCK - 40)
    written, _ = run(llm, prompt, params(BLOCK + 60))
    longer = prompt + written
    assert len(longer) > 2 * BLOCK
    resumed, hits = run(llm, longer, params(10))
    assert hits == BLOCK
    fresh, none = run(engines.tree(enable_prefix_caching=False, **CACHE), longer, params(10))
    assert none == 0
    assert resumed == fresh


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_and_resume(engines, caching):
    """Too few blocks for both requests: one is preempted in the middle of its trees and resumed."""
    prompts = [text_tokens(i, BLOCK - 30 + 4 * i) for i in range(2)]
    kwargs = dict(CACHE, enable_prefix_caching=caching)
    reference = engines.tree(**CACHE, enable_prefix_caching=False)
    expected = [run(reference, p, params(40))[0] for p in prompts]
    llm = engines.tree(fresh=True, num_gpu_blocks_override=9 if caching else 8, **kwargs)
    assert generate(llm, prompts, params(40)) == expected
    preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preemptions > 0


def test_async_scheduling(engines):
    """Drafts never visit the host; rows join and leave (5 requests, 3 at a time)."""
    with async_scheduling():
        llm = engines.tree(fresh=True, max_num_seqs=3)
    assert type(llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "TreeAsyncScheduler"
    prompts = [text_tokens(i, 15 + 9 * i) for i in range(5)]
    sampling = [params(8 + i, temperature=0.8 * (i % 2), seed=i) for i in range(5)]
    assert generate(llm, prompts, sampling) == generate(engines.tree(), prompts, sampling)
