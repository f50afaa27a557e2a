"""The small model that is scaled up: its text and its split, a tiny training run, and the prompts made for it."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks.models import corpus, workloads
from benchmarks.models.__main__ import main
from benchmarks.models.constant_channel import constant_of
from benchmarks.models.demo import evaluate, model
from benchmarks.models.docstrings import dialogue, documented, summary
from benchmarks.models.generated import structured
from benchmarks.models.loader import load_small
from benchmarks.models.scale_up import HEAD, scaled_weights, tensor_shapes
from benchmarks.models.shapes import SHAPES, scaled_config
from benchmarks.models.small import small_config
from benchmarks.models.train import CONSTANT, LEAST_CONSTANT, TINY, make_tokenizer

PROMPTS = 8  # of each kind
SIZES = {  # a larger shape at small width
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of installed files: what of the standard library is held out, and as much again that is not."""
    folder, stdlib = tmp_path_factory.mktemp("text") / "site-packages", Path(sysconfig.get_paths()["stdlib"])
    counts = {True: 0, False: 0}
    for path in sorted(stdlib.rglob("*.py")):
        inner = path.relative_to(stdlib)
        held_out, left_out = corpus.Source(f"stdlib/{inner}", "").held_out, {"site-packages", "dist-packages", "test", "tests"}
        if counts[held_out] < 40 and not left_out & set(inner.parts) and (text := corpus.demo.read_source(path)):
            counts[held_out] += 1
            (folder / "stdlib" / inner).parent.mkdir(parents=True, exist_ok=True)
            (folder / "stdlib" / inner).write_text(text, encoding="utf-8")
    (folder / "some-1.0.dist-info").mkdir()
    about = "Some is a package that does nothing in particular, and this paragraph of its description says so at length.\n" * 3
    (folder / "some-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some\nSummary: Does nothing\n\n{about}")
    (folder / "some-1.0.dist-info" / "LICENSE.txt").write_text("You may do with it whatever you like. " * 20)
    return folder


@pytest.fixture(scope="module")
def documents(root) -> dict[str, list[corpus.Source]]:
    return corpus.find_documents([root], [root / "missing"], 1000)


@pytest.fixture(scope="module")
def small(root, tmp_path_factory) -> Path:
    """Folder of a model that the command has trained."""
    out = tmp_path_factory.mktemp("small")
    main(["train", "--tiny", "--out", str(out), "--device", "cpu", "--no-compile", "--source", str(root), "--prose"])
    return out


def test_the_split_is_disjoint_and_depends_on_names_alone(documents):
    training, held_out = corpus.split(documents)
    names = [{source.name for sources in half.values() for source in sources} for half in (training, held_out)]
    texts = [{source.text for sources in half.values() for source in sources} for half in (training, held_out)]
    assert names[0] and names[1] and not names[0] & names[1] and not texts[0] & texts[1]
    assert all(held_out[kind] and training[kind] for kind in workloads.CUTS), "all kinds lie on both sides"
    fewer = {kind: sources[::2] for kind, sources in documents.items()}
    for whole, half in zip(corpus.split(documents), corpus.split(fewer)):
        assert all(set(half[kind]) <= set(whole[kind]) for kind in whole), "a document's side depends on which others there are"


def test_names_do_not_hold_versions(documents):
    names = {source.name for kind in ("summary", "prose") for source in documents[kind]}
    assert {"some.dist-info/METADATA", "some.dist-info/LICENSE.txt"} <= names
    about = next(source.text for source in documents["summary"] if source.package == "some.dist-info")
    assert about.startswith("# some\n\nDoes nothing\n\nSome is a package")


SOURCE = '''# A comment.
"""Tools for spheres, which are round in every direction.

They have no corners.
"""

def volume(radius, unit: tuple = (1, 2)) -> float:
    """Compute the volume of a sphere of this radius, in cubic units.

    It grows with the third power.

    Parameters
    ----------
    radius : float

    >>> volume(0)
    0.0
    """

def area(radius):
    return radius ** 2

class Sphere:
    """A round thing that has a radius and a place, and nothing else."""
'''


def test_docstrings_become_dialogue_and_summary():
    things = list(documented("solids/sphere.py", SOURCE))
    assert [(thing.kind, thing.name) for thing in things] == [("module", "solids.sphere"), ("def", "volume"), ("class", "Sphere")]
    said = dialogue(things).split("\n\n")
    assert [part.split(": ")[0] for part in said] == ["User", "Assistant"] * 3 and "volume" in said[0]
    assert said[1::2] == [
        "Assistant: Compute the volume of a sphere of this radius, in cubic units.",
        "Assistant: It grows with the third power.",
        "Assistant: >>> volume(0)\n0.0",
    ]
    titles = [part for part in summary(things).split("\n\n") if part.startswith("#")]
    assert titles == ["# solids.sphere", "# volume", "# Sphere"] and ">>>" not in summary(things)


def test_structured_text_depends_on_its_name():
    assert structured("generated/7") == structured("generated/7") != structured("generated/8")


def test_the_mixture_has_its_shares():
    streams = {kind: torch.full((1000 * (i + 1),), i, dtype=torch.int16).numpy() for i, kind in enumerate(corpus.SHARES)}
    mixed = corpus.mix(streams)
    for i, (kind, share) in enumerate(corpus.SHARES.items()):
        assert float((mixed == i).mean()) == pytest.approx(share, abs=0.01), kind
    assert (mixed == 0).sum() == 1000, "code once"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiny", [False, True])
def test_every_shape_holds_the_small_model(shape, tiny):
    config = small_config(tiny)
    assert config["head_dim"] == 256 and config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    assert scaled_config(shape, config)["hidden_size"] == SHAPES[shape]["hidden_size"]


def test_training_lowers_both_losses(small):
    report = json.loads((small / "train.json").read_text())
    first, last = ([point for point in report["curve"] if point[0] == 1][index] for index in (0, -1))
    assert last[2] < first[2] - 0.5 and last[3] < first[3] - 0.3, (first, last)
    assert report["steps"] == [TINY.steps * 7 // 10, TINY.steps * 3 // 10]
    for kind, found in report["held_out"].items():
        assert found["loss"] < first[2] - 0.3, kind
        assert [sorted(depth, key=int) for depth in found["agreement"]] == [["1", "2", "4", "8"]] * evaluate.DEPTH
        assert all(depth["1"] <= depth["2"] <= depth["4"] <= depth["8"] for depth in found["agreement"]), kind
    assert set(report["held_out"]) >= set(workloads.CUTS)


def test_the_constant_channel_holds(small):
    state, config = load_small(small)
    assert constant_of(state) == CONSTANT
    assert set(state) == set(model.DemoModel(config).state_dict()) and {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all(found["least_constant"] > LEAST_CONSTANT for found in json.loads((small / "train.json").read_text())["held_out"].values())


@torch.no_grad()
def logits(net: model.DemoModel, head: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of the target and of the drafter's first depth, rows without their true tokens left out."""
    hidden = net.model(tokens, torch.float32)
    return [F.linear(state, head) for state in (hidden, net.draft(tokens, hidden, 1)[0][:, :-1])]


def test_the_trained_model_scales_up(small, tmp_path):
    """To the large shape by its configuration, as the command without a name does; in numbers at small width."""
    main(["--small", str(small), "--shape", "9b", "--out", str(tmp_path / "9b"), "--config-only"])
    assert json.loads((tmp_path / "9b" / "config.json").read_text())["hidden_size"] == 4096
    net, tokens = evaluate.load(small), torch.randint(512, (2, model.CHUNK), generator=torch.Generator().manual_seed(1))
    config = scaled_config(SIZES, net.config)
    assert tensor_shapes(net.state_dict(), net.config, config)[HEAD] == (1024, 256)
    weights = dict(scaled_weights(net.state_dict(), net.config, config, dtype=torch.float32))
    head, big = weights.pop(HEAD), model.DemoModel(config)
    big.load_state_dict(weights)
    for here, there in zip(logits(net, net.model.embed_tokens.weight, tokens), logits(big, head, tokens), strict=True):
        assert (there[..., :512] - here).abs().max() < 1e-4 * here.abs().max()
        assert bool((there[..., 512:] < -1000).all())


def test_another_model_may_use_the_tokenizer(small):
    assert make_tokenizer(small, {}, 512).get_vocab_size() == 512
    with pytest.raises(ValueError, match="has 512 tokens, the model 256"):
        make_tokenizer(small, {}, 256)


def read(folder: Path) -> dict[str, list[list[int]]]:
    """Token ids of every workload."""
    return {kind: [json.loads(line)["prompt_token_ids"] for line in (folder / f"{kind}.jsonl").open()] for kind in workloads.CUTS}


def test_workloads_are_held_out_prompts(documents, small, tmp_path):
    record = workloads.write_workloads(documents, small, tmp_path, PROMPTS)
    tokenizer, (training, held_out) = Tokenizer.from_file(str(small / "tokenizer.json")), corpus.split(documents)
    for kind, prompts in read(tmp_path).items():
        texts = [tokenizer.decode(ids) for ids in prompts]
        assert len(set(texts)) == PROMPTS
        assert all(len(ids) in workloads.TOKENS and max(ids) < 512 for ids in prompts)
        for text, name in zip(texts, record["workloads"][kind]["documents"], strict=True):
            assert any(text in source.text for source in held_out[kind] if source.name == name)
            assert not any(text in source.text for sources in training.values() for source in sources), text
    assert all(text.endswith("Assistant:") for text in (tokenizer.decode(ids) for ids in read(tmp_path)["dialogue"]))


def test_workloads_depend_on_the_seed_alone(documents, small, tmp_path):
    seeds = {"a": 0, "b": 0, "c": 1}
    for name, seed in seeds.items():
        workloads.write_workloads(documents, small, tmp_path / name, PROMPTS, seed)
    assert read(tmp_path / "a") == read(tmp_path / "b")
    assert all(read(tmp_path / "a")[kind] != read(tmp_path / "c")[kind] for kind in workloads.CUTS)
    with pytest.raises(ValueError, match=r"code: \d+ of 5000 prompts found"):
        workloads.write_workloads(documents, small, tmp_path / "d", 5000)


def test_prompts_that_repeat_training_text_are_left_out():
    lines = [f"    value_{i} = compute_the_value_of(argument_{i})" for i in range(4)]
    training = [corpus.Source("stdlib/a.py", "\n".join(["def f():", *lines[:3], "short = 1"]))]
    texts = ["\n".join(["def g():", *lines[1:]]), "\n".join(["def g():", lines[0], lines[3]]), "short = 1", "short = 2"]
    known = workloads.Known(texts, training)
    assert [known.repeats(text) for text in texts] == [True, False, True, False], "two of three lines; one of two; all; none"
