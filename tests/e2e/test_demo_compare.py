"""The demo's judgement of two runs: where they part, and whether that is a tie. No engine is started here."""

import dataclasses

import numpy as np
import pytest

from examples.demo.arms import CHAIN, GREEDY, ONE_NODE, PHASES, PLAIN, SAMPLED, TREE
from examples.demo.compare import (
    MAX_ULPS,
    Parting,
    bf16_ulp,
    check_scores,
    differences,
    distinct_share,
    first_difference,
    mean_accepted,
    partings,
)
from examples.demo.picture import label, layout, spine_of
from examples.demo.report import Records, Report

VOCAB = 8


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2, 9], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
        ([], [1], 0),
    ],
)
def test_first_difference(a, b, expected):
    assert first_difference(a, b) == expected
    assert first_difference(b, a) == expected


def test_differences_name_every_prompt_that_differs():
    found = differences([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 0], [0, 6]])
    assert found == [{"prompt": 1, "position": 1}, {"prompt": 2, "position": 0}]


def test_differences_refuse_runs_of_other_requests():
    with pytest.raises(ValueError, match="same requests"):
        differences([[1]], [[1], [2]])


@pytest.mark.parametrize(
    ("value", "ulp"), [(1.0, 2.0**-7), (1.99, 2.0**-7), (2.0, 2.0**-6), (9.9, 0.0625), (16.0, 0.125), (-9.9, 0.0625), (0.75, 2.0**-8)]
)
def test_bf16_ulp(value, ulp):
    assert bf16_ulp(value) == ulp


def test_bf16_ulp_is_the_spacing_of_torch_bfloat16():
    import torch

    numbers = torch.tensor([0.011, 0.5, 1.0, 3.3, 15.9, 16.0, 200.0]).bfloat16()
    following = (numbers.view(torch.int16) + 1).view(torch.bfloat16)
    assert [bf16_ulp(x) for x in numbers.tolist()] == (following.double() - numbers.double()).tolist()


def scores_of(tokens: list[list[int]], low: float = 0.0, high: float = 10.0) -> np.ndarray:
    """[prompts, tokens, vocab] scores under which `tokens` are the best."""
    scores = np.full((len(tokens), len(tokens[0]), VOCAB), low, dtype=np.float32)
    for prompt, row in enumerate(tokens):
        for position, token in enumerate(row):
            scores[prompt, position, token] = high
    return scores


def test_partings_measure_the_gap_at_the_first_difference_only():
    stock, other = [[1, 2, 3], [4, 5, 6]], [[1, 7, 0], [4, 5, 6]]
    scores = scores_of(stock)
    scores[0, 1, 7] = 9.9375  # one ulp of 10.0 below
    found = partings(stock, other, scores, np.full((2, 3), 10.0))
    assert found == [Parting(prompt=0, position=1, stock_token=2, tree_token=7, gap=0.0625, ulps=1.0)]
    assert found[0].is_tie


def test_the_ulp_is_that_of_the_top_logit_and_not_of_the_score():
    stock, other = [[1]], [[2]]
    scores = scores_of(stock, high=40.0)
    scores[0, 0, 2] = 39.75
    assert partings(stock, other, scores, np.full((1, 1), 10.0))[0].ulps == 4.0
    assert partings(stock, other, scores, np.full((1, 1), 5.0))[0].ulps == 8.0


def test_a_token_far_below_is_no_tie():
    found = partings([[1]], [[2]], scores_of([[1]]), np.full((1, 1), 10.0))
    assert found[0].ulps == 160.0 > MAX_ULPS
    assert not found[0].is_tie


def test_an_unknown_score_is_no_tie():
    scores = scores_of([[1]])
    scores[0, 0, 2] = np.nan
    assert not partings([[1]], [[2]], scores, np.full((1, 1), 10.0))[0].is_tie


def test_a_run_that_stopped_early_is_refused():
    with pytest.raises(ValueError, match="stopped early"):
        partings([[1, 2]], [[1]], scores_of([[1, 2]]), np.full((1, 2), 10.0))


def test_check_scores_accepts_the_tokens_they_explain_and_no_others():
    tokens = [[1, 2], [3, 4]]
    check_scores(tokens, scores_of(tokens))
    with pytest.raises(ValueError, match="token 1 of prompt 0"):
        check_scores([[1, 5], [3, 4]], scores_of(tokens))
    with pytest.raises(ValueError, match="token 0 of prompt 0"):
        check_scores(tokens, np.full((2, 2, VOCAB), np.nan))


def test_mean_accepted_counts_the_bonus_token():
    assert mean_accepted(drafts=4, accepted=10) == 3.5
    assert mean_accepted(drafts=0, accepted=0) == 1.0


def test_distinct_share_is_low_where_texts_repeat():
    assert distinct_share([[1, 2, 3, 4, 5]]) == 1.0
    assert distinct_share([[1] * 13]) == 0.1
    assert distinct_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 1.0  # within a text only
    assert distinct_share([[1, 2]]) == 1.0


# -- the report ----------------------------------------------------------------------------------------------------


def records(change: dict[str, list[list[int]]] | None = None, score: dict[tuple[int, int, int], float] | None = None) -> Records:
    """Records of arms that all wrote the same tokens, but for greedy `change`s; `score`: entries of the greedy scores."""
    tokens = [[1, 2, 3], [4, 5, 6]]
    stats = {"nodes_per_step": 16.0, "bytes_per_node": 100, "spec_blocks_per_request": 0, "tree_rows": 9}
    by_arm = {}
    for arm in (PLAIN, CHAIN, ONE_NODE, TREE):
        counters = {"drafts": 10, "accepted_tokens": 40 if arm is TREE else 20}
        phases = {phase.name: {"tokens": tokens, "forwards": 3, "counters": counters} for phase in PHASES}
        if change and arm.name in change:
            phases[GREEDY.name] = {**phases[GREEDY.name], "tokens": change[arm.name]}
        by_arm[arm.name] = {
            "phases": phases, "stats": stats if arm.bole is not None else {}, "spec_blocks": 0, "state_bytes": 1000, "seconds": 1.0,
            "versions": {},
        }  # fmt: skip
    scores = {phase.name: scores_of(tokens) for phase in PHASES} | {f"{phase.name}_top": np.full((2, 3), 10.0) for phase in PHASES}
    for place, value in (score or {}).items():
        scores[GREEDY.name][place] = value
    return Records(by_arm, scores)


def report(*args, **kwargs) -> Report:
    return Report(records(*args, **kwargs), seconds=1.0, picture=None)


def test_equal_arms_pass():
    found = report()
    values = found.as_json()
    assert found.failures() == []
    assert (values["tokens_equal"], values["seeded_tokens_equal"], values["stock_ties_ok"]) == (True, True, True)
    assert (values["mat"], values["chain_mat"]) == (5.0, 3.0)
    assert "NOT MET" not in found.marks()


def test_one_token_changed_by_the_tree_fails_even_where_it_is_a_tie():
    found = report({TREE.name: [[1, 2, 3], [4, 5, 7]]}, {(1, 2, 7): 10.0})
    assert found.as_json()["tokens_equal"] is False
    assert found.as_json()["differences"][GREEDY.name] == [{"prompt": 1, "position": 2, "ulps": 0.0}]
    assert found.as_json()["stock_ties_ok"] is True
    assert [text for text in found.failures() if "prompt 1, position 2" in text] == found.failures() != []
    assert "tokens_equal NOT MET" in found.marks()


def test_a_changed_token_after_another_text_is_not_judged_by_plain_decoding():
    found = report({PLAIN.name: [[1, 2, 3], [4, 7, 6]], TREE.name: [[1, 2, 3], [4, 5, 7]]}, {(1, 1, 7): 10.0})
    assert found.as_json()["differences"][GREEDY.name] == [{"prompt": 1, "position": 2, "ulps": None}]


def test_parting_from_stock_layers_at_a_tie_passes_and_is_listed():
    both = [[1, 2, 3], [4, 5, 7]]
    found = report({TREE.name: both, ONE_NODE.name: both}, {(1, 2, 7): 9.875})
    values = found.as_json()
    assert found.failures() == []
    assert values["tokens_equal"] is True
    expected = {"prompt": 1, "position": 2, "stock_token": 6, "tree_token": 7, "gap": 0.125, "ulps": 2.0}
    assert values["stock_ties"] == [expected]
    assert values["max_stock_ulps"] == 2.0
    assert "1 tie" in found.table()


def test_parting_from_stock_layers_beyond_a_tie_fails():
    both = [[1, 2, 3], [4, 5, 7]]
    found = report({TREE.name: both, ONE_NODE.name: both}, {(1, 2, 7): 9.0})
    assert found.as_json()["stock_ties_ok"] is False
    assert len(found.failures()) == 1 and "16.0 ulps" in found.failures()[0]
    assert "NO (1 beyond a tie)" in found.table()


def test_scores_that_do_not_explain_plain_decoding_are_refused():
    with pytest.raises(ValueError, match="not the best"):
        report(score={(0, 0, 5): 11.0})


def test_a_mat_mark_that_is_missed_is_said_and_fails_nothing():
    arms = records()
    counters = arms.by_arm[TREE.name]["phases"][SAMPLED.name]
    arms.by_arm[TREE.name]["phases"][SAMPLED.name] = {**counters, "counters": {"drafts": 10, "accepted_tokens": 21}}
    found = Report(arms, seconds=1.0, picture=None)
    assert "sampled MAT 1.03x the chain's (mark 1.25) NOT MET" in found.marks()
    assert found.failures() == []


# -- the picture ---------------------------------------------------------------------------------------------------


def test_layout_draws_every_real_node_once_and_first_children_straight_on():
    #        0 - 1 - 2      spine; 3 beside 1 with the child 4; 5 beside 2; 6 a pad
    parent, real = [-1, 0, 1, 0, 3, 1, 0], [True] * 6 + [False]
    places = layout(parent, real)
    assert set(places) == {0, 1, 2, 3, 4, 5}
    assert len(set(places.values())) == 6
    assert [places[node][0] for node in range(6)] == [0, 1, 2, 1, 2, 2]
    assert places[0][1] == places[1][1] == places[2][1]
    assert places[3][1] == places[4][1]
    assert spine_of(parent) == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "shown"), [(" is", "·is"), ("\n    ", "↵····"), ("", "∅"), ("x" * 13, "x" * 11 + "…"), ("x" * 12, "x" * 12)]
)
def test_label(text, shown):
    assert label(text) == shown


def test_arms_differ_only_in_how_they_draft():
    common = [
        {
            key: value
            for key, value in arm.engine_arguments("m", on_gpu=False).items()
            if key not in ("speculative_config", "additional_config")
        }
        for arm in (CHAIN, ONE_NODE, TREE)
    ]
    assert common[0] == common[1] == common[2]
    assert ONE_NODE.speculative["num_speculative_tokens"] == TREE.speculative["num_speculative_tokens"]
    assert dataclasses.replace(TREE, bole=None, speculative=None).engine_arguments("m", on_gpu=False)["speculative_config"] is None
