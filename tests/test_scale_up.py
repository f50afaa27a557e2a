"""The scale-up of a small model: the large one computes the same, and what was added computes nothing that is seen."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.models.constant_channel import constant_of, reserve_constant_channel
from benchmarks.models.loader import load_small
from benchmarks.models.placement import place_channels, place_heads, place_layers
from benchmarks.models.scale_up import EXTRA_ROW_WEIGHT, HEAD, scaled_weights, tensor_shapes, write_folder, write_weights
from benchmarks.models.shapes import SHAPES, layer_types, scaled_config
from bole_vllm import cpu
from examples.demo_model.model import CHUNK, CONFIG, DemoModel

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 256
SMALL = {
    **CONFIG,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
BIG_SIZES = {
    "vocab_size": 640,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
BIG = scaled_config(BIG_SIZES, SMALL)
# Several groups of 2 heads, and one of 4, on groups of 3: the last in two copies.
GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
COPIED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 4}
WIDE = {**BIG_SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 9}
DEPTHS = 4


pytestmark = pytest.mark.usefixtures("one_thread")


class BigModel(DemoModel):
    """A DemoModel with a head of its own."""

    def __init__(self, config: dict, weights: dict[str, Tensor]):
        super().__init__(config)
        self.head = weights.pop(HEAD)
        self.load_state_dict(weights)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head.to(hidden.dtype))


def small_model(config: dict = SMALL, seed: int = 0, reserve: bool = True) -> DemoModel:
    """Random, every part of it at work, weights exact in bf16."""
    torch.manual_seed(seed)
    net = DemoModel(config)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "embed" in name:
                p.normal_(std=0.2)
            elif p.ndim == 2:
                p.normal_(std=p.shape[1] ** -0.5)
            elif "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
            p.copy_(p.bfloat16())
    if reserve:
        reserve_constant_channel(net)
    return net


def scaled(net: DemoModel, big: dict = BIG, dtype: torch.dtype = torch.float32, seed: int = 0) -> BigModel:
    return BigModel(big, dict(scaled_weights(net.state_dict(), net.config, big, seed, dtype=dtype)))


def some_tokens(count: int = 2, length: int = 2 * CHUNK) -> Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(net: DemoModel, tokens: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Logits [B, T, vocabulary] of the target and of every drafting depth, rows without their true tokens left out."""
    hidden = net.model(tokens, dtype)
    drafted = net.draft(tokens, hidden, DEPTHS)
    return [net.logits(hidden).float()] + [net.logits(state[:, : -depth - 1]).float() for depth, state in enumerate(drafted)]


def assert_equal_functions(small: DemoModel, big: BigModel) -> None:
    """Logits of both in double precision, and in fp32 to its rounding: products of unlike length add up in unlike order."""
    tokens = some_tokens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # what the network computes in fp32
        exact = run(small, tokens, torch.float64), run(big, tokens, torch.float64)
    for bound, pair in ((1e-12, exact), (2e-5, (run(small, tokens), run(big, tokens)))):
        for depth, (here, there) in enumerate(zip(*pair, strict=True)):
            error = float((there[..., :VOCAB] - here).abs().max() / here.abs().max())
            assert error < bound, f"depth {depth} (0: target), {here.dtype}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("small", "sizes"),
    [(SMALL, BIG_SIZES), (GROUPED, WIDE), (COPIED, WIDE), (SMALL, {**BIG_SIZES, "hidden_size": 320}), (SMALL, {"vocab_size": VOCAB})],
    ids=["base", "groups", "copied groups", "five copies", "same shape"],
)
def test_target_and_drafter_are_equal(small, sizes):
    net = small_model(small)
    assert_equal_functions(net, scaled(net, scaled_config(sizes, small)))


def test_the_random_part_does_not_matter():
    net, tokens = small_model(), some_tokens(1)
    one, other = scaled(net, seed=1), scaled(net, seed=2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    for here, there in zip(run(one, tokens), run(other, tokens), strict=True):
        torch.testing.assert_close(here[..., :VOCAB], there[..., :VOCAB], rtol=0, atol=2e-5 * float(here[..., :VOCAB].abs().max()))


def test_bf16_draws_the_same_tokens():
    """Every rounding point rounds the same number: equal but where a sum in another order rounds otherwise."""
    net, tokens = small_model(), some_tokens()
    big = scaled(net, dtype=torch.bfloat16)
    for here, there in zip(run(net, tokens, torch.bfloat16), run(big, tokens, torch.bfloat16), strict=True):
        best = here.topk(2, -1)
        clear = best.values[..., 0] - best.values[..., 1] > 0.02 * here.abs().max()
        assert clear.float().mean() > 0.5
        assert torch.equal(there.argmax(-1)[clear], best.indices[..., 0][clear])
        assert (there[..., :VOCAB] - here).abs().max() < 0.02 * here.abs().max()


def test_added_vocabulary_is_out_of_reach():
    """Its best logit lies so far below the 64th that no temperature in use gives it a probability above 0."""
    net, tokens = small_model(), some_tokens()
    for logits in run(scaled(net), tokens):
        assert int(logits.topk(64, -1).indices.max()) < VOCAB
        assert bool((logits[..., VOCAB:] < -1000).all())
        assert float((logits / 4).softmax(-1)[..., VOCAB:].max()) == 0.0


def test_added_channels_are_copies():
    """Everywhere in the residual stream, while added layers do compute and write nothing."""
    net, tokens = small_model(), some_tokens(1)
    big = scaled(net)
    seen, added = [], []
    for layer in [*big.model.layers, *big.mtp.layers]:
        layer.register_forward_hook(lambda _module, _args, out: seen.append(out))
    big.model.layers[5].mlp.down_proj.register_forward_pre_hook(lambda _module, args: added.append(args[0]))
    run(big, tokens)
    assert len(seen) == BIG["num_hidden_layers"] + DEPTHS
    for out in seen:
        first, *others = out.split(SMALL["hidden_size"], -1)
        assert bool((first[..., :-1] != 0).any()) and len(others) == 3
        assert all(torch.equal(first, copy) for copy in others)
    assert float(added[0].std()) > 0.01
    assert all(torch.equal(seen[3], out) for out in seen[4:8]), "an added layer wrote to the residual stream"


def test_layers_keep_their_kind_and_order():
    kinds = layer_types({"num_hidden_layers": 8})
    assert kinds == ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    assert place_layers(kinds[:4], kinds) == [0, 1, 2, 3]
    assert place_layers(["linear_attention", "full_attention", "linear_attention"], kinds) == [0, 3, 4]


def test_a_sparse_pattern_is_equal_too():
    """A small model of other proportions: its layers lie apart, added ones between them."""
    net = small_model({**SMALL, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]})
    assert_equal_functions(net, scaled(net, scaled_config(BIG_SIZES, net.config)))


@pytest.mark.parametrize(("groups", "heads"), [((1, 2), (2, 6)), ((2, 4), (4, 12)), ((1, 4), (8, 8)), ((2, 8), (6, 16)), ((3, 3), (3, 3))])
def test_heads_stay_with_their_groups(groups, heads):
    group_axis, head_axis = place_heads(groups, heads, "test")
    holds = dict(zip(group_axis.target.tolist(), group_axis.source.tolist()))
    assert sorted(head_axis.source.tolist()) == list(range(heads[0])) and len(set(head_axis.target.tolist())) == heads[0]
    for small, big in zip(head_axis.source.tolist(), head_axis.target.tolist()):
        assert holds[big // (heads[1] // groups[1])] == small // (heads[0] // groups[0])


def test_channels_are_written_everywhere_and_read_once():
    written, read = place_channels(4, 12)
    assert written.target.tolist() == list(range(12)) and written.source.tolist() == [0, 1, 2, 3] * 3
    assert read.target.tolist() == read.source.tolist() == [0, 1, 2, 3] and read.big == 12
    for small, big in [(100, 256), (128, 64)]:
        with pytest.raises(ValueError, match="must be a multiple"):
            place_channels(small, big)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 64}, "head_dim differs: 32 in the small model, 64"),
        ({"linear_key_head_dim": 64}, "linear_key_head_dim differs"),
        ({"hidden_size": 160}, "must be a multiple"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps differs"),
        ({"rope_parameters": {**CONFIG["rope_parameters"], "rope_theta": 1e7}}, "rotary positions differ"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"] * 8}, "no linear_attention layer at 0"),
        ({"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}, "no full_attention layer at 3"),
        ({"num_hidden_layers": 12}, "8 layer_types for 12 layers"),
        ({"vocab_size": 128}, "vocab_size: the small model has 256"),
        ({"intermediate_size": 64}, "intermediate_size: the small model has 96"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"linear_num_key_heads": 1, "linear_num_value_heads": 1}, "1 groups of 2 heads need 2 groups of 1"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(change, message):
    state = small_model().state_dict()
    with pytest.raises(ValueError, match=message):
        scaled_weights(state, SMALL, {**BIG, **change})


def test_a_state_that_is_not_the_configuration_s_is_refused():
    state = small_model().state_dict()
    with pytest.raises(ValueError, match=r"no place for tensors of the small model: extra\.weight"):
        scaled_weights({**state, "extra.weight": torch.zeros(1)}, SMALL, BIG)
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight of the small model is \[64, 64\], by its configuration \[64, 128\]"):
        scaled_weights({**state, "mtp.fc.weight": state["mtp.fc.weight"][:, :64]}, SMALL, BIG)
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"has no model\.norm\.weight"):
        scaled_weights(state, SMALL, BIG)


def test_larger_vocabulary_needs_the_constant_channel():
    net = small_model(reserve=False)
    with pytest.raises(ValueError, match="no constant channel"):
        scaled_weights(net.state_dict(), SMALL, BIG)
    assert_equal_functions(net, scaled(net, {**BIG, "vocab_size": VOCAB}))  # the same vocabulary does not
    reserve_constant_channel(net, 0.25)
    assert constant_of(net.state_dict()) == 0.25
    with torch.no_grad():
        net.mtp.layers[0].mlp.down_proj.weight[-1, 3] = 0.01
    with pytest.raises(ValueError, match=r"mtp\.layers\.0\.mlp\.down_proj\.weight does not keep"):
        scaled_weights(net.state_dict(), SMALL, BIG)


def test_the_constant_channel_survives_training():
    net = small_model(reserve=False)
    channel = reserve_constant_channel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    channel.follow(optimizer)
    before = net.state_dict()["mtp.fc.weight"].clone()
    tokens = some_tokens(1, CHUNK)
    for _ in range(3):
        hidden = net.model(tokens, torch.float32)
        (net.logits(hidden).square().mean() + net.logits(net.draft(tokens, hidden, 1)[0]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(net.state_dict()["mtp.fc.weight"], before)
    assert constant_of(net.state_dict()) == 0.125
    assert_equal_functions(net, scaled(net))


def test_names_and_shapes_are_the_checkpoint_s():
    state = small_model().state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in DemoModel(BIG).state_dict().items()} | {HEAD: (640, 256)}
    assert tensor_shapes(state, SMALL, BIG) == expected
    some = dict(scaled_weights(state, SMALL, BIG, only=lambda name: name.startswith("mtp.")))
    assert set(some) == {name for name in expected if name.startswith("mtp.")}
    everything = dict(scaled_weights(state, SMALL, BIG))
    assert all(torch.equal(tensor, everything[name]) for name, tensor in some.items()), "a tensor depends on which others are made"
    assert {tensor.dtype for tensor in everything.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("shape", "billions"), [("9b", (8.5, 9.5)), ("27b", (26, 28)), ("35b-a3b", (34, 36.5))])
def test_the_large_shapes_have_the_size_of_their_names(shape, billions):
    small = {**SMALL, "hidden_size": 256, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    with torch.device("meta"):
        state = DemoModel(small).state_dict()
    big = scaled_config(shape, small)
    state = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    net_like = DemoModel(small)
    net_like.load_state_dict(state)
    reserve_constant_channel(net_like)
    shapes = tensor_shapes(net_like.state_dict(), small, big)
    total = sum(torch.Size(size).numel() for size in shapes.values()) / 1e9
    assert billions[0] < total < billions[1]
    assert set(SHAPES[shape]) <= set(big)


def test_shards_hold_the_checkpoint(tmp_path):
    net = small_model()
    weights = dict(scaled_weights(net.state_dict(), SMALL, BIG))
    write_folder(tmp_path / "big", BIG, ROOT / "examples" / "demo_model")
    write_weights(tmp_path / "big", iter(weights.items()), shard_bytes=1 << 20)
    index = json.loads((tmp_path / "big" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights) and len(set(index["weight_map"].values())) > 2
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "big" / shard, "pt") as file:
            assert torch.equal(file.get_tensor(name), weights[name])
    assert {path.name for path in (tmp_path / "big").glob("*.json")} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}


MOE_SIZES = {
    **{key: value for key, value in BIG_SIZES.items() if key != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_transformers_computes_the_same(kind, monkeypatch):
    """An implementation that is not ours, dense and as a mixture of experts (target only: it has no MTP)."""
    cpu.prepare_process()  # lets transformers import a torchvision whose extension does not load
    import transformers

    net, tokens = small_model(), some_tokens(1)
    config = scaled_config(MOE_SIZES if kind == "Qwen3_5Moe" else BIG_SIZES, SMALL)
    settings = getattr(transformers, f"{kind}TextConfig")(**{**config, "dtype": "float32"})
    big = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    code = sys.modules[type(big).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):  # in PyTorch, whatever kernel libraries are installed
        monkeypatch.setattr(code, name, inspect.unwrap(getattr(code, name)))
    weights = dict(scaled_weights(net.state_dict(), SMALL, config, dtype=torch.float32))
    missing, unexpected = big.load_state_dict(weights, strict=False)
    assert missing == [] and all(name.startswith("mtp.") for name in unexpected)
    with torch.no_grad():
        here, there = run(net, tokens)[0], big(tokens).logits
    assert (there[..., :VOCAB] - here).abs().max() < 1e-5 * here.abs().max()
    assert bool((there[..., VOCAB:] < -1000).all())
    assert float(weights[HEAD][VOCAB, SMALL["hidden_size"] - 1]) == EXTRA_ROW_WEIGHT


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from benchmarks.models.loader import register_loader

register_loader()
engines, prompts = json.loads(sys.argv[1])
common = dict(enforce_eager=True, max_model_len=128, max_num_seqs=2, kv_cache_memory_bytes=1 << 27, disable_log_stats=False)
kept, found = [], []
for folder, options in engines:
    llm = LLM(folder, **common, **options)
    kept.append(llm)
    requests = [{"prompt_token_ids": p} for p in prompts]
    sampling = dict(max_tokens=16, ignore_eos=True)
    greedy, gaps = [], []
    for output in llm.generate(requests, SamplingParams(temperature=0.0, logprobs=2, **sampling), use_tqdm=False):
        best = [sorted((c.logprob for c in candidates.values()), reverse=True)[:2] for candidates in output.outputs[0].logprobs]
        greedy.append(list(output.outputs[0].token_ids))
        gaps.append([a - b for a, b in best])
    accepted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    hot = llm.generate(requests, SamplingParams(temperature=2.0, seed=5, **sampling), use_tqdm=False)
    sampled = [list(output.outputs[0].token_ids) for output in hot]
    found.append({"greedy": greedy, "gaps": gaps, "accepted": accepted, "sampled": sampled})
print("FOUND", json.dumps(found))
"""


def serve(engines: list[tuple[str, dict]], prompts: list[list[int]]) -> list[dict]:
    """What real engines, (folder, options) each, make of the prompts; in a process of their own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB per engine
    command = [sys.executable, "-c", ENGINE, json.dumps([engines, prompts])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.split("FOUND ")[1])


def save_small(folder: Path, net: DemoModel) -> None:
    """The small model as a checkpoint folder."""
    demo = ROOT / "examples" / "demo_model"
    write_folder(folder, net.config, demo)
    save_file(
        {name: tensor.bfloat16() for name, tensor in net.state_dict().items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def test_an_engine_serves_the_scaled_model_as_the_small_one(tmp_path):
    """The demo checkpoint with a constant channel, and a larger shape of it through the load format, with drafts of stock chain MTP."""
    pytest.importorskip("vllm")
    from tokenizers import Tokenizer

    demo = ROOT / "examples" / "demo_model"
    state, config = load_small(demo)
    net = DemoModel(config)
    net.load_state_dict(state)
    reserve_constant_channel(net)
    save_small(tmp_path / "small", net)
    write_folder(
        tmp_path / "big", scaled_config({**BIG_SIZES, "hidden_size": 1024, "vocab_size": 4608, "intermediate_size": 1024}, config), demo
    )
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[:40] for text in json.loads((demo / "val_prompts.json").read_text())[:2]]
    options = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "load_format": "scale_up",
        "model_loader_extra_config": {"small": str(tmp_path / "small"), "seed": 3},
    }
    small, big = serve([(str(tmp_path / "small"), {}), (str(tmp_path / "big"), options)], prompts)
    for here, there, gaps in zip(small["greedy"], big["greedy"], small["gaps"], strict=True):
        first = next((i for i, pair in enumerate(zip(here, there)) if pair[0] != pair[1]), None)
        assert first is None or gaps[first] < 0.1, f"token {first} differs, and the two best were {gaps[first]:.3f} apart"
    assert big["accepted"] >= 12, "of 32 tokens"
    assert max(max(tokens) for tokens in big["sampled"]) < config["vocab_size"], "an added token was sampled at temperature 2"
