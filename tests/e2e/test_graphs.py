"""The round as CUDA graphs replay it: fixed addresses, padded batches, topologies that change from round to round."""

from __future__ import annotations

import pytest
from e2e_helpers import PROMPTS, Script, counted, generate, params, settled, text_tokens
from replayed_graphs import install

TOKENS = 16


@pytest.fixture(scope="module")
def captured(engines):
    with pytest.MonkeyPatch.context() as patch:
        llm = engines.tree(drafts=7, fresh=True)
        yield llm, install(llm, patch)


@pytest.fixture(scope="module")
def reference(engines):
    prompts = [text_tokens(*prompt) for prompt in PROMPTS]
    return prompts, settled(engines.one_node(), prompts, TOKENS)


@pytest.mark.parametrize("count", [1, 3])
def test_replayed_rounds_equal_plain_decoding(captured, reference, count):
    """One request fills its graph, three leave a row of theirs to nobody."""
    llm, replays = captured
    prompts, want = reference
    replays.clear()
    assert generate(llm, prompts[:count], params(TOKENS)) == want[:count]
    assert all(replays[name] > 0 for name in ("target", "commit", "draft prefill", "tree")), dict(replays)


def test_topologies_change_from_round_to_round(captured, reference):
    """Trees of other shapes in every round, the accepted path on and off the spine, through the same graphs."""
    llm, replays = captured
    prompts, want = reference
    shapes = [
        ([-1, 0, 1, 2, 0, 4, 5, 0], 6),
        ([-1, 0, 1, 2, 3, 4, 5, 6], 7),
        ([-1, 0, 0, 0, 0, 0, 0, 0], 5),
        ([-1, 0, 1, 0, 3, 3, 5, 6], None),
        ([-1, 0, 0], 2),
    ]
    replays.clear()
    script = Script(llm, [p + w for p, w in zip(prompts[:3], want[:3], strict=True)], lambda turn: shapes[turn % len(shapes)])
    with counted(llm) as gained, script:
        assert generate(llm, prompts[:3], params(TOKENS)) == want[:3]
    assert replays["target"] > 0
    assert gained["branched"] > gained["spine_hits"] > 0


def test_drafts_by_batch_size(engines, reference, monkeypatch):
    """Graphs for every number of drafts that the batch size may ask for: 7 for one or two requests, 3 for more."""
    schedule = {"num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 2, 7], [3, 4, 3]]}
    llm = engines.tree(drafts=7, spec=schedule, fresh=True)
    replays = install(llm, monkeypatch)
    prompts, want = reference
    for count in (1, 4):
        replays.clear()
        assert generate(llm, prompts[:count], params(TOKENS)) == want[:count]
        assert all(replays[name] > 0 for name in ("target", "commit", "draft prefill", "tree")), dict(replays)
