"""The end-to-end benchmark without a GPU: what turns steps and records into numbers, and the whole command on the demo model."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.models.shapes import SHAPES
from benchmarks.offline import arm as arm_process
from benchmarks.offline import arms, launch, memory, path, texts, timeline, trace, warm
from benchmarks.offline.arms import Arm, engine_arguments, engine_name, engines
from benchmarks.offline.choose import best_of, chosen_ratios, slower_points, tree_settings, with_ratios
from benchmarks.offline.engine import refusal, set_drafts
from benchmarks.offline.job import Job, Record
from benchmarks.offline.launch import run_arms, share_of
from benchmarks.offline.marks import grid, offline_marks
from benchmarks.offline.options import CHECKPOINT, DEMO_MODEL, WORKLOADS, Options, add_arguments
from benchmarks.offline.parts import Round, Span, medians, parts_of, start_parts, stop_parts
from benchmarks.offline.plots import draw
from benchmarks.offline.prompts import groups, read_workload
from benchmarks.offline.rounds import Step, Window, joined, window
from benchmarks.offline.rows import is_complete, not_measured, point_rows, unequal_settings
from benchmarks.offline.rows import memory_rows as rows_of_memory
from benchmarks.offline.runner import gates_failed, make_jobs
from benchmarks.offline.tables import chosen_table, equality_table, looping, pivot

ROOT = Path(__file__).resolve().parents[1]


# -- the window that is timed ------------------------------------------------------------------------------------------


def test_window_leaves_out_prefill_and_the_last_rounds():
    """Two requests: the second's prompt takes longer, the first ends first."""
    steps = [
        Step(1.0, {0: [7]}),
        Step(2.0, {0: [7, 7, 7], 1: [8]}),  # both have begun: the clock starts, these tokens do not count
        Step(2.5, {0: [7, 7], 1: [8]}),
        Step(3.0, {0: [7], 1: [8, 8, 8, 8]}),  # the clock stops
        Step(9.0, {0: [7], 1: [8]}, frozenset({0})),
        Step(20.0, {1: [8]}, frozenset({1})),
    ]
    found = window(steps, 2)
    assert found == Window(tokens=8, rounds=2, served=4, seconds=1.0)
    assert (found.tokens_per_s, found.rounds_per_s, found.mat) == (8.0, 2.0, 2.0)


@pytest.mark.parametrize("last", [0, 1])
def test_no_window_without_a_whole_round(last):
    """A request that ends in its first or second step."""
    steps = [Step(float(i), {0: [7]}) for i in range(last)]
    assert window([*steps, Step(9.0, {0: [7]}, frozenset({0}))], 1) is None
    assert window([Step(0.0, {0: [7]}), Step(1.0, {0: [7]})], 2) is None, "the second request never began"


def test_batches_of_a_point_are_one_window():
    assert joined([Window(8, 2, 4, 1.0), None, Window(2, 2, 2, 3.0)]) == Window(10, 4, 6, 4.0)
    assert joined([None]) is None


def test_groups_of_prompts():
    prompts = [[1]] * 9
    assert groups(prompts, 4, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(prompts, 8, 3) == [list(range(8))], "a whole batch at least"
    assert groups(prompts, 4, 99) == [[0, 1, 2, 3], [4, 5, 6, 7]], "whole batches only"
    with pytest.raises(ValueError, match="holds 9 prompts, fewer than 16"):
        groups(prompts, 16, 8)


def test_workload_files(tmp_path):
    file = tmp_path / "code.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2, 3], "other": 1}\n\n{"prompt_token_ids": [4]}\n')
    assert read_workload(file, 9) == [[1, 2, 3], [4]]
    assert read_workload(file, 2) == [[4]]
    with pytest.raises(ValueError, match="none of at most 0 tokens"):
        read_workload(file, 0)
    file.write_text('{"prompt_token_ids": [1]}\n{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"code\.jsonl:2: not an object with"):
        read_workload(file, 9)


# -- arms and options --------------------------------------------------------------------------------------------------


def test_arms_by_name():
    tree = Arm.parse("tree-16-d5-k3-v4096")
    assert (tree.nodes, tree.num_drafts, tree.bole) == (16, 15, {"topk": 3, "max_depth": 5, "draft_vocab": 4096})
    assert Arm.parse("serial-8-d4").bole == {"topk": 4, "max_depth": 4, "draft_vocab": 0, "verify": "serial"}
    assert {Arm.parse(name).name for name in (*arms.DEFAULT, *arms.QUICK, *arms.TINY)} >= set(arms.TINY)
    for wrong in ("tree", "tree-16", "chain-", "plain-2"):
        with pytest.raises(ValueError, match="no arm"):
            Arm.parse(wrong)
    assert arms.select("plain,chain,tree-8-d2,chain-3", ()) == ("plain", "chain-2", "chain-3", "chain-5", "chain-7", "tree-8-d2")


def grouped(*names: str) -> list[list[str]]:
    return [[arm.name for arm in group] for group in engines([Arm.parse(name) for name in names])]


def test_arms_that_differ_in_the_number_of_drafts_share_an_engine():
    assert grouped("tree-8-d4", "plain", "chain-5", "tree-9-d4") == [["tree-8-d4", "tree-9-d4"], ["plain"], ["chain-5"]]
    assert grouped("chain-5", "chain-2") == [["chain-5", "chain-2"]]
    assert grouped("tree-8-d4", "serial-16-d4", "tree-16-d4-k3", "tree-16-d4-v99") == [
        ["tree-8-d4"], ["serial-16-d4"], ["tree-16-d4-k3"], ["tree-16-d4-v99"]
    ], "another setting is another engine"  # fmt: skip
    assert grouped("tree-8-d4", "tree-16-d6", "tree-8-d5", "tree-16-d7", "tree-9-d2") == [
        ["tree-8-d4", "tree-16-d6", "tree-9-d2"], ["tree-8-d5", "tree-16-d7"]
    ], "one depth for a number of nodes"  # fmt: skip
    names = [engine_name(group) for group in engines([Arm.parse(name) for name in arms.DEFAULT])]
    assert names == ["plain", "chain-2+3+5+7", "tree-16-d6+32-d8-v32768", "serial-8-d4+16-d6-v32768"]
    assert len(engines([Arm.parse(name) for name in arms.QUICK])) == 4 and len(grouped(*arms.TINY)) == 3


def arguments(*names: str, max_num_seqs: int = 16, **bole) -> dict:
    return engine_arguments([Arm.parse(name) for name in names], bole, max_num_seqs)


def test_engine_arguments_of_one_arm():
    assert arguments("plain", debug=True) == {}
    assert arguments("chain-5", debug=True) == {"speculative_config": {"method": "mtp", "num_speculative_tokens": 5}}
    serial = arguments("serial-8-d4", topk=9, debug=True)
    assert serial["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 7}
    own = {"topk": 4, "max_depth": 4, "draft_vocab": 0, "verify": "serial"}
    assert serial["additional_config"]["bole"] == {**own, "debug": True}, "its own settings come first"


def test_engine_arguments_of_several_arms():
    """Drafts for the longest, a schedule that names every number once and ends as late as it can, a depth for every number of nodes."""
    chain = arguments("chain-2", "chain-7", "chain-3")
    assert chain == {
        "speculative_config": {
            "method": "mtp", "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 14, 2], [15, 15, 7], [16, 16, 3]]
        }
    }  # fmt: skip
    tree = arguments("tree-16-d6-v99", "tree-8-d4-v99", max_num_seqs=2, max_depth=1)
    assert tree["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 1, 15], [2, 2, 7]]
    assert tree["additional_config"]["bole"] == {"topk": 4, "max_depth": [[8, 4], [16, 6]], "draft_vocab": 99}
    with pytest.raises(ValueError, match=r"3 arms share an engine \(2, 7, 3 drafts\).* max_num_seqs is 2: raise it, or choose fewer arms"):
        arguments("chain-2", "chain-7", "chain-3", max_num_seqs=2)


def test_schedules_are_ones_that_vllm_takes():
    """Every number of drafts is in the list that the scheduler looks up, so vLLM captures graphs for it."""
    pytest.importorskip("vllm")
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for group in engines([Arm.parse(name) for name in arms.DEFAULT]):
        if len(group) > 1:
            speculative = engine_arguments(group, {}, 16)["speculative_config"]
            schedule = speculative["num_speculative_tokens_per_batch_size"]
            lookup = build_dynamic_sd_schedule_lookup(schedule, 16, speculative["num_speculative_tokens"])
            assert sorted(set(lookup[1:])) == sorted(arm.num_drafts for arm in group)


def fake_engine(lookup: list[int] | None, in_process: bool = True) -> SimpleNamespace:
    core = SimpleNamespace(scheduler=SimpleNamespace(dynamic_sd_lookup=lookup))
    speculative = SimpleNamespace(uses_dynamic_speculative_decoding=lambda: lookup is not None)
    client = SimpleNamespace(engine_core=core) if in_process else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client, vllm_config=SimpleNamespace(speculative_config=speculative)))


def test_an_arm_sets_its_drafts_for_every_batch_size():
    lookup = [0, 2, 2, 7]
    set_drafts(fake_engine(lookup), 5)
    assert lookup == [5, 5, 5, 5], "in place: the scheduler keeps the list"
    set_drafts(fake_engine(None, in_process=False), 5)
    with pytest.raises(RuntimeError, match="leave VLLM_ENABLE_V1_MULTIPROCESSING at 0"):
        set_drafts(fake_engine(lookup, in_process=False), 5)


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Options.from_args(parser.parse_args(words))


def test_file_name_tells_a_full_run():
    """Whoever reads marks takes the newest offline*.json, so only a complete run of every mark's points may write one."""
    full = Options()
    assert full.covers_marks and full.results_name(complete=True) == "offline"
    assert full.results_name(complete=False) == "partial-offline"
    less = ({"shapes": ("9b",)}, {"batches": (1, 8)}, {"temperatures": (0.0,)}, {"arms": arms.QUICK}, {"workloads": ("code",)})
    for other in (*less, {"max_num_seqs": 8}, {"parts_batches": (1,)}):
        assert Options(**other).results_name(complete=True) == "partial-offline"
    assert Options(tiny=True).results_name(complete=True) == "tiny-offline"
    small = {"shapes": ("small",), "prompts": 64, "batches": (16,), "temperatures": (0.0, 0.8)}
    assert Options(**small).results_name(complete=True) == "equality"
    for other in ({"prompts": 63}, {"temperatures": (0.0,)}, {"max_tokens": 255}, {"arms": ("plain",)}):
        assert Options(**{**small, **other}).results_name(complete=True) == "partial-equality"


def test_every_engine_gets_the_same_arguments_but_its_own():
    options = parse("--tiny", "--compilation", '{"mode": 0}', "--bole", '{"debug": true}')
    jobs = make_jobs(options, Path("/nowhere"), Path("/nowhere"), "cpu")
    assert [job.arm for job in jobs] == list(arms.TINY)
    own = {"speculative_config", "additional_config"}
    shared = [{name: value for name, value in job.engine.items() if name not in own} for job in jobs]
    assert all(one == shared[0] for one in shared)
    assert shared[0]["compilation_config"] == {"mode": 0} and shared[0]["enable_prefix_caching"] is False
    plain, chain, tree, smaller = (job.engine for job in jobs)
    assert tree == smaller and not own & plain.keys() and "additional_config" not in chain
    assert tree["additional_config"]["bole"] == {"debug": True, "topk": 4, "draft_vocab": 0, "max_depth": [[5, 3], [8, 4]]}
    assert len({job.digest for job in jobs}) == 4, "arms of one engine have records of their own"


def test_arms_of_an_engine_are_measured_after_each_other():
    options = parse("--tiny", "--arms", "tree-8-d4,plain,chain-3,tree-5-d3")
    jobs = make_jobs(options, Path("/nowhere"), Path("/nowhere"), "cpu")
    assert [job.arm for job in jobs] == ["tree-8-d4", "tree-5-d3", "plain", "chain-3"]
    with pytest.raises(SystemExit, match=r"--arms: 4 arms share an engine .* raise it"):
        make_jobs(parse("--tiny", "--arms", "chain"), Path("/nowhere"), Path("/nowhere"), "cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "7b"], "no '7b'"),
        (["--arms", "tree-8"], "no arm 'tree-8'"),
        (["--batches", "1,x"], "numbers with commas"),
        (["--batches", "4", "--max-num-seqs", "2"], "less than the largest batch"),
        (["--model", "/nowhere"], "holds no config.json"),
        (["--quick", "--full"], "exclude each other"),
        (["--bole", "[1]"], "a JSON object"),
    ],
)
def test_options_that_cannot_work(words, message):
    with pytest.raises(SystemExit, match=message):
        parse("--tiny", *words)


# -- the path that served ----------------------------------------------------------------------------------------------


def test_an_arm_must_be_served_by_its_own_path():
    plain, chain, tree, serial = (Arm.parse(name) for name in ("plain", "chain-3", "tree-8-d4", "serial-8-d4"))
    stock = {"worker": "vllm.v1.worker.Worker", "model": "vllm.m.M", "model_state": "vllm.s.S", "speculator": "vllm.p.P"}
    ours = {name: f"bole_vllm.x.{name}" for name in stock}
    assert path.wrong_classes(chain, stock) == [] and path.wrong_classes(tree, ours) == []
    assert path.wrong_classes(plain, {**stock, "model_state": ours["model_state"]}) == [
        "model_state is bole_vllm.x.model_state: stock vLLM expected"
    ]
    assert len(path.wrong_classes(tree, stock)) == 4
    assert path.wrong_verify(tree, "closed_form") == path.wrong_verify(serial, "serial") == path.wrong_verify(plain, None) == []
    assert path.wrong_verify(tree, "serial") and path.wrong_verify(serial, None)


def test_rounds_must_be_of_the_arm_s_size():
    plain, chain, tree = (Arm.parse(name) for name in ("plain", "chain-3", "tree-8-d4"))
    assert path.wrong_rounds(plain, {}) == []
    assert path.wrong_rounds(chain, {"drafts": 10, "draft_tokens": 30}) == []
    assert path.wrong_rounds(chain, {"drafts": 0, "draft_tokens": 0}) == ["no round had drafts"]
    assert path.wrong_rounds(chain, {"drafts": 10, "draft_tokens": 10}) == ["1.00 drafts a round"]
    rows = {"rows": 12, "tree_rows": 10}  # two rows of their roots alone
    assert path.wrong_rounds(tree, {**rows, "nodes": 82}) == []
    assert path.wrong_rounds(tree, {**rows, "nodes": 42}) == ["4.00 nodes a tree instead of 8"]
    assert path.wrong_rounds(tree, {"rows": 12, "tree_rows": 0, "nodes": 12}) == ["no tree was verified"]
    assert path.change({"nodes": 5}, {"nodes": 7, "rows": 1}) == {"nodes": 2, "rows": 1}


# -- what was emitted --------------------------------------------------------------------------------------------------


def scored(tokens: list[int], *top: dict[int, float], greedy: bool = True) -> dict:
    """Scores whose largest logit lies between 8 and 16, where bfloat16 numbers are 1/16 apart."""
    return {
        "tokens": tokens,
        "top": [[list(pair) for pair in place.items()] for place in top],
        "ulp": [1 / 16] * len(top),
        "greedy": greedy,
    }


SURE = {1: 9.0, 2: 3.0}


@pytest.mark.parametrize(
    ("top", "verdict"),
    [
        # a tie is four units
        ({5: 9.25, 6: 9.0}, "tie"),
        ({5: 9.0, 6: 9.0}, "tie"),
        ({5: 9.3125, 6: 9.0}, "beyond"),
        (None, "unjudged"),
        ({5: 12.0, 7: 9.0}, "beyond"),  # the other token is not among the largest: below the last of them
        ({5: 9.25, 7: 9.0}, "unjudged"),  # below 9.0, nobody knows how far
    ],
)
def test_partings_are_judged_by_plain_decoding_s_logits(top, verdict):
    plain, arm = [[1, 5, 3], [4, 4, 4]], [[1, 6, 9], [4, 4, 4]]
    (found,) = texts.partings(plain, arm, None if top is None else [scored(plain[0], SURE, top)])
    assert (found.prompt, found.position, found.verdict) == (0, 1, verdict)
    counts = texts.equality([found], 2)
    assert counts["equal"] == 1 and counts[verdict] == 1 and sum(counts[name] for name in ("tie", "beyond", "unjudged")) == 1


def test_a_sampled_token_is_judged_by_its_scores_alone():
    """Noise may lift any token, so nothing is known of one that was not recorded; recorded ones are judged by the scale of the logits."""
    for top, verdict in (({5: 1.0, 6: 0.75}, "tie"), ({5: 1.0, 6: 0.5}, "beyond"), ({5: 12.0, 7: 9.0}, "unjudged")):
        (found,) = texts.partings([[1, 5, 3]], [[1, 6, 3]], [scored([1, 5, 3], SURE, top, greedy=False)])
        assert found.verdict == verdict


def test_equality_has_marks_of_its_own():
    counts = {"equal": 3, "tie": 1, "beyond": 0, "unjudged": 0}
    rows = [{"shape": "small", "family": "tree", "temperature": t, "equality": counts} for t in (0.0, 0.8)]
    assert [(mark.value, mark.ok, mark.note) for mark in offline_marks(rows, [], [])] == [
        (0, True, "equal 3, tie 1, beyond 0, unjudged 0")
    ] * 2
    rows[1]["equality"] = {**counts, "unjudged": 2}
    assert [mark.ok for mark in offline_marks(rows, [], [])] == [True, False]
    assert [mark.value for mark in offline_marks([rows[0]], [], [])] == [0, None], "nothing was sampled"


def test_logits_of_another_text_do_not_judge():
    """Recorded in a batch in which an earlier token already differed."""
    other = [scored([2, 5, 3], SURE, {5: 99.0, 6: 0.0})]
    (found,) = texts.partings([[1, 5, 3]], [[1, 6, 3]], other)
    assert found.verdict == "unjudged"


def test_repetition_is_flagged():
    rng = range(100, 164)
    fresh, loop = list(rng), [1, 2, 3, 4] * 16
    assert texts.repetition([fresh, fresh]) == {"distinct_4grams": 1.0, "looping_share": 0.0, "looping": False}
    found = texts.repetition([fresh, loop])
    assert found["looping_share"] == 0.5 and found["looping"] is True and found["distinct_4grams"] == round((61 + 4) / 122, 3)


# -- records to rows ---------------------------------------------------------------------------------------------------


def sample(speed: float, workload: str = "code", batch: int = 1, wrong: tuple[str, ...] = ()) -> dict:
    return {"workload": workload, "B": batch, "temperature": 0.0, "tokens_per_s": speed, "mat": speed / 10, "rounds_per_s": 10.0,
            "counters": {}, "wrong_path": list(wrong)}  # fmt: skip


def job(arm: str, **changes) -> Job:
    fields = {"shape": "small", "arm": arm, "engine": {}, "weights": "w", "scale_up": False, "prompts": {"code": [[1]]},
              "points": [("code", 1, 0.0)], "repeats": 3, "max_tokens": 4, "warmup_tokens": 1, "requests": 1, "parts_batches": [],
              "trace": None, "commit": "c", "device": "d"}  # fmt: skip
    return Job(**{**fields, **changes})


def test_the_median_of_the_runs_counts():
    record = Record("x", "9b", "chain-3", samples=[sample(30.0), sample(10.0), sample(20.0), sample(5.0, batch=2)])
    first, second = point_rows([record])
    assert (first["tokens_per_s"], first["mat"], first["runs"], first["B"]) == (20.0, 2.0, 3, 1)
    assert first["tokens_per_s_runs"] == [30.0, 10.0, 20.0] and first["family"] == "chain"
    assert (second["tokens_per_s"], second["runs"], second["B"]) == (5.0, 1, 2)


def test_one_wrong_run_spoils_a_point():
    record = Record("x", "9b", "tree-8-d4", samples=[sample(30.0), sample(10.0, wrong=("no tree was verified",))])
    (row,) = point_rows([record])
    assert row["status"] == "wrong path" and row["reason"] == "no tree was verified"
    assert gates_failed([row], []) == ["9b tree-8-d4 code B=1: no tree was verified"]
    (row,) = with_ratios([row])
    assert not row["chosen"] and best_of([row], "tree") == {}


def test_texts_are_compared_with_plain_of_the_same_point():
    plain = Record("x", "9b", "plain", samples=[sample(1.0)], texts={"code/1/0": [[1, 2]]})
    plain.scores = {"code/0": [scored([1, 2], SURE, {2: 9.0, 3: 1.0})]}
    tree = Record("x", "9b", "tree-8-d4", samples=[sample(2.0)], texts={"code/1/0": [[1, 3]]})
    other = Record("x", "27b", "tree-8-d4", samples=[sample(2.0)], texts={"code/1/0": [[1, 3]]})
    rows = with_ratios(point_rows([plain, tree, other]))
    assert "equality" not in rows[0] and "equality" not in rows[2], "another shape's plain decoding is no reference"
    assert rows[1]["equality"]["beyond"] == 1
    assert gates_failed(rows, []) == ["9b tree-8-d4 code B=1: 1 prompts part from plain decoding beyond a tie"]
    assert equality_table(rows).loc[("9b", 0.0, "tree-8-d4"), "beyond"] == 1
    plain.samples, plain.texts = [{**sample(1.0), "temperature": 0.8}], {"code/1/0.8": [[1, 2]]}
    for arm in ("chain-3", "tree-8-d4"):
        seeded = Record("x", "9b", arm, samples=plain.samples, texts={"code/1/0.8": [[1, 3]]})
        assert ("equality" in point_rows([plain, seeded])[1]) == (arm != "chain-3"), "a chain's samples are others"


def test_what_is_missing_is_said():
    jobs = [job("plain"), job("chain-3"), job("tree-8-d20"), job("chain-5")]
    records = [
        Record("x", "small", "plain", "ok", samples=[sample(1.0)] * 3),
        Record("x", "small", "chain-3", "partial", "the time budget is spent", samples=[sample(1.0)]),
        Record("x", "small", "tree-8-d20", "refused", "too deep"),
        Record("x", "small", "chain-5", "error", "out of memory", failed=[{"what": "parts", "reason": "no round"}]),
    ]
    found = [(one["arm"], one["what"], one["reason"]) for one in not_measured(jobs, records)]
    assert found == [
        ("chain-3", "all 3 runs of code/1/0", "partial: the time budget is spent"),
        ("tree-8-d20", "all points", "refused: too deep"),
        ("chain-5", "all points", "error: out of memory"),
        ("chain-5", "parts", "no round"),
    ]
    assert not is_complete(jobs, records)
    assert is_complete([jobs[0], jobs[2]], [records[0], records[2]]), "what the engine refuses is answered"


def test_engines_that_are_not_comparable_are_named():
    settings = {"async_scheduling": True, "enforce_eager": False, "compilation_mode": "NONE", "cudagraph_mode": "FULL"}
    plain = Record("x", "9b", "plain", engine=settings)
    eager = Record("x", "9b", "tree-8-d4", engine={**settings, "cudagraph_mode": "NONE"})
    refused = Record("x", "9b", "tree-8-d20")
    found = unequal_settings([plain, eager, refused, Record("x", "27b", "tree-8-d4", engine=settings)])
    assert found == ["9b tree-8-d4: cudagraph_mode NONE, plain decoding FULL"]


def test_a_record_is_continued_by_an_equal_job_only(tmp_path):
    file, first = tmp_path / "r.json", job("plain")
    record = Record.open(file, first)
    record.samples.append(sample(1.0))
    record.save(file)
    assert Record.open(file, job("plain")).runs(("code", 1, 0.0)) == 1
    moved = job("plain", engine={"model": "/elsewhere"}, trace=None)
    assert Record.open(file, moved).runs(("code", 1, 0.0)) == 1
    for other in ({"max_tokens": 5}, {"engine": {"dtype": "bfloat16"}}, {"weights": "v"}, {"commit": "d"}, {"trace": "/tmp"}):
        assert Record.open(file, job("plain", **other)).samples == []
    first.write(tmp_path / "j.json")
    assert Job.read(tmp_path / "j.json") == first
    file.write_text(file.read_text()[:-5])
    assert Record.open(file, first).samples == [], "cut off"


# -- baselines, settings, marks ----------------------------------------------------------------------------------------


def row(arm: str, speed: float, workload: str = "code", batch: int = 1, shape: str = "9b", **fields) -> dict:
    return {"shape": shape, "workload": workload, "B": batch, "temperature": 0.0, "arm": arm, "family": Arm.parse(arm).family,
            "status": "ok", "tokens_per_s": speed, "mat": 1.0, "rounds_per_s": 1.0, **fields}  # fmt: skip


def test_one_setting_for_all_workloads_of_a_batch_size():
    """The arm of the best geometric mean, though it is the best at neither workload; another one at another batch size."""
    rows = [
        row("tree-8-d4", 10.0), row("tree-8-d4", 40.0, "summary"),
        row("tree-16-d5", 30.0), row("tree-16-d5", 30.0, "summary"),
        row("tree-32-d8", 35.0), row("tree-32-d8", 20.0, "summary"),
        row("tree-8-d4", 50.0, batch=8), row("tree-8-d4", 50.0, "summary", batch=8), row("tree-16-d5", 99.0, batch=8),
        row("plain", 10.0), row("plain", 60.0, "summary"),
    ]  # fmt: skip
    assert tree_settings(rows) == {("9b", 1, 0.0): "tree-16-d5", ("9b", 8, 0.0): "tree-8-d4"}, "an arm without a workload is not chosen"
    rows = with_ratios(rows)
    assert chosen_ratios(rows, "plain") == {("9b", "code", 1, 0.0): 3.0, ("9b", "summary", 1, 0.0): 0.5}
    assert chosen_table(rows).set_index("B").loc[1, "x plain"] == pytest.approx(1.5**0.5)


def test_the_fastest_chain_of_each_point_is_the_baseline():
    rows = [
        row("chain-2", 20.0), row("chain-7", 25.0), row("chain-2", 30.0, batch=2), row("chain-7", 5.0, batch=2),
        row("chain-3", 99.0, status="wrong path"), row("tree-8-d4", 50.0), row("tree-8-d4", 24.0, batch=2), row("serial-8-d4", 25.0),
    ]  # fmt: skip
    rows = with_ratios(rows)
    trees = [one for one in rows if one["family"] == "tree"]
    assert [(one["best_chain"], one["x_best_chain"]) for one in trees] == [("chain-7", 2.0), ("chain-2", 0.8)]
    assert trees[0]["x_best_serial"] == 2.0 and "x_best_serial" not in trees[1] and "x_plain" not in trees[0]
    assert slower_points(rows) == [
        {"shape": "9b", "workload": "code", "B": 2, "temperature": 0.0, "arm": "tree-8-d4", "chosen": True, "baseline": "best chain",
         "ratio": 0.8}
    ]  # fmt: skip


def full_run() -> tuple[list[dict], list[dict], list[dict]]:
    """(rows, parts, memory) in which every mark is just reached."""
    speeds = {"plain": 100.0, "chain-2": 200.0, "chain-3": 240.0, "chain-5": 239.0, "chain-7": 150.0, "serial-16-d5": 200.0,
              "tree-16-d5": 300.0, "tree-32-d8": 280.0}  # fmt: skip
    points = grid(0.0) + grid(0.8)
    rows = [row(arm, speed, workload, batch, shape, temperature=t) for shape, workload, batch, t in points for arm, speed in speeds.items()]
    part = {"shape": "9b", "status": "ok", "workload": "code", "arm": "tree-16-d5", "verify_ms": 7.0, "draft_ms": 2.5}
    parts = [
        {**part, "B": 1, "round_ms": 10.0, "arm": "tree-32-d8"},
        {**part, "B": 1, "round_ms": 10.0, "verify_ms": 7.0},
        {**part, "B": 16, "round_ms": 10.5},
    ]
    parts[1]["verify_ms"] = 10.0 - 2.5 - 0.6
    engine = {"kv_tokens": 980, "kv_bytes": 980, "mtp_bytes": 10, "spec_blocks": 0, "max_num_seqs": 16}
    memory_rows = []
    for shape in ("9b", "27b"):
        plain = {**engine, "shape": shape, "arm": "plain", "kv_tokens": 1020, "kv_bytes": 1010, "mtp_bytes": 0}
        memory_rows += memory.compare([plain, {**engine, "shape": shape, "arm": "tree-16-d5"}])
    return with_ratios(rows), parts, memory_rows


def test_marks_of_a_run_that_reaches_them():
    marks = offline_marks(*full_run())
    assert [mark.name for mark in marks if not mark.ok] == []
    assert [round(mark.value, 6) for mark in marks] == [*[3.0, 1.25, 1.5] * 2, 25.0, 0.6, 1.0, 0.98]
    assert len({mark.name for mark in marks}) == 10


def change(rows: list[dict], arm: str, factor: float, **labels) -> list[dict]:
    changed = [dict(one) for one in rows]
    for one in changed:
        if one["arm"] == arm and all(one[key] == value for key, value in labels.items()):
            one["tokens_per_s"] *= factor
    return with_ratios(changed)


@pytest.mark.parametrize(
    ("arm", "factor", "labels", "missed"),
    [
        ("tree-16-d5", 0.9, {"shape": "27b", "B": 4, "workload": "code", "temperature": 0.0}, [0, 1, 2]),
        ("plain", 1.01, {}, [0, 3]),
        ("chain-5", 1.2, {"workload": "summary", "temperature": 0.8}, [4]),  # it becomes the best chain there
        ("serial-16-d5", 1.01, {"B": 1, "temperature": 0.0}, [2]),
    ],
)
def test_one_slower_point_misses_the_geometric_mean(arm, factor, labels, missed):
    rows, parts, memory_rows = full_run()
    marks = offline_marks(change(rows, arm, factor, **labels), parts, memory_rows)
    assert [index for index, mark in enumerate(marks) if not mark.ok] == missed


def test_what_was_not_measured_is_not_reached():
    """No rows; a point without an arm of the baseline; a chain length that nobody measured; other parts and engines."""
    rows, parts, memory_rows = full_run()
    for found in (offline_marks([], [], []), offline_marks(with_ratios([{**one, "status": "wrong path"} for one in rows]), parts, [])):
        assert len(found) == 10 and all(mark.value is None and not mark.ok for mark in found)
    point = {"shape": "9b", "workload": "code", "B": 8, "temperature": 0.0}
    lost = [one for one in rows if one["arm"] != "chain-7" or any(one[key] != value for key, value in point.items())]
    marks = offline_marks(with_ratios(lost), parts, memory_rows)
    assert [index for index, mark in enumerate(marks) if mark.value is None] == [1]
    assert "1 of 32 points lack an arm" in marks[1].note
    no_serial = with_ratios([one for one in rows if one["family"] != "serial"])
    marks = offline_marks(no_serial, parts[:1], memory_rows[:2])
    assert [index for index, mark in enumerate(marks) if mark.value is None] == [2, 5, 6, 7, 8, 9]


def test_parts_of_the_setting_that_is_chosen():
    """At 16 requests, which were not timed, the setting of 8 counts."""
    rows, parts, memory_rows = full_run()
    rows = change(rows, "tree-32-d8", 1.5, B=8)
    marks = offline_marks(rows, [*parts, {**parts[2], "arm": "tree-32-d8", "round_ms": 11.0}], memory_rows)
    assert (marks[8].value, marks[8].note, marks[8].ok) == (1.5, "tree-32-d8", False)
    assert marks[7].note == "tree-16-d5"


def test_looping_text_is_named():
    rows, parts, memory_rows = full_run()
    rows[0] |= {"looping": True, "distinct_4grams": 0.2}
    assert looping(rows) == ["9b code B=1 T=0 plain: 0.2 of 4-grams distinct"]
    for one in rows:
        one |= {"looping": one["workload"] == "code", "distinct_4grams": 0.2}
    assert offline_marks(rows, parts, memory_rows)[0].note == "8 of 32 points hold looping text"


def test_memory_against_a_plain_engine_with_the_head():
    """Plain: 1000 bytes, 2000 tokens. The head takes 100; a tree engine keeps 450 of the 900, at one token a byte."""
    rows = memory.compare([
        {"arm": "plain", "kv_tokens": 2000, "kv_bytes": 1000, "mtp_bytes": 0, "spec_blocks": 0},
        {"arm": "chain-3", "kv_tokens": 225, "kv_bytes": 900, "mtp_bytes": 100, "spec_blocks": 3},
        {"arm": "tree-8-d4", "kv_tokens": 450, "kv_bytes": 450, "mtp_bytes": 100, "spec_blocks": 0},
    ])  # fmt: skip
    assert [one["x_plain_mtp"] for one in rows] == [2.2222, 0.25, 0.5]
    assert [one["x_plain"] for one in rows] == [1.0, 0.1125, 0.225]
    alone = Record("x", "9b", "tree-8-d4", memory={"kv_tokens": 450, "kv_bytes": 450, "mtp_bytes": 100, "spec_blocks": 0})
    assert rows_of_memory([alone])[0]["x_plain_mtp"] is None


def test_one_row_of_memory_for_an_engine():
    """With the name of all its arms, from the first of them that knows; engines of other shapes are others; none where none started."""
    known = {"kv_tokens": 450, "kv_bytes": 450, "mtp_bytes": 100, "spec_blocks": 0}
    records = [
        Record("x", "9b", "plain", memory={**known, "mtp_bytes": 0}),
        Record("x", "9b", "tree-8-d4-v99", "error"),
        Record("x", "9b", "tree-16-d6-v99", memory=known),
        Record("x", "9b", "chain-3", "error"),
        Record("x", "27b", "tree-8-d4-v99", memory={**known, "kv_tokens": 7}),
        Record("x", "27b", "tree-16-d6-v99", memory=known),
    ]
    found = rows_of_memory(records)
    assert [(one["shape"], one["arm"], one["kv_tokens"]) for one in found] == [
        ("9b", "plain", 450), ("9b", "tree-8-d4+16-d6-v99", 450), ("27b", "tree-8-d4+16-d6-v99", 7)
    ]  # fmt: skip
    marks = offline_marks([], [], [{**one, "shape": shape, "max_num_seqs": 16} for one in found[:2] for shape in ("9b", "27b")])
    assert marks[-1].note == "tree-8-d4+16-d6-v99" and marks[-1].value is not None


def test_tables_and_pictures(tmp_path):
    rows, parts, memory_rows = full_run()
    table = pivot(rows, "tokens_per_s")
    assert table.loc[("27b", 0.0, "code", 4), "chain-3"] == 240.0 and next(iter(table.columns)) == "plain"
    filled = [{"sample_ms": 0.1, "commit_ms": 0.1, "prepare_ms": 0.1, "other_ms": 0.1, **part} for part in parts]
    pictures = draw(rows, filled, memory_rows, tmp_path, "offline", "title")
    names = {f"throughput-{shape}{how}" for shape in ("9b", "27b") for how in ("", "-sampled")} | {"round", "memory"}
    assert {file.name for file in pictures} == {f"offline-{name}.png" for name in names}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)


# -- parts of a round --------------------------------------------------------------------------------------------------


def test_parts_add_up_to_the_round():
    """Logits inside sampling are the target's; the forward inside execute_model is not preparation. Seconds in, milliseconds out."""
    spans = [
        Span("prepare", 0.0, 3.0, [Span("verify", 1.0, 3.0, [Span("verify", 1.5, 2.5)])]),
        Span("sample", 3.0, 5.0, [Span("verify", 3.5, 4.0)]),
        Span("commit", 5.0, 5.25),
        Span("draft", 6.0, 7.0),
    ]
    found = parts_of(Round(0.0, 1, spans), Round(8.0, 1))
    assert found == {"prepare": 1000, "verify": 2500, "sample": 1500, "commit": 250, "draft": 1000, "other": 1750, "round": 8000}
    slower = {name: 3 * value for name, value in found.items()}
    assert medians([found, slower, found])["other_ms"] == 1750 and medians([]) is None


def test_a_runner_is_as_before_once_its_parts_are_timed():
    """The next arm of the engine is timed without wrapped methods."""

    class Runner:
        num_speculative_steps, device, speculator = 3, torch.device("cpu"), None

        def __init__(self):
            self.model = SimpleNamespace(forward=len)

        def execute_model(self, scheduled):
            return self.model.forward(scheduled.num_scheduled_tokens)

    runner = Runner()
    before = dict(vars(runner)), dict(vars(runner.model))
    worker = SimpleNamespace(model_runner=runner)
    start_parts(worker)
    step = SimpleNamespace(num_scheduled_tokens={"a": 4}, scheduled_new_reqs=[])
    assert [runner.execute_model(step) for _ in range(3)] == [1, 1, 1] and "execute_model" in vars(runner)
    assert [one["verify"] > 0 for one in stop_parts(worker, 1)] == [True, True]
    assert (vars(runner), vars(runner.model)) == before and list(vars(worker)) == ["model_runner"]


def test_kernels_belong_to_the_scope_of_their_launch():
    """Kernels of one graph have the graph's launch; a scope inside another is meant; times of launch count, not of execution."""

    def event(cat, name, ts, dur=0.0, correlation=None, tid=1):
        return {
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "tid": tid,
            "args": {} if correlation is None else {"correlation": correlation},
        }

    events = [
        event("user_annotation", "part:prepare", 0, 100),
        event("user_annotation", "part:verify", 50, 40),
        event("user_annotation", "part:draft", 200, 50),
        event("user_annotation", "other scope", 0, 1000),
        event("cuda_runtime", "cudaGraphLaunch", 60, 5, 7),
        event("cuda_runtime", "cudaLaunchKernel", 95, 1, 8),
        event("cuda_driver", "cuLaunchKernel", 210, 1, 9),
        event("cuda_runtime", "cudaLaunchKernel", 150, 1, 10),
        event("cuda_runtime", "cudaLaunchKernel", 60, 1, 11, tid=2),
        event("kernel", "gemm", 300, 30, 7),
        event("kernel", "gemm", 330, 30, 7),
        event("kernel", "copy", 360, 4, 8),
        event("kernel", "gemm", 370, 10, 9),
        event("gpu_memcpy", "Memcpy HtoD", 380, 2, 10),
        event("kernel", "late", 390, 1, 11),
    ]
    found = [(one["part"], one["kernel"], one["calls"], one["us"]) for one in trace.kernels_by_part(events)]
    assert found == [
        ("verify", "gemm", 2, 60), ("draft", "gemm", 1, 10), ("prepare", "copy", 1, 4), ("other", "Memcpy HtoD", 1, 2),
        ("other", "late", 1, 1),
    ]  # fmt: skip


def test_a_round_is_drawn(tmp_path):
    """Three rounds, of which the middle one: what it launched is its own, though the device runs it after the next one has begun."""

    def event(category: str, name: str, start: float, duration: float, correlation: int | None = None) -> dict:
        args = {} if correlation is None else {"correlation": correlation}
        return {"cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": args}

    events = []
    for index in range(3):
        start = 1000 + 100 * index
        events += [event("user_annotation", "part:prepare", start, 30), event("user_annotation", "part:draft", start + 40, 20)]
        events += [event("cuda_runtime", "cudaGraphLaunch", start + 10, 2, 2 * index), event("kernel", "gemm", start + 105, 50, 2 * index)]
        events += [event("cuda_runtime", "cudaLaunchKernel", start + 45, 2, 2 * index + 1)]
        events += [event("kernel", "topk", start + 155, 5, 2 * index + 1)]
    assert timeline.middle_round(events) == [
        ("host", "prepare", 0, 30), ("host", "draft", 40, 20), ("device", "prepare", 105, 50), ("device", "draft", 155, 5),
    ]  # fmt: skip
    assert timeline.middle_round(events[:6]) == [], "one round, whose end is not known"
    file = tmp_path / "trace-a.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": events}, out)
    assert timeline.draw_round(file) == tmp_path / "trace-a.png" and (tmp_path / "trace-a.png").stat().st_size > 5000


# -- processes ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_start_costs_only_its_arms(tmp_path):
    """Neither engine can start, the first one's two arms are told why; the second has no time left either."""
    done = []
    jobs = [job("nonsense"), job("plain"), job("nonsense", shape="9b")]
    records = run_arms(jobs[:2], tmp_path, None, False, lambda records: done.append(len(records)))
    assert [record.status for record in records] == ["error", "error"] and all("no arm 'nonsense'" in record.reason for record in records)
    assert [file.name for file in tmp_path.glob("*.log")] == ["small-nonsense.log"], "one process"
    records = run_arms(jobs[2:], tmp_path, 0.0, False, lambda records: done.append(len(records)))
    assert records[0].status == "not started" and "budget" in records[0].reason
    assert done == [2, 1]
    assert not_measured(jobs[2:], records) == [
        {"shape": "9b", "arm": "nonsense", "what": "all points", "reason": "not started: the time budget is spent"}
    ]


def processes(monkeypatch, *endings: dict[str, str]) -> list[list[str]]:
    """Instead of processes: the status that each of them leaves in the records of some arms. Returns the arms that they are given."""
    given: list[list[str]] = []

    def process(tasks, deadline, processes):
        ending = endings[len(given)]
        given.append([task.job.arm for task in tasks])
        for task in tasks:
            task.wait()
            task.record.status = ending.get(task.job.arm, "waiting")
            task.record.save(task.file(".json"))
        return "its end"

    monkeypatch.setattr(launch, "_process", process)
    return given


def test_one_process_for_the_arms_of_an_engine(tmp_path, monkeypatch):
    """An arm that fails or takes the process down ends it, and those after it get another; a second run takes up what is not done."""
    engine = {"max_num_seqs": 4}
    jobs = [job("plain"), *(job(f"chain-{k}", engine=engine) for k in (2, 3, 5, 7)), job("chain-2", shape="9b", engine=engine)]
    given = processes(
        monkeypatch, {"plain": "ok"}, {"chain-2": "ok", "chain-3": "error"}, {"chain-5": "running"}, {"chain-7": "partial"},
        {"chain-2": "refused"},
    )  # fmt: skip
    done = []
    records = run_arms(jobs, tmp_path, None, False, lambda records: done.append(len(records)))
    assert given == [["plain"], ["chain-2", "chain-3", "chain-5", "chain-7"], ["chain-5", "chain-7"], ["chain-7"], ["chain-2"]]
    assert [record.status for record in records] == ["ok", "ok", "error", "error", "partial", "refused"] and done == [1, 5, 6]
    assert records[3].reason == "its end", "the process was killed in it"
    given = processes(monkeypatch, {"chain-3": "ok", "chain-5": "ok", "chain-7": "ok"})
    records = run_arms(jobs, tmp_path, None, False, lambda records: None)
    assert given == [["chain-3", "chain-5", "chain-7"]], "no engine for what is done"
    assert [record.status for record in records] == ["ok"] * 5 + ["refused"]


def test_engines_share_the_time_left_by_their_arms():
    assert share_of(1000.0, 1, 4, []) == 250.0 and share_of(1000.0, 3, 4, []) == 750.0
    assert share_of(600.0, 1, 4, []) == 180.0, "the first one has a start to pay for, too"
    assert share_of(100.0, 1, 4, [10.0, 20.0]) == 40.0, "twice the slowest start"
    assert share_of(100.0, 3, 4, [20.0]) == 75.0, "which a larger share holds"
    assert share_of(30.0, 1, 4, [20.0]) == 30.0, "no more than there is"


class FakeRun:
    """An arm that ends as it is told."""

    def __init__(self, status: str) -> None:
        self.job, self.record, self.status, self.seconds = None, SimpleNamespace(status="waiting"), status, None

    def run(self, llm, deadline: float, started: float) -> None:
        self.seconds, self.start_s = deadline - time.time(), time.monotonic() - started
        self.end(self.status)

    def end(self, status: str, reason: str = "") -> None:
        self.record.status, self.record.reason = status, reason


def test_arms_of_a_process_share_its_time(monkeypatch):
    """Evenly; the start counts for the first of them; none after one that failed; none at all without an engine."""
    monkeypatch.setattr(arm_process.engine, "start", lambda job: time.sleep(0.1))
    runs = [FakeRun(status) for status in ("ok", "partial", "error", "ok")]
    arm_process.run_all(runs, time.time() + 120.1)
    assert [run.record.status for run in runs] == ["ok", "partial", "error", "waiting"]
    assert [run.seconds and round(run.seconds) for run in runs] == [30, 40, 60, None]
    assert runs[0].start_s >= 0.1 > runs[1].start_s

    def fail(job):
        raise RuntimeError("no memory")

    monkeypatch.setattr(arm_process.engine, "start", fail)
    arm_process.run_all(runs, float("inf"))
    assert all(run.record.status == "error" and "no memory" in run.record.reason for run in runs)


def test_a_refusal_is_told_from_an_error():
    pytest.importorskip("vllm")
    from pydantic import TypeAdapter, ValidationError

    from bole_vllm.config import BoleConfig, BoleConfigError

    with pytest.raises(BoleConfigError) as refused:
        BoleConfig.parse({"max_depth": 20}, 7)
    assert refusal(refused.value) == '"bole.max_depth" must be in 1..16, got 20.'
    with pytest.raises(ValidationError) as invalid:
        TypeAdapter(int).validate_python("x")
    assert "integer" in refusal(invalid.value)
    assert refusal(ValueError("No available memory for the cache blocks")) is None


def command(*words: object) -> subprocess.CompletedProcess:
    env = {**os.environ, "BOLE_COMMIT": "test"}  # records of another commit are not continued
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # the benchmark says itself how much
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "offline", *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )


def test_command_passes_through_without_a_gpu(tmp_path):
    """The command as a user types it: two engines, one of them for two arms, their paths asserted, tokens compared, files written; and a
    second time from the records, without an engine."""
    pytest.importorskip("vllm")
    nodes = {"tree-8-d4": 8, "tree-5-d3": 5}
    names = ("plain", *nodes)
    words = ["--tiny", "--arms", ",".join(names), "--temperature", "0.8", "--out", tmp_path / "out", "--records", tmp_path / "records"]
    done = command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "out" / "tiny-offline.json").read_text())
    assert data["complete"] and data["not_measured"] == [] and data["gates_failed"] == []
    assert data["timed"] is False and data["marks"] == [] and data["slower_points"] == []
    assert {(one["arm"], one["status"]) for one in data["arms"]} == {(name, "ok") for name in names}
    every = {(one["arm"], one["B"], one["temperature"]): one for one in data["rows"]}
    assert set(every) == {(name, batch, temperature) for name in names for batch in (1, 2) for temperature in (0.0, 0.8)}
    rows = {(name, batch): one for (name, batch, temperature), one in every.items() if not temperature}
    for (name, _, temperature), one in every.items():
        assert one["status"] == "ok" and one["tokens_per_s"] > 0
        least = 1.1 if temperature else 1.5
        assert one["mat"] == 1.0 if name == "plain" else one["mat"] > least, "a trained drafter on its own model's text"
        counts = one.get("equality")
        assert (counts is None) == (name == "plain")
        assert counts is None or (counts["equal"] + counts["tie"] == 2 and counts["beyond"] == 0)
    for (name, size), batch in ((item, batch) for item in nodes.items() for batch in (1, 2)):
        served = rows[name, batch]["counters"]
        assert served["tree_rows"] > 0 and served["nodes"] - (served["rows"] - served["tree_rows"]) == size * served["tree_rows"]
    parts = {one["arm"]: one for one in data["parts"]}
    assert parts["plain"]["draft_ms"] == 0 and all(parts[name]["draft_ms"] > 0 and parts[name]["commit_ms"] > 0 for name in nodes)
    assert all(one["verify_ms"] > 0 and one["rounds"] > 0 for one in parts.values())
    engines = {one["arm"]: one for one in data["memory"]}
    assert set(engines) == {"plain", "tree-8-d4+5-d3"} and engines["tree-8-d4+5-d3"]["spec_blocks"] == 0
    assert all(2**26 < one["kv_bytes"] <= 2**27 for one in engines.values())
    records = {name: json.loads((tmp_path / "records" / f"small-{name}.json").read_text()) for name in names}
    assert all(records[name]["scores"] == {} and records[name]["engine"]["bole_stats"]["tree_size"] == 8 for name in nodes)
    assert records["tree-8-d4"]["start_s"] > records["tree-5-d3"]["start_s"], "the engine's start is counted once"
    for text in (*records["plain"]["scores"]["demo/0"], *records["plain"]["scores"]["demo/0.8"]):
        assert [max(place, key=lambda pair: pair[1])[0] for place in text["top"]] == text["tokens"], "tokens have the largest score"
    assert {"device", "torch", "triton", "vllm", "commit", "command"} <= set(data["env"])
    assert (tmp_path / "out" / "tiny-offline.txt").exists() and len(list((tmp_path / "out").glob("*.png"))) == 4
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert last["file"] == str(tmp_path / "out" / "tiny-offline.json") and last["not_measured"] == 0
    logs = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "records").glob("*.log")}
    assert set(logs) == {"small-plain.log", "small-tree-8-d4.log"}, "one engine for both trees"
    again = command(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "records").glob("*.log")} == logs, "an engine was started again"
    assert json.loads((tmp_path / "out" / "tiny-offline.json").read_text())["rows"] == data["rows"]


def test_what_is_compiled_ahead():
    """An order an engine, more of a shape's first one; narrow models of the same heads, and every number of drafts."""
    options = dataclasses.replace(Options(), shapes=("9b", "small"), arms=("plain", "chain-3", "tree-8-d4", "tree-16-d6"), batches=(1, 4))
    options = dataclasses.replace(options, models=dict.fromkeys(options.shapes, CHECKPOINT), workload_folder=CHECKPOINT / "workloads")
    with tempfile.TemporaryDirectory() as work:
        orders = warm.make_orders(options, Path(work))
        config = json.loads((Path(orders[0]["engine"]["model"]) / "config.json").read_text())
    shares = [*range(warm.SHARES), warm.NO_SHARE, warm.NO_SHARE]
    assert [(order["name"], order["share"]) for order in orders] == [
        (f"{shape} {arm}", share)
        for shape in ("9b", "small")
        for arm, share in zip([*["plain"] * warm.SHARES, "chain-3", "tree-8-d4"], shares, strict=True)
    ]
    assert (config["hidden_size"], config["num_hidden_layers"], len(config["layer_types"])) == (warm.WIDTH, 4, 4)
    heads = ("linear_num_value_heads", "linear_num_key_heads", "num_attention_heads", "head_dim", "vocab_size")
    assert all(config[name] == SHAPES["9b"][name] for name in heads)
    tree = orders[warm.SHARES + 1]
    assert tree["drafts"] == [7, 15] and tree["batches"] == [1, 4] and tree["temperatures"] == [0.0, 0.8]
    assert tree["engine"]["enforce_eager"] and tree["engine"]["load_format"] == "dummy" and "additional_config" in tree["engine"]
    assert orders[-1]["engine"]["model"] == str(CHECKPOINT), "the small model as it is"


def test_processes_that_compile_ahead_pass_through_without_a_gpu():
    """An engine starts and serves with every number of drafts; there is nothing to compile."""
    pytest.importorskip("vllm")
    words = [sys.executable, "-m", "benchmarks.offline.warm", "--tiny", "--arms", "tree-5-d3,tree-3-d2", "--batches", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["processes"], found["failed"]) == (1, [])


def test_large_shapes_are_checked_before_any_engine_starts(tmp_path):
    """The demo model's heads are not those of 9b; and a folder that misses a workload."""
    with pytest.raises(SystemExit, match="cannot be scaled up to 9b: head_dim differs"):
        make_jobs(parse("--tiny", "--shapes", "9b", "--model", f"9b={DEMO_MODEL}"), tmp_path, tmp_path, "cpu")
    (tmp_path / "code.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    options = parse("--tiny", "--workloads", str(tmp_path))
    assert options.workloads == WORKLOADS
    with pytest.raises(SystemExit, match=r"dialogue\.jsonl"):
        make_jobs(options, tmp_path, tmp_path, "cpu")
    (tmp_path / "workloads.json").write_text('{"tokenizer_sha256": "0"}')
    with pytest.raises(SystemExit, match="made with another tokenizer than demo_model's"):
        make_jobs(options, tmp_path, tmp_path, "cpu")
