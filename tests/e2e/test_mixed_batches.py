"""Requests of every kind in one batch on a tree engine: each says what it says alone, on trees and in plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from e2e_helpers import BUSH, SCHEMA, TOLERANCE, Script, counted, each_leaf, generate, params, structured, text_tokens

LENGTH = 10


@dataclass
class Kind:
    """A request: its prompt, and the options of the SamplingParams that are made anew for every run of it."""

    prompt: list[int]
    options: dict

    def sampling(self):
        made = structured(**self.options["grammar"]) if "grammar" in self.options else {}
        return params(LENGTH, **{"seed": 3, **{k: v for k, v in self.options.items() if k != "grammar"}, **made})


@dataclass
class Said:
    """What a request gave back."""

    tokens: list[int]
    text: str
    reasons: tuple
    logprobs: list[dict[int, float]] | None

    @classmethod
    def of(cls, output) -> Said:
        one = output.outputs[0]
        logprobs = one.logprobs and [{token: found.logprob for token, found in place.items()} for place in one.logprobs]
        return cls(list(one.token_ids), one.text, (one.finish_reason, one.stop_reason), logprobs)

    def check(self, wanted: Said, name: str) -> None:
        assert (self.tokens, self.text, self.reasons) == (wanted.tokens, wanted.text, wanted.reasons), name
        assert (self.logprobs is None) == (wanted.logprobs is None), name
        assert self.logprobs is None or len(self.logprobs) == len(self.tokens), name
        for token, ours, theirs in zip(self.tokens, self.logprobs or [], wanted.logprobs or []):
            assert len(ours) >= 3 and token in ours, name
            assert all(ours[t] == pytest.approx(theirs[t], abs=TOLERANCE) for t in {token, *(ours.keys() & theirs.keys())}), name


@pytest.fixture(scope="module")
def kinds(engines, prompts) -> dict[str, Kind]:
    """On the prompts without close calls those whose options leave the gaps as they are; batches differ in row shapes. Seeds 7 and 51."""
    [last] = generate(engines.stock(), prompts[3:], params(LENGTH))
    decode = engines.stock().get_tokenizer().decode
    stops = [decode(last[2:3]), decode(last[7:9])[1:-1] or decode(last[7:9])]  # one comes too early, one spans two tokens
    return {
        "greedy": Kind(prompts[0], {}),
        "sampled": Kind(text_tokens(5, 23), {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 51}),
        "penalised": Kind(text_tokens(6, 31), {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
        "json": Kind(text_tokens(7, 18), {"grammar": {"json": SCHEMA}}),
        "logprobs": Kind(prompts[2], {"logprobs": 3}),
        "bad words": Kind(text_tokens(8, 26), {"temperature": 0.9, "min_p": 0.05, "bad_words": ["self", " def"], "seed": 7}),
        "choice and bias": Kind(prompts[1], {"grammar": {"choice": ["a cat sat", "a dog", "the end"]}, "logit_bias": {40: 2.5}}),
        "stop": Kind(prompts[3], {"min_tokens": 6, "stop": stops, "logit_bias": {5: -3.0}}),
    }


def serve(llm, kinds: list[Kind]) -> list[Said]:
    requests = [{"prompt_token_ids": kind.prompt} for kind in kinds]
    return [Said.of(output) for output in llm.generate(requests, [kind.sampling() for kind in kinds], use_tqdm=False)]


def alone(llm, kinds: dict[str, Kind]) -> dict[str, Said]:
    return {name: serve(llm, [kind])[0] for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def plain(engines, kinds) -> dict[str, Said]:
    """Plain decoding, four requests at a time; that each says the same alone is test_every_kind_alone."""
    said = dict(zip(kinds, serve(engines.one_node(), list(kinds.values()))))
    assert said["stop"].reasons[0] == "stop" and 6 <= len(said["stop"].tokens) < LENGTH
    assert said["choice and bias"].text in ("a cat sat", "a dog", "the end") and said["json"].text.startswith("{")
    return said


def check_all(found: dict[str, Said], plain: dict[str, Said], names=None) -> None:
    assert sorted(found) == sorted(names or plain)
    for name, said in found.items():
        said.check(plain[name], name)


@pytest.mark.parametrize("max_num_seqs", [4, 8])
def test_every_kind_in_one_batch(engines, kinds, plain, max_num_seqs):
    """The model's own drafts; of eight requests all run at once, or four, and the others take the slots that get free."""
    tree = engines.tree(max_num_seqs=max_num_seqs)
    with counted(tree) as gained:
        check_all(dict(zip(kinds, serve(tree, list(kinds.values())))), plain)
    assert gained["accepted"] > 0


def test_every_kind_alone(engines, kinds, plain):
    """Trees, each request in the slot that the one before had; vLLM itself, those without close calls."""
    check_all(alone(engines.tree(max_num_seqs=8), kinds), plain)
    settled = ["greedy", "logprobs", "choice and bias", "stop"]
    check_all(alone(engines.stock(), {name: kinds[name] for name in settled}), plain, settled)


def test_each_leaf_wins_in_turn(engines, kinds, plain):
    """Whole paths of every kind are accepted side by side."""
    tree = engines.tree(max_num_seqs=8)
    with counted(tree) as gained, Script(tree, [kinds[name].prompt + plain[name].tokens for name in kinds], each_leaf(BUSH)):
        check_all(dict(zip(kinds, serve(tree, list(kinds.values())))), plain)
    assert gained["accepted"] > sum(len(said.tokens) for said in plain.values()) / 2
    assert gained["spine_hits"] < gained["branched"], "only the chain was accepted"


def run(llm, kinds: dict[str, Kind], arrivals: dict[int, list[str]], aborts: dict[int, list[str]] | None = None) -> dict[str, Said]:
    """Step the engine; requests arrive and are aborted before the steps that are named. Of those that finish, what they said."""
    engine, done, step = llm.llm_engine, {}, 0
    while engine.has_unfinished_requests() or step <= max(arrivals):
        for name in arrivals.get(step, []):
            engine.add_request(name, {"prompt_token_ids": kinds[name].prompt}, kinds[name].sampling())
        if aborts and step in aborts:
            engine.abort_request(aborts[step])
        done.update({output.request_id: Said.of(output) for output in engine.step() if output.finished})
        step += 1
    return done


def test_staggered_arrival(engines, kinds, plain):
    """Two new requests every second step, eight in all, in the other order: prompts beside rows amid decoding."""
    names = list(kinds)[::-1]
    check_all(run(engines.tree(max_num_seqs=8), kinds, {step: names[step : step + 2] for step in range(0, 8, 2)}), plain)


def test_an_abort_leaves_the_others_alone(engines, kinds, plain):
    """Two aborts amid a full batch of four; the requests that wait take their slots."""
    arrivals = {0: ["sampled", "json", "penalised", "logprobs"], 1: ["stop", "bad words"]}
    found = run(engines.tree(max_num_seqs=4), kinds, arrivals, aborts={2: ["json", "penalised"]})
    check_all(found, plain, ["sampled", "logprobs", "stop", "bad words"])
