"""`python tests/sanitize.py`: compute-sanitizer over one test of every kernel. Needs a GPU and the CUDA toolkit; `make sanitize`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
# every kernel is launched by one of these; of a test with parameters the first few
TESTS = {
    "test_topology.py::test_build_matches_naive": 1,
    "test_walk.py::test_random_against_oracle": 1,
    "test_rounds.py::test_counts_match_naive": 1,
    "test_rounds.py::test_accepted_rows_come_first": 1,
    "test_kv_move.py::test_random_batches": 1,
    "test_topology.py::test_positions_match_naive": 1,
    "test_draft.py::test_against_oracle": 1,
    "test_top_children.py::test_against_oracle": 1,
    "test_conv.py::test_matches_naive": 1,
    "test_factors.py::test_against_definition": 2,
    "test_solve.py::test_tiles_per_program_change_no_bit": 3,
    "test_core.py::test_overlapped_launches_change_no_bit": 4,
    "test_serial.py::test_heads_tiles_and_layouts": 1,
    "test_commit.py::test_layers_groups_and_destinations": 6,
    "test_targets.py::test_every_place_of_a_path": 1,
    "test_attention.py::test_heads": 1,
    "test_attention.py::test_e4m3_cache": 1,
    "test_attention.py::test_merge_tiles": 1,
}


def selected() -> list[str]:
    """Ids of the tests to run; SystemExit if one of the names is gone."""
    command = [sys.executable, "-m", "pytest", "tests/kernels", "--collect-only", "-q"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    chosen = []
    for name, count in TESTS.items():
        ids = [line for line in known if line.split("[")[0].endswith(f"/{name}")]
        if not ids:
            raise SystemExit(f"tests/sanitize.py: there is no test {name} any more")
        chosen += ids[:count]
    return chosen


def find_sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        raise SystemExit("compute-sanitizer was not found: install the CUDA toolkit or put it on PATH")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=4, help="processes of each tool; the tests take turns among them")
    args = parser.parse_args()
    sanitizer, tests = find_sanitizer(), selected()
    pytest = [sys.executable, "-m", "pytest", "-q", "-x"]
    # compiled before: a kernel is checked when it runs, not while Triton compiles it
    if subprocess.run([*pytest, *tests], cwd=ROOT).returncode:
        return 1
    shards = [shard for i in range(args.jobs) if (shard := tests[i :: args.jobs])]
    runs = []
    for tool in args.tools.split(","):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *pytest]
        runs += [(tool, subprocess.Popen([*command, *shard], cwd=ROOT)) for shard in shards]
    failed = sorted({tool for tool, run in runs if run.wait()})
    print(f"{len(tests)} tests under {args.tools}: {'failed in ' + ', '.join(failed) if failed else 'clean'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
