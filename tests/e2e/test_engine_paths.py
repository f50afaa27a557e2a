"""Trees as vLLM runs by default: chunked prefill, prefix caching, async scheduling, preemption, aborts, limits."""

from __future__ import annotations

import json

import pytest
from e2e_helpers import PROMPTS, Script, generate, params, runner, settled, stats, text_tokens

CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]


def always_right(_round):
    return CHAIN, 7


@pytest.fixture(scope="module")
def greedy(engines, prompts) -> list[list[int]]:
    return settled(engines.one_node(), prompts, 32)


def test_chunked_prefill_among_tree_rows(engines):
    """A long prompt comes in chunks of what the decode rows leave of the step's budget; T = 8, two requests, 24 tokens a step."""
    prompts = [text_tokens(*PROMPTS[0]), text_tokens(1, 90)]
    sampling = [params(24), params(8)]
    llm = engines.tree(max_num_seqs=2, max_num_batched_tokens=24)
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 24
    assert generate(llm, prompts, sampling) == generate(engines.one_node(), prompts, sampling)


def test_any_order_of_mixed_rows(engines, prompts, greedy):
    """Requests arrive one step apart in two orders: every mix of prefill, fresh and drafted rows in both orders."""
    llm = engines.tree()
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        engine = llm.llm_engine
        done: dict[str, list[int]] = {}
        pending = list(order)
        while pending or engine.has_unfinished_requests():
            if pending:
                i = pending.pop(0)
                engine.add_request(f"r{i}", {"prompt_token_ids": prompts[i]}, params(16))
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        assert [done[f"r{i}"] for i in range(4)] == [g[:16] for g in greedy]


def test_abort_leaves_the_others_alone(engines, prompts, greedy):
    """A request aborted between rounds; its slot is taken by a new one at once."""
    engine = engines.tree().llm_engine
    for i in (0, 1, 2):
        engine.add_request(f"a{i}", {"prompt_token_ids": prompts[i]}, params(24))
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        if steps == 3:
            engine.abort_request(["a1"])
            engine.add_request("a3", {"prompt_token_ids": prompts[3]}, params(24))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    assert {name: done[name] for name in ("a0", "a2", "a3")} == {f"a{i}": greedy[i][:24] for i in (0, 2, 3)}


def test_bad_request_does_not_harm_the_batch(engines, prompts, greedy):
    """Requests that cannot work are refused alone, with an error; the running ones go on."""
    from vllm.exceptions import VLLMValidationError

    engine = engines.tree().llm_engine
    engine.add_request("good", {"prompt_token_ids": prompts[0]}, params(16))
    engine.step()
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        engine.add_request("long", {"prompt_token_ids": [5] * 1000}, params(4))
    with pytest.raises(VLLMValidationError, match="out of vocabulary"):
        engine.add_request("vocabulary", {"prompt_token_ids": [10**6]}, params(4))
    done = {}
    while engine.has_unfinished_requests():
        done.update({o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished})
    assert done == {"good": greedy[0][:16]}


def test_max_model_len_inside_a_tree(engines, prompts, greedy):
    """The model's length ends within a tree: the row is clipped to a node prefix, drafts past the end have no slot."""
    limit = len(prompts[3]) + 19
    llm = engines.tree(max_model_len=limit)
    with Script(llm, [prompts[3] + greedy[3]], always_right):
        assert generate(llm, [prompts[3]], params(64)) == [greedy[3][:19]]
    assert generate(llm, [prompts[3]], params(64)) == [greedy[3][:19]]


def test_stop_token_inside_the_accepted_path(engines, prompts, greedy):
    """A stop token in the middle of an accepted path ends the request there; its neighbour is unaffected."""
    stop = greedy[2][10]
    at = greedy[2].index(stop)
    llm = engines.tree()
    with Script(llm, [p + g for p, g in zip(prompts, greedy)], always_right):
        out = generate(llm, prompts[2:], [params(32, stop_token_ids=[stop]), params(32)])
    assert out[0] == greedy[2][: at + 1]
    assert out[1] == greedy[3]


def test_counters(engines, prompts, greedy):
    """vLLM's speculative-decoding counters: drafted, accepted, and accepted per position = depth."""
    llm = engines.tree(fresh=True, max_num_seqs=3)  # the newest engine of a process owns the process's counters

    def counters() -> dict[str, list[int]]:
        return {m.name: [m.value] if hasattr(m, "value") else list(m.values) for m in llm.get_metrics() if "spec_decode" in m.name}

    before = counters()
    with Script(llm, [p + g for p, g in zip(prompts, greedy)], lambda i: ([-1, 0, 0, 2, 2, 3, 3, 1], 6)):
        generate(llm, prompts[:1], params(9))  # 1 from the prompt, then 4 + 4: accepted depth 3 twice
    delta = {name: [a - b for a, b in zip(value, before[name])] for name, value in counters().items()}
    assert delta["vllm:spec_decode_num_drafts"] == [2]
    assert delta["vllm:spec_decode_num_draft_tokens"] == [14]
    assert delta["vllm:spec_decode_num_accepted_tokens"] == [6]
    assert delta["vllm:spec_decode_num_accepted_tokens_per_pos"][:4] == [2, 2, 2, 0]


def test_one_slot_per_request(engines):
    """No speculative state blocks, and a conv window of width - 1 columns, as plain decoding has."""
    llm = engines.tree()
    assert stats(llm)["spec_blocks_per_request"] == 0
    layer = runner(llm).model_state.factors.layers[0]
    conv, ssm = layer.state_views()
    assert conv.shape[2] == layer.conv_kernel_size - 1
    assert ssm.shape[1:] == (2, 128, 128)
    specs = [group.kv_cache_spec for group in runner(llm).kv_cache_config.kv_cache_groups]
    assert all(getattr(spec, "num_speculative_blocks", 0) == 0 for spec in specs)


@pytest.mark.parametrize("bole", [{"commit": "factor"}, {"commit": "replay"}, {"verify": "serial"}], ids=lambda b: "-".join(b.values()))
def test_prefix_caching_off(engines, prompts, greedy, bole):
    """One state slot updated in place (mamba cache mode `none`), with every way to verify and commit."""
    llm = engines.tree(bole=bole, enable_prefix_caching=False)
    assert stats(llm)["mamba_cache_mode"] == "none"
    assert generate(llm, prompts[:2], params(24)) == [g[:24] for g in greedy[:2]]


@pytest.mark.parametrize("source", ["counted", "file"])
def test_draft_vocab(engines, prompts, greedy, source, tmp_path_factory):
    """Drafts from a sixteenth of the vocabulary: the same tokens, drafts only from it, and still some accepted."""
    vocab, greedy = 256, [g[:24] for g in greedy[:2]]
    if source == "file":
        path = tmp_path_factory.mktemp("draft_vocab") / "ids.json"
        path.write_text(json.dumps(sorted({token for g in greedy for token in g} | set(range(8)))))
        vocab = str(path)
    llm = engines.tree(bole={"draft_vocab": vocab})
    before = stats(llm)["accepted"]
    for _ in range(2 if source == "counted" else 1):
        assert generate(llm, prompts[:2], params(24)) == greedy
    assert stats(llm)["accepted"] > before
    speculator = runner(llm).speculator
    allowed = set(speculator.draft_head.token_ids.tolist())
    stored = runner(llm).model_state.trees.token
    drafted = {token for token in stored[:, 1:].flatten().tolist() if token >= 0}
    if source == "file":
        assert drafted and drafted <= allowed
    else:
        served = {token for g in greedy for token in g}
        assert len(allowed) == 256 and len(served & allowed) > 0.9 * len(served), "the vocabulary follows what was served"
