"""A real `vllm serve` process on the CPU decodes with trees: streams, prompts echoed, tools, mixed requests, and what it refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from e2e_helpers import NUMBERS, TOLERANCE, VOCAB, generate, params, text_tokens
from server_helpers import Refused, Server, completion
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory, engines):
    started = Server.start(tmp_path_factory.mktemp("serve"))
    try:
        engines.stock(), engines.one_node()  # made while the server starts
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()


def at_once(call, bodies: list[dict]) -> list:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: call("/v1/completions", **body), bodies))


def tokens(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def test_two_concurrent_completions(server, engines, prompts):
    """One greedy, one sampled request at the same time: plain decoding's tokens; the counters see the drafts. Seed 11."""
    asked, temperatures = [prompts[0], text_tokens(1, 31)], [0.0, 0.8]
    drafted = server.counter("draft_tokens")
    answers = at_once(server.post, [completion(prompt, 12, temperature=t) for prompt, t in zip(asked, temperatures, strict=True)])
    wanted = generate(engines.one_node(), asked, [params(12, temperature=t) for t in temperatures])
    assert [tokens(answer)[0] for answer in answers] == wanted
    assert server.counter("draft_tokens") > drafted


def test_a_stream(server, engines, prompts):
    """A chunk holds all the tokens of its round, in order; the last one says why it ends, and the usage follows; as without a stream."""
    [wanted] = generate(engines.stock(), prompts[1:2], params(16))
    body = completion(prompts[1], 16)
    accepted = server.counter("accepted_tokens")
    *chunks, end = server.stream("/v1/completions", **body, stream_options={"include_usage": True})
    accepted = server.counter("accepted_tokens") - accepted
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == wanted
    # no more than were accepted: what makes a chunk longer is its round, not chunks that were held back
    assert 0 < sum(len(part["token_ids"]) - 1 for part in parts) <= accepted
    assert parts[0]["prompt_token_ids"] == prompts[1]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert end["choices"] == [] and end["usage"]["prompt_tokens"] == len(prompts[1]) and end["usage"]["completion_tokens"] == 16
    whole = server.post("/v1/completions", **body)
    assert tokens(whole) == [wanted] and whole["choices"][0]["text"] == "".join(part["text"] for part in parts)
    assert whole["usage"]["total_tokens"] == end["usage"]["total_tokens"] == len(prompts[1]) + 16


def test_an_echo_with_logprobs(server, engines, prompts):
    """The prompt and then the continuation, with the log probabilities that plain decoding reports for both."""
    [output] = engines.one_node().generate([{"prompt_token_ids": prompts[2]}], params(8, logprobs=2, prompt_logprobs=2), use_tqdm=False)
    wanted, places = prompts[2] + list(output.outputs[0].token_ids), output.prompt_logprobs + output.outputs[0].logprobs
    body = completion(prompts[2], 8, echo=True, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=False)
    [choice] = server.post("/v1/completions", **body)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == engines.one_node().get_tokenizer().decode(wanted)
    assert found["tokens"] == [f"token_id:{token}" for token in wanted] and len(found["text_offset"]) == len(wanted)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for token, logprob, top, place in list(zip(wanted, found["token_logprobs"], found["top_logprobs"], places, strict=True))[1:]:
        assert logprob == pytest.approx(place[token].logprob, abs=TOLERANCE)
        assert len(top) >= 2 and max(top.values()) == pytest.approx(max(p.logprob for p in place.values()), abs=TOLERANCE)


def tool(name: str, parameter: str, **schema) -> dict:
    """A function of one parameter."""
    parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


def test_tools_that_must_be_called(server, engines):
    """Any of three tools, with plain decoding's tokens, and a named one, streamed: arguments after their schemas. Seed 5."""
    llm = engines.stock()
    # the demo model likes to indent; without blanks a call is over soon
    blanks = {token: -100.0 for token in range(VOCAB) if not llm.get_tokenizer().decode([token]).strip()}
    chat = {
        "messages": [{"role": "user", "content": "def main():"}], "temperature": 0.8, "seed": 5, "max_tokens": 64, "logit_bias": blanks,
        "tools": [
            tool("go", "to", type="integer", minimum=0, maximum=9), tool("be", "at", enum=["x", "y"]), tool("do", "it", type="boolean"),
        ],
        "parallel_tool_calls": False,
    }  # fmt: skip
    allowed = {"go": [{"to": n} for n in range(10)], "be": [{"at": "x"}, {"at": "y"}], "do": [{"it": True}, {"it": False}]}
    any_one = {**chat, "tool_choice": "required", "return_token_ids": True}
    named = {**chat, "tool_choice": {"type": "function", "function": {"name": "be"}}}
    drafted = server.counter("draft_tokens")
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(lambda: list(server.stream("/v1/chat/completions", **named)))
        [choice] = server.post("/v1/chat/completions", **any_one)["choices"]
    assert server.counter("draft_tokens") > drafted
    [call] = [call["function"] for call in choice["message"]["tool_calls"]]
    assert json.loads(call["arguments"]) in allowed[call["name"]]
    calls = [call["function"] for chunk in streamed.result() for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    assert [call["name"] for call in calls if call.get("name")] == ["be"]
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) in allowed["be"]

    asked = server.post("/v1/chat/completions/render", **any_one)
    grammar = StructuredOutputsParams(structural_tag=asked["sampling_params"]["structured_outputs"]["structural_tag"])
    sampling = params(64, temperature=0.8, seed=5, ignore_eos=False, logit_bias=blanks, structured_outputs=grammar)
    assert [choice["token_ids"]] == generate(llm, [asked["token_ids"]], sampling)


def test_mixed_requests_equal_themselves_alone(server, engines, prompts):
    """A grammar with a penalty, two samples with penalties and a JSON schema share rounds: each as alone, and as in plain decoding."""
    options = [
        {"frequency_penalty": 0.9, "ignore_eos": False},
        {"n": 2, "temperature": 0.9, "seed": 5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 3, "min_p": 0.05, "ignore_eos": False},
    ]
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    over_http = [{"structured_outputs": {"regex": NUMBERS}}, {}, {"response_format": json_schema}]
    grammars = [{"structured_outputs": StructuredOutputsParams(**kind)} for kind in ({"regex": NUMBERS}, {"json": SCHEMA})]
    bodies = [completion(prompt, 9, **a, **b) for prompt, a, b in zip(prompts[:3], options, over_http, strict=True)]
    together = [tokens(answer) for answer in at_once(server.post, bodies)]
    assert together == [tokens(server.post("/v1/completions", **body)) for body in bodies]
    sampling = [params(9, **a, **b) for a, b in zip(options, [grammars[0], {}, grammars[1]], strict=True)]
    outputs = engines.one_node().generate([{"prompt_token_ids": p} for p in prompts[:3]], sampling, use_tqdm=False)
    assert together == [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
    assert together[1][0] != together[1][1]


# what the message must name -> options of a completion
REFUSED = {
    "logprobs of 21": {"logprobs": 21},
    "prompt logprobs of 21": {"prompt_logprobs": 21},
    "`prompt_logprobs` are not available when `stream=True`": {"prompt_logprobs": 1, "stream": True},
    "logprob_token_ids": {"logprobs": 1, "logprob_token_ids": [VOCAB]},
    "min_p": {"min_p": 1.5},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -2},
    "temperature": {"temperature": 2.5},
    "frequency_penalty": {"frequency_penalty": 2.5},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "n must be 1": {"n": 2},
    "min_tokens": {"min_tokens": 9, "max_tokens": 8},
    "max_tokens": {"max_tokens": 257},
    "logit_bias": {"logit_bias": {VOCAB: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": []},
    "stop_token_ids": {"stop_token_ids": [VOCAB]},
    "bad_words": {"bad_words": [""]},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "invalid regex": {"structured_outputs": {"regex": "(["}},
    "Invalid grammar specification": {"structured_outputs": {"grammar": "root ::= missing"}},
    "Invalid type: nothing": {"structured_outputs": {"json": {"type": "nothing"}}},
    "Invalid JSON grammar": {"structured_outputs": {"json": "{"}},
    "Choice": {"structured_outputs": {"choice": []}},
    "structural_tag": {"structured_outputs": {"structural_tag": '{"type": "nothing"}'}},
    "json_schema": {"response_format": {"type": "json_schema"}},
    "one kind of constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
}


def test_refusals_beside_a_request(server, engines, prompts):
    """What cannot be served comes back at once as a bad request that names it; a request on its way does not notice."""
    with closing(server.stream("/v1/completions", **completion(prompts[3], 24))) as chunks:
        found = next(chunks)["choices"][0]["token_ids"]
        for name, options in REFUSED.items():
            with pytest.raises(Refused) as refused:
                server.post("/v1/completions", **{**completion(prompts[0], 8), **options})
            assert refused.value.status == 400 and name in refused.value.message, f"{options}: {refused.value}"
        rounds = server.counter("drafts")
        for chunk in chunks:
            found += chunk["choices"][0]["token_ids"]
    assert server.counter("drafts") > rounds, "the request was over before the last refusal"
    assert [found] == generate(engines.stock(), prompts[3:], params(24))
