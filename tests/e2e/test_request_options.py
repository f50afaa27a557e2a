"""What ends a request, multiplies it or reports on it, where several tokens arrive in one round: as in plain decoding."""

from __future__ import annotations

import pytest
from e2e_helpers import TOLERANCE, Script, generate, params, serve

CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def greedy(engines, prompts) -> list[list[int]]:
    return generate(engines.one_node(), prompts, params(24))


def ends(outputs) -> list[tuple]:
    return [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


def always_right(llm, prompts, tokens) -> Script:
    """Every round accepts a whole chain of seven drafts."""
    return Script(llm, [p + t for p, t in zip(prompts, tokens, strict=True)], lambda _round: (CHAIN, 7))


def test_limits_and_stops_inside_a_path(engines, prompts, greedy):
    """Eight tokens a round: a limit, a stop token, a stop string that spans two tokens, and the end of the text, each amid a path."""
    tree, one_node = engines.tree(), engines.one_node()
    decode, early, late = tree.get_tokenizer().decode, 4, 9  # in the first round, and in the second
    spanning = decode(greedy[2][late : late + 2])[1:-1] or decode(greedy[2][late : late + 2])
    tokens = greedy[3]
    sampling = [
        params(early),
        params(24, stop_token_ids=[greedy[1][late]]),
        params(24, stop=[spanning], include_stop_str_in_output=True),
        params(24, stop=[decode(tokens[early : early + 1])], min_tokens=early + 2, logit_bias={tokens[early]: 3.0}),
    ]
    wanted = ends(serve(one_node, prompts, sampling))
    assert len(wanted[0][0]) == early and wanted[1][2] == wanted[2][2] == "stop"
    with always_right(tree, prompts, greedy):
        assert ends(serve(tree, prompts, sampling)) == wanted


def test_several_samples_and_allowed_tokens(engines, prompts):
    """n = 3 under one seed, tokens allowed to one request alone, a fixed end of text; seeds 5 to 8."""
    allowed = list(range(200, 400))
    sampling = [
        params(8, temperature=0.9, seed=5, n=3),
        params(8, temperature=0.7, seed=6, allowed_token_ids=allowed),
        params(8, temperature=2.0, seed=7, top_k=50),
        params(8, temperature=1.0, seed=8, top_p=0.8, min_p=0.02, ignore_eos=False),
    ]
    found = ends(serve(engines.tree(), prompts, sampling))
    assert found == ends(serve(engines.one_node(), prompts, sampling))
    assert len({tuple(tokens) for tokens, *_ in found[:3]}) == 3 and set(found[3][0]) <= set(allowed)


def test_logprobs_are_those_of_teacher_forcing(engines, prompts, greedy):
    """Of accepted, corrected and bonus tokens, greedy and sampled; the prompt's own as well."""
    tree, one_node = engines.tree(), engines.one_node()
    sampling = [params(16, logprobs=3, prompt_logprobs=2, temperature=0.8 * (i % 2), seed=20 + i) for i in range(4)]
    outputs = serve(tree, prompts, sampling)
    for output, prompt in zip(outputs, prompts, strict=True):
        tokens, found = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        [forced] = serve(one_node, [[*prompt, *tokens]], params(1, prompt_logprobs=3))
        assert len(found) == 16 and all(token in place for token, place in zip(tokens, found))
        for at, place in enumerate(found):
            expected = forced.prompt_logprobs[len(prompt) + at]
            assert place[tokens[at]].logprob == pytest.approx(expected[tokens[at]].logprob, abs=TOLERANCE)
            best = max(expected, key=lambda token: expected[token].logprob)
            assert place[best].logprob == pytest.approx(expected[best].logprob, abs=TOLERANCE), f"token {at}"
        for ours, theirs in zip(output.prompt_logprobs[1:], forced.prompt_logprobs[1:]):
            assert all(ours[t].logprob == pytest.approx(theirs[t].logprob, abs=TOLERANCE) for t in ours.keys() & theirs.keys())


@pytest.mark.parametrize("mode,rows", [("processed_logprobs", 1000), ("processed_logprobs", 8), ("raw_logits", 1000)])
def test_logprobs_modes_and_sampling_masks(engines, prompts, monkeypatch, mode, rows):
    """What is reported follows the mode, and the mask holds the tokens that the emitted one was chosen among, also where a round's logits
    are processed in parts of `rows`; top_k makes processed logits differ from raw ones. Seeds 30 to 33."""
    monkeypatch.setattr("bole_vllm.sampler.get_max_chunk_logits", lambda _vocab_size: rows)
    masks = mode == "processed_logprobs"
    sampling = [params(8, logprobs=4, temperature=0.7, seed=30 + i, top_k=3 + i) for i in range(4)]
    one_node, tree = (make(logprobs_mode=mode, return_sampling_mask=masks) for make in (engines.one_node, engines.tree))
    found, plain = serve(tree, prompts, sampling), serve(one_node, prompts, sampling)
    assert ends(found) == ends(plain)
    for i, (ours, theirs) in enumerate(zip((o.outputs[0] for o in found), (o.outputs[0] for o in plain), strict=True)):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            for token in [t for t in b if t in a and b[t].logprob > -30]:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=TOLERANCE if mode != "raw_logits" else 0.26)
        if masks:
            chosen_among = ours.sampling_mask.token_ids
            assert [token in mask and len(mask) >= 3 + i for token, mask in zip(ours.token_ids, chosen_among, strict=True)] == [True] * 8
            assert [sorted(mask) for mask in chosen_among] == [sorted(mask) for mask in theirs.sampling_mask.token_ids]


def test_logprobs_of_named_tokens(engines, prompts, greedy):
    """Each place holds the token and those that its request names, or the best ones of a request that names none; in one batch."""
    named = [[5, 6], [7, 8, 9], [], []]
    sampling = [params(16, logprobs=(2, 3, 2, None)[i], logprob_token_ids=named[i] or None) for i in range(4)]
    tree, one_node = engines.tree(), engines.one_node()
    with always_right(tree, prompts, greedy):
        outputs = serve(tree, prompts, sampling)
    for output, tokens, ids, theirs in zip(outputs, greedy, named, serve(one_node, prompts, sampling), strict=True):
        found = output.outputs[0]
        assert list(found.token_ids) == tokens[:16]
        if output is outputs[3]:
            assert found.logprobs is None
            continue
        assert len(found.logprobs) == 16
        for token, ours, plain in zip(tokens, found.logprobs, theirs.outputs[0].logprobs):
            assert ours.keys() == {token, *ids} if ids else token in ours
            assert all(ours[t].logprob == pytest.approx(plain[t].logprob, abs=TOLERANCE) for t in ours.keys() & plain.keys())
