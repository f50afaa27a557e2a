"""The verify round of one layer: every stage, the whole core, and the serial tree on the same inputs."""

from __future__ import annotations

import functools

from benchmarks.kernels.case import Arm, Case, Context, Ready
from benchmarks.kernels.gates import Gates
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.problem import COMMITS, Round
from benchmarks.shapes import LAYERS, LayerShape, layers_of
from benchmarks.timing import Timer
from benchmarks.trees import draft_trees

MAX_DEPTH = 8
# (value tile, warps) of the serial tree that are tried for every case; the best is its time
SERIAL_TILES = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (64, 8))
MORE_SERIAL_TILES = ((8, 2), (8, 4), (16, 4), (32, 8), (64, 2), (128, 8))


def cases(options: Options) -> list[Case]:
    found = []
    for shape in layers_of(options.full, options.tiny):
        main = options.tiny or shape == LAYERS["9b"]
        for num_nodes, requests in options.verify_grid() if main else options.other_grid():
            labels = {"shape": shape.name, "T": num_nodes, "B": requests, "ragged": options.ragged or options.tiny}
            build = functools.partial(_arms, shape=shape, num_nodes=num_nodes, requests=requests)
            found.append(Case("verify", labels, build))
    return found


def _arms(context: Context, shape: LayerShape, num_nodes: int, requests: int) -> list[Arm]:
    options = context.options
    trees = draft_trees(context.batch(requests), num_nodes, MAX_DEPTH, SEED + num_nodes, options.ragged or options.tiny)
    r = Round(shape, trees, SEED, context.device, sets=None if context.timed else 1)
    return round_arms(r, context)


def round_arms(r: Round, context: Context) -> list[Arm]:
    """All arms on one round's inputs."""
    gates, shape, sets = Gates(r), r.shape, len(r.sets)
    serial = SerialTile(r, context)

    def inputs() -> Ready:
        return Ready(r.tree_inputs, gates.inputs, sets, shape.inputs_floor(r.nodes, len(r.trees)))

    def factors(commit: str) -> Ready:
        assert r.inputs_filled
        r.poison("z", "y")
        floor = shape.factors_floor(r.nodes, r.forest.path.shape[1], commit)
        return Ready(lambda i: r.tree_factors(i, commit), lambda: gates.factors(commit), sets, floor)

    def solve(commit: str) -> Ready:
        assert r.inputs_filled
        r.poison("o", "u")
        floor = shape.solve_floor(r.nodes, len(r.trees), commit)
        return Ready(lambda i: r.tree_solve(i, commit), lambda: gates.solve(commit), sets, floor)

    def core(commit: str) -> Ready:
        r.poison("o", "u")
        floor = shape.core_floor(r.nodes, len(r.trees), commit)
        return Ready(lambda i: r.tree_core(i, commit), lambda: gates.solve(commit), sets, floor)

    def serial_tree() -> Ready:
        assert r.inputs_filled
        r.poison("o")
        tile, warps = serial.best
        floor = shape.solve_floor(r.nodes, len(r.trees), "replay")
        return Ready(lambda i: r.serial_tree(i, tile, warps), gates.outputs, sets, floor, serial.note)

    def serial_core() -> Ready:
        r.poison("o")
        tile, warps = serial.best
        floor = shape.core_floor(r.nodes, len(r.trees), "replay")
        return Ready(lambda i: r.serial_core(i, tile, warps), gates.outputs, sets, floor, serial.note)

    arms = [Arm("inputs", inputs)]
    for commit in COMMITS:
        arms.append(Arm(f"factors {commit}", functools.partial(factors, commit)))
        arms.append(Arm(f"solve {commit}", functools.partial(solve, commit), baseline="serial tree"))
        arms.append(Arm(f"core {commit}", functools.partial(core, commit), baseline="serial core"))
    return [*arms, Arm("serial tree", serial_tree), Arm("serial core", serial_core)]


class SerialTile:
    """The serial tree's best (value tile, warps) for this case: the baseline is tuned too."""

    def __init__(self, r: Round, context: Context) -> None:
        self._round, self._context = r, context
        self.note = ""

    @functools.cached_property
    def best(self) -> tuple[int | None, int | None]:
        """(None, None), the kernel's own choice, where nothing is timed."""
        r, context = self._round, self._context
        if context.options.tiny:
            return None, None
        tiles = SERIAL_TILES + (MORE_SERIAL_TILES if context.options.full else ())
        tiles = [(tile, warps) for tile, warps in tiles if tile <= r.shape.value_dim]
        if context.compile_only:
            # every process starts elsewhere, so that they share the work
            index, count = context.options.shard
            turn = index * len(tiles) // count
            for tile, warps in tiles[turn:] + tiles[:turn]:
                r.serial_tree(0, tile, warps)
            return tiles[0]
        steps = {(tile, warps): (lambda i, t=tile, w=warps: r.serial_tree(i, t, w), len(r.sets)) for tile, warps in tiles}
        samples, _ = Timer(budget_s=0.1, min_replays=3, max_replays=9).compare(steps)
        best = min(samples, key=lambda one: samples[one].median)
        found = ", ".join(f"{tile}/{warps} {one.median:.1f}" for (tile, warps), one in samples.items())
        self.note = f"value tile {best[0]}, {best[1]} warps (us by tile/warps: {found})"
        return best
