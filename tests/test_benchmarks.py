"""The benchmarks without a GPU: gates on tiny shapes, and what turns a run's rows into marks, tables and files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import runner
from benchmarks.kernels.attention import hybrid_block_size
from benchmarks.kernels.case import Arm, Case, Check, Context, Ready, Skip, run_case, timed_fields
from benchmarks.kernels.marks import kernel_marks
from benchmarks.kernels.options import STAGES, Options
from benchmarks.kernels.oracle import Nodes, Problem
from benchmarks.kernels.plots import draw
from benchmarks.kernels.tables import error_table, pivot, render
from benchmarks.report import Mark, write_json
from benchmarks.shapes import LAYERS, TINY_LAYER, layers_of
from benchmarks.timing import Samples, num_sets
from benchmarks.trees import chain, deepest_path, depths, draft_tree, draft_trees
from bole_vllm.kernels.solve.naive import tree_recurrence

ROOT = Path(__file__).resolve().parents[1]
TINY = Options(tiny=True, jobs=0)


def test_command_passes_its_gates_without_a_gpu(tmp_path):
    """The command as a user types it, on tiny shapes: gates of two stages, results on disk, no marks that nobody measured."""
    command = [sys.executable, "-m", "benchmarks", "kernels", "--tiny", "--only", "verify,commit", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "gates-kernels.json").read_text())
    assert {row["status"] for row in data["rows"]} == {"ok"}
    arms = {(row["stage"], row["arm"]) for row in data["rows"]}
    assert {("verify", "core factor"), ("verify", "core replay"), ("verify", "serial core"), ("commit", "replay")} <= arms
    assert all(check["ok"] for row in data["rows"] for check in row["errors"].values())
    assert not any("p50_us" in row for row in data["rows"]) and data["marks"] == []
    assert {"device", "torch", "triton", "commit", "command"} <= set(data["env"])
    assert "nothing is timed" in done.stdout
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert last["gates_failed"] == [] and last["file"] == str(tmp_path / "gates-kernels.json")


def arm(name: str, error: float = 0.0, bound: float = 1.0, raises: Exception | None = None) -> Arm:
    def prepare() -> Ready:
        if raises is not None:
            raise raises
        return Ready(lambda i: None, lambda: [Check("out", error, bound)])

    return Arm(name, prepare)


def case_of(*arms: Arm) -> Case:
    return Case("verify", {"shape": "tiny", "T": 2, "B": 1}, lambda context: list(arms))


def statuses(case: Case) -> dict[str, str]:
    return {row["arm"]: row["status"] for row in run_case(case, Context(TINY))}


def test_one_arm_that_cannot_run_leaves_the_others():
    found = run_case(
        case_of(arm("good"), arm("broken", raises=RuntimeError("no such kernel")), arm("absent", raises=Skip("no GPU"))), Context(TINY)
    )
    rows = {row["arm"]: row for row in found}
    assert rows["good"]["status"] == "ok"
    assert rows["broken"]["status"] == "error" and "no such kernel" in rows["broken"]["reason"]
    assert rows["absent"]["status"] == "skipped" and rows["absent"]["reason"] == "no GPU"


@pytest.mark.parametrize("error", [2.0, float("nan"), float("inf")])
def test_a_failed_gate_stops_its_case(error):
    assert statuses(case_of(arm("good"), arm("wrong", error))) == {"good": "not timed", "wrong": "gate failed"}


def test_inputs_that_cannot_be_made_are_recorded():
    def build(context):
        raise ValueError("too large")

    (row,) = run_case(Case("verify", {"T": 2}, build), Context(TINY))
    assert row["status"] == "error" and "too large" in row["reason"]


@pytest.mark.parametrize("error,status", [(0.5, 0), (2.0, 1)])
def test_exit_status_tells_failed_gates(error, status, monkeypatch, capsys):
    cases = [case_of(arm("one", error), arm("broken", raises=RuntimeError("not a gate")))]
    monkeypatch.setattr(runner, "all_cases", lambda options: cases)
    assert runner.run_benchmark(TINY) == status
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["gates_failed"] == (["verify / one"] if status else [])


def row(stage: str, name: str, **fields) -> dict:
    return {"stage": stage, "arm": name, "status": "ok", "shape": "9b", **fields}


def full_run() -> list[dict]:
    """Rows in which every mark is just reached."""
    rows = []
    for nodes, core in ((64, 12.0), (16, 7.0)):
        for requests in (1, 16):
            labels = {"T": nodes, "B": requests, "ragged": False, "p20_us": 9.0, "p80_us": 11.0, "p50_us": 10.0, "floor_us": 4.0}
            rows.append(row("verify", "core factor", **labels, speedup=core, x_floor=2.5))
            rows.append(row("verify", "solve factor", **labels, speedup=16.0, x_floor=3.0 if nodes == 64 else 2.0))
            rows.append(row("verify", "serial core", **labels, x_floor=2.5))
    for kind, sizes in (
        ("factor", {"p": 3072, "k": 98304, "k_scale": 1536, "u": 393216, "x": 393216}),
        ("replay", {"g": 3072, "beta": 3072, "x": 393216}),
    ):
        rows.append(row("commit", kind, T=64, B=16, path=6, p50_us=500.0, x_floor=1.5, bytes_per_node=sizes))
        rows.append(row("commit", kind, T=64, B=1, path=6, p50_us=60.0, x_floor=1.5, bytes_per_node=sizes))
    for prefix, requests in ((4096, 8), (32768, 1)):
        for block in (16, 528):
            labels = {"T": 64, "prefix": prefix, "B": requests, "block_size": block}
            rows += [row("attention", "tree", **labels, p50_us=150.0), row("attention", "prefix merged", **labels, p50_us=125.0)]
            rows += [row("attention", "fa3 chain", **labels, p50_us=110.0), row("attention", "fa3 chain planned", **labels, p50_us=100.0)]
    return rows


def test_marks_of_a_run_that_reaches_them():
    marks = kernel_marks(full_run(), "factor")
    assert [mark.name for mark in marks if not mark.ok] == []
    assert len({mark.name for mark in marks}) == len(marks) == 17
    found = {mark.name: mark.as_json() for mark in marks}["bytes kept per node, factor, all layers"]
    assert found == {"name": "bytes kept per node, factor, all layers", "goal": "at most 0.85", "value": 0.8481, "unit": "MiB", "ok": True}


SLOWER = [
    ("core factor", "speedup", 6.9, "verify core over the serial core, T=16, B=1"),
    ("solve factor", "speedup", 15.9, "solve + readout over the serial tree, T=64, B=16"),
    ("solve factor", "x_floor", 3.1, "solve + readout over its bytes floor, T=64, B=16"),
    ("factor", "x_floor", 1.51, "factor commit of all layers over reading and writing the states once, B=16, path 6"),
    ("replay", "p50_us", 60.1, "replay commit of all layers, B=1, path 6"),
    ("fa3 chain planned", "p50_us", 99.0, "tree attention over FlashAttention 3 on a chain, T=64, prefix 4096, B=8"),
]


@pytest.mark.parametrize("name,field,value,mark", SLOWER, ids=lambda x: str(x)[:20])
def test_a_missed_mark_is_not_ok(name, field, value, mark):
    rows = full_run()
    for one in rows:
        if one["arm"] == name and field in one:
            one[field] = value
    missed = {found.name for found in kernel_marks(rows, "factor") if not found.ok}
    assert mark in missed


def test_one_bad_block_size_misses_the_attention_mark():
    rows = full_run()
    for one in rows:
        if one["stage"] == "attention" and one["block_size"] == 528 and one["arm"] == "prefix merged":
            one["p50_us"] = 126.0
    missed = [mark for mark in kernel_marks(rows, "factor") if not mark.ok]
    assert [mark.note for mark in missed] == ["block size 528"] * 2


def test_what_was_not_measured_is_not_reached():
    """No rows, failed rows and rows of another shape or commit: marks without value, each of them short."""
    rows = full_run()
    gone = [{**one, "status": "gate failed"} for one in rows if one["stage"] == "verify"]
    other = [{**one, "shape": "27b"} for one in rows]
    for found in (kernel_marks([], "factor"), kernel_marks(gone, "factor"), kernel_marks(other, "factor")):
        assert len(found) == 17
        assert all(mark.value is None and not mark.ok for mark in found)
        assert all(mark.as_json()["value"] is None and mark.as_json()["ok"] is False for mark in found)
    assert not any(mark.ok for mark in kernel_marks(full_run(), "replay") if mark.name.startswith(("verify core", "solve")))


def test_mark_needs_one_bound():
    with pytest.raises(ValueError, match="one bound"):
        Mark("m", 1.0, "x")
    with pytest.raises(ValueError, match="one bound"):
        Mark("m", 1.0, "x", at_least=1.0, at_most=2.0)
    assert not Mark("m", float("nan"), "x", at_most=1.0).ok


def test_tables_and_pictures(tmp_path):
    rows = full_run()
    rows.append({"stage": "native", "arm": "native core", "status": "skipped", "reason": "no vLLM", "shape": "9b", "T": 8, "B": 1})
    rows.append(row("precision", "tf32", inputs="wide", T=16, B=2, errors={"u": {"error": 0.018, "bound": 1.0, "ok": True}}))
    table = pivot(rows, "verify", "speedup")
    assert table.loc[(64, 16), "core factor"] == 12.0 and list(table.columns) == ["core factor", "solve factor"]
    assert error_table(rows).loc["tf32", ("wide", "u")] == 0.018
    rows[0]["speedup"] = 1.0
    text = render(rows, kernel_marks(rows, "factor"), timed=True)
    assert "SHORT" in text and "native / native core: skipped: no vLLM" in text
    pictures = draw(rows, tmp_path, "kernels", "title")
    assert {path.name for path in pictures} == {"kernels-nodes.png", "kernels-requests.png", "kernels-floor.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    write_json(tmp_path / "out.json", {"value": float("nan"), "rows": [{"x": float("inf")}]})
    assert json.loads((tmp_path / "out.json").read_text()) == {"value": None, "rows": [{"x": None}]}


def test_file_name_tells_a_full_run():
    """Whoever reads marks takes the newest kernels*.json, so only a run that measures all marks may write one."""
    full = Options(only=STAGES)
    assert full.results_name == "kernels"
    for other in (Options(only=("verify",)), Options(ragged=True), TINY):
        assert not other.results_name.startswith("kernels")


def test_samples():
    samples = Samples((5.0, 1.0, 2.0, 4.0, 3.0), sets=3, calls=30)
    fields = timed_fields(samples, floor_bytes=4_000_000, bandwidth=4e12)
    assert (fields["p20_us"], fields["p50_us"], fields["p80_us"]) == (1.8, 3.0, 4.2)
    assert fields["floor_us"] == 1.0 and fields["x_floor"] == 3.0 and fields["floor_4300_us"] == 0.93
    assert num_sets(1) == 32 and num_sets(10**9) == 3


def test_floors_are_those_of_the_paper_notes():
    """us at 4.3 TB/s: 15.6 for 64 nodes and 16 requests, 9.8 for 16 nodes."""
    shape = LAYERS["9b"]
    assert round(shape.solve_floor(64 * 16, 16, "factor") / 4.3e6, 1) == 15.6
    assert round(shape.solve_floor(16 * 16, 16, "factor") / 4.3e6, 1) == 9.8
    assert shape.state_bytes * shape.layers == 48 * 2**20
    assert shape.kept_bytes("factor") * shape.layers == 889_344
    assert [s.name for s in layers_of(full=True, tiny=False)][:3] == ["9b", "9b-tp2", "9b-tp4"]
    assert layers_of(full=False, tiny=True) == [TINY_LAYER]
    assert hybrid_block_size() == 528


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 16, 64, 256])
def test_draft_tree(num_nodes):
    """Spine first, parents before children, bounded depth and width, the same from the same seed."""
    tree = draft_tree(num_nodes, 8, random.Random(num_nodes))
    assert tree == draft_tree(num_nodes, 8, random.Random(num_nodes)) and len(tree) == num_nodes
    spine = min(8, num_nodes - 1)
    assert tree[: spine + 1] == chain(spine + 1)
    assert all(parent < node for node, parent in enumerate(tree))
    assert max(depths(tree)) == spine
    assert max(tree.count(node) for node in range(num_nodes)) <= 4
    path = deepest_path(tree, 6)
    assert len(path) == min(6, spine + 1) and [tree[b] for b in path[1:]] == path[:-1]


def test_ragged_trees():
    sizes = [len(tree) for tree in draft_trees(16, 64, 8, 3, ragged=True)]
    assert sizes[0] == 64 and sizes.count(0) == 3 and len(set(sizes)) > 5


def test_oracle_agrees_with_the_serial_one():
    """The gates' fp64 reference, which goes depth by depth over all requests, against the recurrence of one tree."""
    gen = torch.Generator().manual_seed(1)
    trees = [draft_tree(9, 4, random.Random(1)), [], draft_tree(5, 8, random.Random(2))]
    nodes, n = Nodes.of(trees), 14

    def normal(*size):
        return torch.randn(size, generator=gen, dtype=torch.float64)

    problem = Problem(normal(n, 1, 16), normal(n, 1, 16), normal(n, 2, 16), -normal(n, 2).abs(), normal(n, 2), normal(3, 2, 16, 16), nodes)
    out, u, final = problem.solve(leaves=[8, 0, 2])
    for r, part in ((0, slice(0, 9)), (2, slice(9, 14))):
        arrays = (t[part] for t in (problem.q, problem.k, problem.v, problem.g, problem.beta))
        states, want_out, want_u = tree_recurrence(*arrays, problem.state[r], trees[r])
        torch.testing.assert_close(out[part], want_out)
        torch.testing.assert_close(u[part], want_u)
        torch.testing.assert_close(final[r], states[8 if r == 0 else 2])
