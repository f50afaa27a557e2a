"""The benchmark of sampling options without a GPU: the whole command on the demo model, and what it computes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.offline.options import CHECKPOINT
from benchmarks.sampling.options import ALL, NONE, holds, options
from benchmarks.sampling.runner import finish, with_ratios
from benchmarks.sampling.vocabulary import fill_vocabulary

ROOT = Path(__file__).resolve().parents[1]


def test_the_command_on_a_cpu(tmp_path):
    """As a user types it: every option passes its gate, nothing is timed."""
    command = [sys.executable, "-m", "benchmarks", "sampling", "--tiny", "--batches", "1", "--max-tokens", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    data = json.loads((tmp_path / "tiny-sampling.json").read_text())
    names = [row["option"] for row in data["rows"]]
    assert names[0] == NONE and names[-1] == ALL and {"penalties", "bad_words", "logprobs", "regex"} <= set(names)
    assert data["gates_failed"] == [] and not any("sample_ms" in row for row in data["rows"])
    assert json.loads(done.stdout.strip().splitlines()[-1])["gates_failed"] == []


def test_what_an_option_promises():
    """Each gate holds for one output and not for another."""
    words = {"self": [7, 8], "return": [9], "the ": [10, 11]}
    tokenizer = SimpleNamespace(encode=lambda word, add_special_tokens: words[word])
    found = {one.name: one.kept for one in options(0.8, tokenizer)}

    def said(tokens, text="", places=5):
        return SimpleNamespace(token_ids=tokens, text=text, logprobs=[range(places)] * len(tokens))

    assert found["logit_bias"](said([3, 500])) and not found["logit_bias"](said([3, 401]))
    assert found["allowed_token_ids"](said([3, 1023])) and not found["allowed_token_ids"](said([3, 1024]))
    assert found["bad_words"](said([7, 9000, 8])) and not found["bad_words"](said([1, 7, 8]))
    assert found["logprobs"](said([1])) and not found["logprobs"](said([1], places=4))
    assert found["regex"](said([1], "abc")) and not found["regex"](said([1], "a1"))
    assert found[ALL](said([3, 500], "abc")) and not found[ALL](said([3, 500], "a1"))
    assert holds([1, 2, 3], [2, 3]) and not holds([1, 2], [2, 3])


def test_ratios_are_to_no_option_of_the_same_batch():
    same = {"shape": "9b", "arm": "tree-8-d4", "failed": []}
    rows = [
        {**same, "B": batch, "option": option, "sample_ms": ms, "peak_mib": peak}
        for batch, option, ms, peak in [(1, NONE, 0.1, 50.0), (1, "min_p", 0.3, 51.0), (8, NONE, 1.0, 60.0), (8, "min_p", 1.1, 60.0)]
    ]
    assert [(row["added_ms"], row["added_mib"]) for row in with_ratios(rows)] == [(0.0, 0.0), (0.2, 1.0), (0.0, 0.0), (0.1, 0.0)]


def test_a_broken_promise_is_an_exit_status(tmp_path, capsys):
    row = {"arm": "tree-8-d4", "B": 1, "option": "regex", "sample_ms": 0.1, "failed": ["1 texts break the option's promise"]}
    env = dict.fromkeys(("device", "torch", "triton", "vllm", "commit"), "x")
    settings = SimpleNamespace(timed=True, out=tmp_path, device=torch.device("cpu"))
    assert finish(settings, {"env": env, "rows": [row], "seconds": 1.0}) == 1
    assert "regex: 1 texts break" in capsys.readouterr().out and (tmp_path / "sampling.json").is_file()


def test_a_tokenizer_as_large_as_the_model(tmp_path):
    """Every id has a text of its own, and no text is split otherwise."""
    from tokenizers import Tokenizer

    shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 20000}}))
    fill_vocabulary(tmp_path)
    small, large = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (CHECKPOINT, tmp_path))
    assert large.get_vocab_size() == 20000 and len(set(large.get_vocab().values())) == 20000
    text = (ROOT / "README.md").read_text()
    assert large.encode(text).ids == small.encode(text).ids
