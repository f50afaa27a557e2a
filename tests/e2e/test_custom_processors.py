"""Custom logits processors: plain decoding's tokens; whole trees where a processor's rows are independent, else the top-1 chain."""

from __future__ import annotations

import pytest
from custom_processors import AfterOne, AfterTwo
from e2e_helpers import Script, counted, each_leaf, generate, params

LENGTH = 9
COMB = [-1, 0, 1, 2, 0, 1, 2, 3]
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module", params=[AfterOne, AfterTwo], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def case(engines, prompts, kind):
    """(tree engine with both processors, parameters of four requests of which three use this one, plain decoding's tokens)."""

    def sampling(name: str | None) -> list:
        return [params(LENGTH, temperature=0.7 * (i % 2), seed=60 + i, extra_args={"custom": name if i < 3 else None}) for i in range(4)]

    engine = {"logits_processors": [AfterOne, AfterTwo]}
    wanted, without = (generate(engines.one_node(**engine), prompts, sampling(name)) for name in (kind.__name__, None))
    assert [a == b for a, b in zip(wanted, without)] == [False, False, False, True]
    return engines.tree(**engine), sampling(kind.__name__), wanted


def accepted(tree, prompts, sampling, wanted, plan) -> int:
    """Drafts that were accepted while a scripted drafter followed the plan, once the tokens were found to be plain decoding's."""
    with counted(tree) as gained, Script(tree, [p + w for p, w in zip(prompts, wanted, strict=True)], plan):
        assert generate(tree, prompts, sampling) == wanted
    return gained["accepted"]


def test_the_models_own_drafts(prompts, case):
    """Seeds 60 to 63."""
    tree, sampling, wanted = case
    assert generate(tree, prompts, sampling) == wanted


def test_each_leaf_wins_in_turn(prompts, case, kind):
    """Branches are accepted where rows are independent, and of the request without a processor; the chain of every request."""
    tree, sampling, wanted = case
    found = [accepted(tree, prompts[r : r + 1], sampling[r], wanted[r : r + 1], each_leaf(COMB)) for r in (0, 1, 3)]
    chain = accepted(tree, prompts, sampling, wanted, lambda _round: (CHAIN, 7))
    assert chain > 4 * LENGTH / 2
    assert found[2] > LENGTH / 2
    if kind is AfterOne:
        assert min(found) > LENGTH / 2
    else:  # one leaf of the four hangs on the chain, and of the others what lies on it
        assert max(found[:2]) < found[2]
