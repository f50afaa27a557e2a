"""BoleConfig: what it accepts, and the text of every refusal."""

import dataclasses

import pytest

from bole_vllm.config import BoleConfig, BoleConfigError


def test_defaults():
    config = BoleConfig.parse({}, num_speculative_tokens=31)
    assert config == BoleConfig(
        topk=4,
        max_depth=8,
        tree_size=32,
        verify="closed_form",
        commit="replay",
        precision="fp32",
        draft_vocab=None,
        draft_head="int8",
        debug=False,
    )
    assert config.num_drafts == 31


def test_every_key_is_taken():
    settings = {"topk": 2, "max_depth": 3, "tree_size": 8, "verify": "serial", "commit": "factor", "precision": "ieee"}
    settings |= {"draft_vocab": 64, "draft_head": "model", "debug": True}
    assert dataclasses.asdict(BoleConfig.parse(settings, 7)) == settings


@pytest.mark.parametrize(("settings", "drafts"), [({"topk": 1, "max_depth": 1}, 1), ({"topk": 16, "max_depth": 16}, 255)])
def test_bounds_are_inclusive(settings, drafts):
    assert BoleConfig.parse(settings, drafts).tree_size == drafts + 1


def test_depth_may_follow_the_number_of_nodes():
    config = BoleConfig.parse({"max_depth": [[8, 4], [16, 6]]}, 31)
    assert [config.depth_of(nodes) for nodes in (2, 8, 9, 16, 17, 32)] == [4, 4, 6, 6, 6, 6]
    assert config.deepest == 6
    assert BoleConfig.parse({"max_depth": [[8, 16]]}, 3).deepest == 3, "no deeper than it has drafts"
    assert BoleConfig.parse({}, 31).depth_of(4) == BoleConfig.parse({}, 31).deepest == 8


def test_parse_leaves_the_users_dictionary_alone():
    settings = {"topk": 2}
    BoleConfig.parse(settings, 7)
    assert settings == {"topk": 2}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BoleConfig.parse({}, 7).topk = 2


KNOWN = "topk, max_depth, tree_size, verify, commit, precision, draft_vocab, draft_head, debug"
REFUSALS = [
    ({"top_k": 4}, f"Unknown key 'top_k' in additional_config[\"bole\"]. Known keys: {KNOWN}."),
    ({"topk": 4, "z": 1, "a": 1}, f"Unknown key 'a' in additional_config[\"bole\"]. Known keys: {KNOWN}."),
    (None, 'additional_config["bole"] must be an object such as {}, got NoneType.'),
    ([], 'additional_config["bole"] must be an object such as {}, got list.'),
    (True, 'additional_config["bole"] must be an object such as {}, got bool.'),
    ({"topk": "4"}, "\"bole.topk\" must be an integer, got '4'."),
    ({"topk": 4.0}, '"bole.topk" must be an integer, got 4.0.'),
    ({"max_depth": True}, '"bole.max_depth" must be an integer or a list of [nodes, depth] pairs, got True.'),
    ({"max_depth": []}, '"bole.max_depth" must be an integer or a list of [nodes, depth] pairs, got [].'),
    ({"max_depth": [[8, 4], 5]}, '"bole.max_depth" must be an integer or a list of [nodes, depth] pairs, got [[8, 4], 5].'),
    ({"max_depth": [[8, 17]]}, '"bole.max_depth" must be in 1..16, got 17.'),
    ({"max_depth": [[8, "4"]]}, "\"bole.max_depth\" must be an integer of levels in every pair, got '4'."),
    ({"max_depth": [[8, 4], [8, 5]]}, '"bole.max_depth" must name rising numbers of nodes, got [[8, 4], [8, 5]].'),
    ({"topk": 0}, '"bole.topk" must be in 1..16, got 0.'),
    ({"topk": 17}, '"bole.topk" must be in 1..16, got 17.'),
    ({"max_depth": 0}, '"bole.max_depth" must be in 1..16, got 0.'),
    ({"max_depth": 17}, '"bole.max_depth" must be in 1..16, got 17.'),
    (
        {"tree_size": 32},
        '"bole.tree_size" is 32, but num_speculative_tokens=7 means trees of 8 nodes (drafts and the root). '
        "Change one of them, or leave tree_size out.",
    ),
    (
        {"tree_size": "8"},
        "\"bole.tree_size\" is '8', but num_speculative_tokens=7 means trees of 8 nodes (drafts and the root). "
        "Change one of them, or leave tree_size out.",
    ),
    ({"commit": "snapshot"}, "\"bole.commit\" must be one of factor, replay, got 'snapshot'."),
    ({"precision": "fp8"}, "\"bole.precision\" must be one of ieee, tf32x3, fp32, bf16x3, bf16x2, tf32, bf16, got 'fp8'."),
    ({"draft_vocab": 1.5}, '"bole.draft_vocab" must be an integer or a path to a JSON list of token ids, got 1.5.'),
    ({"draft_vocab": True}, '"bole.draft_vocab" must be an integer or a path to a JSON list of token ids, got True.'),
    ({"draft_vocab": -1}, '"bole.draft_vocab" must be in 0..2147483647, got -1.'),
    ({"draft_vocab": 3}, '"bole.draft_vocab" must be 0 (all tokens) or at least topk (4), got 3.'),
    ({"draft_head": "fp8"}, "\"bole.draft_head\" must be one of int8, model, got 'fp8'."),
    ({"verify": "chain"}, "\"bole.verify\" must be one of closed_form, serial, got 'chain'."),
    ({"debug": 1}, '"bole.debug" must be true or false, got 1.'),
]


@pytest.mark.parametrize(("settings", "text"), REFUSALS)
def test_refusals(settings, text):
    with pytest.raises(BoleConfigError) as refused:
        BoleConfig.parse(settings, 7)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("drafts", "text"),
    [
        (256, "num_speculative_tokens must be at most 255 with Bole, got 256."),
        (0, '"bole.tree_size" must be in 2..256, got 1.'),
    ],
)
def test_number_of_drafts(drafts, text):
    with pytest.raises(BoleConfigError) as refused:
        BoleConfig.parse({}, drafts)
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["commit", "precision"])
@pytest.mark.parametrize("value", [[], {}, None, 1])
def test_choices_of_a_wrong_type_are_refused(name, value):
    with pytest.raises(BoleConfigError, match=f'"bole.{name}" must be one of '):
        BoleConfig.parse({name: value}, 7)
