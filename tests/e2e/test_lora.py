"""LoRA adapters on whole trees: plain decoding's tokens under the same adapter."""

from __future__ import annotations

import json

import pytest
import torch
from e2e_helpers import BUSH, VOCAB, Script, counted, each_leaf, generate, params, serve, settled, text_tokens, tokens_of
from safetensors.torch import save_file

LENGTH = 12
# on a CPU a request without an adapter takes what the last slot holds, so one slot more than there are adapters at once
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
# (input, output) size of every projection that an adapter changes
MLP = {"mlp.gate_proj": (256, 768), "mlp.up_proj": (256, 768), "mlp.down_proj": (768, 256)}
ATTENTION = {"self_attn.q_proj": (256, 512), "self_attn.k_proj": (256, 128), "self_attn.v_proj": (256, 128), "self_attn.o_proj": (256, 256)}
GDN = {
    "linear_attn.in_proj_qkv": (256, 512), "linear_attn.in_proj_z": (256, 256), "linear_attn.out_proj": (256, 256),
    "linear_attn.in_proj_a": (256, 2), "linear_attn.in_proj_b": (256, 2),
}  # fmt: skip


def make_adapter(folder, seed: int, rank: int = 8, scale: float = 0.15, head: bool = False) -> str:
    """A random adapter of the demo model in peft's format, with or without a part for the LM head."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, (size_in, size_out) in {**MLP, **(ATTENTION if layer == 3 else GDN)}.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator) / size_in**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator) * scale
    targets = sorted({name.split(".")[1] for name in (*MLP, *ATTENTION, *GDN)})
    if head:
        targets.append("lm_head")
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(rank, 256, generator=generator) / 16
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(VOCAB, rank, generator=generator) * 2 * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list:
    """Two adapters, seeds 5 and 12: of the seeds 1 to 12 those that change the texts without close calls. The third: none."""
    from vllm.lora.request import LoRARequest

    return [LoRARequest(f"s{seed}", seed, make_adapter(tmp_path_factory.mktemp("lora"), seed)) for seed in (5, 12)] + [None]


def test_each_leaf_wins_in_turn(engines, prompts, adapters):
    """Requests with either adapter and with none: greedy against vLLM itself, at 0.8 (seeds 3 to 6) against trees of one node."""
    first, second, none = adapters
    mixed = [first, none, second, second]
    stock, tree, one_node = engines.stock(**LORA), engines.tree(**LORA), engines.one_node(**LORA)
    without = generate(stock, prompts, params(LENGTH), lora_request=[none] * 4)
    greedy = settled(stock, prompts, LENGTH, lora_request=mixed)
    assert [with_adapter == plain for with_adapter, plain in zip(greedy, without)] == [False, True, False, False]
    warm = [params(LENGTH, temperature=0.8, seed=3 + i) for i in range(4)]
    for sampling, wanted in ((params(LENGTH), greedy), (warm, generate(one_node, prompts, warm, lora_request=mixed))):
        with counted(tree) as gained, Script(tree, [p + w for p, w in zip(prompts, wanted)], each_leaf(BUSH)):
            assert generate(tree, prompts, sampling, lora_request=mixed) == wanted
        assert gained["accepted"] > 4 * LENGTH / 2
        assert gained["spine_hits"] < gained["branched"], "only the chain was accepted"


def test_adapters_change_while_requests_join_and_leave(engines, adapters):
    """The model's own drafts; six requests, four at a time: prompts and tree rows of different adapters side by side, seeds 20 to 25."""
    prompts = [text_tokens(i, 6 + 5 * i) for i in range(6)]
    mixed = [adapters[i] for i in (0, 2, 1, 1, 2, 0)]
    sampling = [params(4 + i % 4, temperature=0.8 * (i % 2), seed=20 + i) for i in range(6)]
    wanted = generate(engines.one_node(**LORA), prompts, sampling, lora_request=mixed)
    with counted(engines.tree(**LORA)) as gained:
        assert generate(engines.tree(**LORA), prompts, sampling, lora_request=mixed) == wanted
    assert gained["accepted"] > 0


def test_a_cached_prefix_belongs_to_its_adapter(engines, adapters):
    """One prompt under each adapter and without, then each again from the cache (blocks of 288 tokens): its own tokens."""
    tree = engines.tree(**LORA, max_model_len=864, max_num_seqs=1, block_size=32, max_num_batched_tokens=1024)
    prompt = text_tokens(0, 600)
    once, again = ([serve(tree, [prompt], params(5), lora_request=[adapter])[0] for adapter in adapters] for _ in range(2))
    assert [output.num_cached_tokens for output in once] == [0, 0, 0]
    assert all(output.num_cached_tokens > 0 for output in again)
    assert tokens_of(again) == tokens_of(once)
    assert len({tuple(tokens) for tokens in tokens_of(once)}) == 3


def test_an_adapter_of_the_lm_head(engines, prompts, adapters, tmp_path_factory):
    """Every row of a tree has its own request's head: the same adapter with a part for the LM head, without it, none; seed 12."""
    from vllm.lora.request import LoRARequest

    head = LoRARequest("head", 13, make_adapter(tmp_path_factory.mktemp("lora"), 12, head=True))
    _, second, none = adapters
    mixed = [head, none, second, head]
    wanted = generate(engines.one_node(**LORA), prompts, params(LENGTH), lora_request=mixed)
    without = generate(engines.stock(**LORA), prompts, params(LENGTH), lora_request=[second] * 4)
    assert wanted[0] != without[0] and wanted[3] != without[3], "the head's part has no effect"
    with Script(engines.tree(**LORA), [p + w for p, w in zip(prompts, wanted)], each_leaf(BUSH)):
        assert generate(engines.tree(**LORA), prompts, params(LENGTH), lora_request=mixed) == wanted
