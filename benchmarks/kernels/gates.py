"""The correctness gates: what each stage wrote for input set 0 against the references."""

from __future__ import annotations

import torch

from benchmarks.kernels.case import Check
from benchmarks.kernels.oracle import Nodes, Problem, in_units, largest, node_inputs
from benchmarks.kernels.problem import Round
from bole_vllm.kernels.conv.pointwise import native_rounds_products
from bole_vllm.kernels.precision import DEFAULT

# largest error of U over its largest magnitude on random inputs, by mode; what a mode promises is in the precision table
U_BOUNDS = {"ieee": 1e-5, "tf32x3": 5e-5, "bf16x3": 1e-4, "fp32": 1e-4, "bf16x2": 2e-3, "tf32": 2e-2, "bf16": 1e-1}
# modes whose bfloat16 outputs are right to the last place
EXACT_MODES = ("ieee", "tf32x3", "bf16x3", "fp32")


def flag(name: str, wrong: bool) -> Check:
    """A property that holds or does not."""
    return Check(name, float(wrong), 0.0)


def output_checks(out: torch.Tensor, want: torch.Tensor, mode: str = "ieee") -> list[Check]:
    """bfloat16 outputs against fp64 ones. A unit is 2^-8 of the value (or of a hundredth of the largest); rounding costs up to one."""
    if mode in EXACT_MODES:
        return [Check("o (units of 2^-8)", in_units(out, want), 2.0)]
    return [Check("o", largest(out, want), 2 * U_BOUNDS.get(mode, 1e-1))]


class Gates:
    """The gates of one round; the references are computed once for all arms."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self._want: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nodes(self) -> Nodes:
        return Nodes.of(self.round.trees, self.round.shape.state_bytes)

    @property
    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and U [n, HV, DV] of `nodes`, from the node inputs that the kernel made (which have their own gate)."""
        if self._want is None:
            s = self.round.sets[0]
            out_o, out_u, _ = Problem.of(s.inputs, s.state, self.nodes).solve()
            self._want = out_o, out_u
        return self._want

    def inputs(self) -> list[Check]:
        """Convolution, norms and gates of all nodes."""
        r, s = self.round, self.round.sets[0]
        nodes = Nodes.of(r.trees)
        want = node_inputs(s, r.shape, nodes, native_rounds_products(s.x, s.weight))
        at, rows = nodes.node_index(r.device), nodes.row_index(r.device)
        made = {name: tensor[at] for name, tensor in vars(s.inputs).items()}
        # another rounding error in the fp32 sum may move a value to the next bfloat16, two units at most
        checks = [Check(f"{name} (units of 2^-8)", in_units(made[name], want[name]), 2.1) for name in ("q", "k", "v")]
        for name, scale in (("q", r.shape.key_dim**-0.5), ("k", 1.0)):
            norm = torch.rsqrt(made[name].double().square().sum(-1) + 1e-6) * scale
            checks.append(Check(f"{name}_scale", largest(made[f"{name}_scale"], norm), 1e-5))
        checks += [Check(name, largest(made[name], want[name]), 1e-5) for name in ("g", "p", "beta")]
        return [*checks, flag("kept x", not torch.equal(s.kept_x[at], s.x[rows]))]

    def solve(self, commit: str, mode: str = DEFAULT) -> list[Check]:
        """O of token rows, U of nodes; nothing else written."""
        r, s = self.round, self.round.sets[0]
        checks = self.outputs(mode)
        if commit == "factor":
            at = self.nodes.node_index(r.device)
            checks.append(Check("u", largest(s.u[at], self.want[1]), U_BOUNDS.get(mode, 1e-1)))
            checks.append(flag("u of every node finite", not bool(s.u[: r.nodes].isfinite().all())))
            checks.append(flag("u beyond the nodes untouched", not bool(s.u[r.nodes :].isnan().all())))
        return checks

    def factors(self, commit: str) -> list[Check]:
        """The factors through what the solve makes of them."""
        self.round.poison("o", "u")
        self.round.tree_solve(0, commit)
        return self.solve(commit)

    def outputs(self, mode: str = "ieee") -> list[Check]:
        """O alone, as the serial tree also writes it."""
        r, s = self.round, self.round.sets[0]
        rows = Nodes.of(r.trees).row_index(r.device)
        other = torch.ones(r.rows, dtype=torch.bool, device=r.device)
        other[rows] = False
        return [
            *output_checks(s.o[self.nodes.row_index(r.device)], self.want[0], mode),
            flag("o of every node finite", not bool(s.o[rows].isfinite().all())),
            flag("o of no node untouched", not bool(s.o[other].isnan().all())),
        ]
