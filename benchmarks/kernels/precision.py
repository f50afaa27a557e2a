"""Error of every precision mode, of the replay and of the native kernels against fp64 on the same chains; time of every mode on trees."""

from __future__ import annotations

import functools

import torch

from benchmarks.kernels.case import Arm, Case, Check, Context, Ready, Skip
from benchmarks.kernels.gates import EXACT_MODES, U_BOUNDS, Gates
from benchmarks.kernels.native import MAX_FUSED_TOKENS, NORM_EPS, STATE_BOUND, fused_kernel, vllm_kernels
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.oracle import Nodes, Problem, largest_by_row, node_inputs, normalised
from benchmarks.kernels.problem import DTYPE, Round
from benchmarks.shapes import LAYERS, TINY_LAYER, LayerShape
from benchmarks.trees import chain, draft_trees
from bole_vllm.kernels.commit import LayerTable, commit_factor, commit_replay
from bole_vllm.kernels.conv.pointwise import native_rounds_products
from bole_vllm.kernels.precision import MODES

TOKENS = 16
REQUESTS = 2
# the fp32 recurrence and the exact modes, by the kind of inputs
EXACT_BOUNDS = {"normal": 1e-3, "wide": 5e-3}
MAX_DEPTH = 8


def cases(options: Options) -> list[Case]:
    shape = TINY_LAYER if options.tiny else LAYERS["9b"]
    found = []
    for kind in ("normal", "wide"):
        labels = {"shape": shape.name, "T": TOKENS, "B": REQUESTS, "inputs": kind}
        found.append(Case("precision", labels, functools.partial(_error_arms, shape=shape, kind=kind), timed=False))
    if options.timed:
        for nodes, requests in ((64, 1), (64, 16)):
            labels = {"shape": shape.name, "T": nodes, "B": requests, "inputs": "trees"}
            found.append(Case("precision", labels, functools.partial(_time_arms, shape=shape, nodes=nodes, requests=requests)))
    return found


class Chains:
    """Chains through all kernels, outputs in fp32. `wide`: states of magnitude 10^U(-3, 2), values within 1 % of the readout."""

    def __init__(self, shape: LayerShape, kind: str, device: torch.device) -> None:
        self.shape, self.kind, self.device = shape, kind, device
        self.round = r = Round(shape, [chain(TOKENS)] * REQUESTS, SEED + 1, device, sets=1)
        self.set = s = r.sets[0]
        self.nodes = Nodes.of(r.trees)
        if kind == "wide":
            gen = torch.Generator(device=device).manual_seed(SEED)
            s.state *= 10.0 ** (torch.rand(s.state.shape, generator=gen, device=device) * 5 - 3)
            # decays near 1 keep the state's range over all steps
            s.A_log.fill_(-4.0)
        r.tree_inputs(0)
        gates = node_inputs(s, shape, self.nodes, native_rounds_products(s.x, s.weight))
        self.g, self.beta = gates["g"], gates["beta"]
        if kind == "wide":
            self._values_near_readout(gen)
        self.problem = Problem(
            q=normalised(s.inputs.q) * shape.key_dim**-0.5,
            k=normalised(s.inputs.k),
            v=s.inputs.v.double(),
            g=self.g,
            beta=self.beta,
            state=s.state[r.slots.long()].double(),
            nodes=self.nodes,
        )
        self.out_o = torch.full((r.rows, shape.value_heads, shape.value_dim), float("nan"), device=device)
        # [R, HV, DK, DV] the last committed states
        self.state: torch.Tensor | None = None
        self.want_o, self.want_u, self.want_state = self.problem.solve(leaves=[TOKENS - 1] * REQUESTS)

    def _values_near_readout(self, generator: torch.Generator) -> None:
        s, group = self.set, self.shape.value_heads // self.shape.key_heads
        k = normalised(s.inputs.k).repeat_interleave(group, 1)
        for r in range(REQUESTS):
            state = s.state[int(self.round.slots[r])].double()
            for n in range(r * TOKENS, (r + 1) * TOKENS):
                state = state * torch.exp(self.g[n])[:, None, None]
                readout = torch.einsum("hkv,hk->hv", state, k[n])
                near = 1 + 0.01 * (2 * torch.rand(readout.shape, generator=generator, device=self.device) - 1)
                s.inputs.v[n] = (readout * near).to(DTYPE)
                u = self.beta[n][:, None] * (s.inputs.v[n].double() - readout)
                state = state + k[n][:, :, None] * u[:, None, :]

    def run(self, mode: str) -> None:
        """Solve and commit at this mode, O in fp32."""
        self.out_o.fill_(float("nan"))
        self.round.poison("u")
        self.round.tree_verify(0, "factor", mode, out_o=self.out_o)
        self.state = self.committed("factor")

    def path_arguments(self) -> dict[str, torch.Tensor]:
        def ints(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        slots = [int(slot) for slot in self.round.slots]
        return {
            "path": ints([list(range(TOKENS))] * REQUESTS),
            "path_len": ints([TOKENS] * REQUESTS),
            "src_slot": ints([slots]),
            "dst_slot": ints([[[slot, 0] for slot in slots]]),
            "dst_len": ints([[TOKENS, 0]] * REQUESTS),
        }

    def committed(self, commit: str) -> torch.Tensor:
        """[R, HV, DK, DV] after the whole chain, from U or by replay."""
        s = self.set
        state = torch.empty_strided(s.state.shape, s.state.stride(), device=self.device).copy_(s.state)
        conv = torch.empty_strided(s.conv_state.shape, s.conv_state.stride(), dtype=DTYPE, device=self.device).copy_(s.conv_state)
        table = LayerTable.build([state], [conv], [0], [s.weight])
        common = {"layers": table, "x": s.kept_x[None], "forest": self.round.forest, **self.path_arguments()}
        if commit == "replay":
            commit_replay(g=s.inputs.g[None], beta=s.inputs.beta[None], **common)
        else:
            kept = {"p": s.inputs.p[None], "k": s.inputs.k[None], "k_scale": s.inputs.k_scale[None], "u": s.u[None]}
            commit_factor(**kept, **common)
        return state[self.round.slots.long()]

    def checks(self, o=None, u=None, state=None, bound: float = float("inf"), want_state=None) -> list[Check]:
        """Errors of what is given, each row of a head (each head's state) relative to its largest magnitude, the worst of them."""
        found = []
        if o is not None:
            found.append(Check("o", largest_by_row(o, self.want_o), bound))
            rounded = self.want_o.to(torch.bfloat16)
            off = (o.to(torch.bfloat16) != rounded).double().mean()
            found.append(Check("bf16 outputs that differ from the oracle's", float(off) if o.isfinite().all() else float("nan"), 1.0))
        if u is not None:
            found.append(Check("u", largest_by_row(u, self.want_u), bound))
        if state is not None:
            want = self.want_state if want_state is None else want_state
            found.append(Check("state", largest_by_row(state.flatten(2), want.flatten(2)), bound))
        return found

    def native_inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """What vLLM's kernels take besides q, k and v, for the first `tokens` tokens of every chain."""
        s, slots = self.set, REQUESTS * tokens + 1
        index = torch.arange(1, slots, dtype=torch.int32, device=self.device).view(REQUESTS, tokens)
        size = (slots, self.shape.value_heads, self.shape.value_dim, self.shape.key_dim)
        state = torch.zeros(size, device=self.device)
        state[index[:, 0].long()] = s.state[self.round.slots.long()].transpose(-1, -2)
        rows = self.first_rows(tokens)
        return {
            "A_log": s.A_log,
            "dt_bias": s.dt_bias,
            "a": s.a[rows].contiguous(),
            "b": s.b[rows].contiguous(),
            "state": state,
            "index": index,
            "cu_seqlens": torch.arange(REQUESTS + 1, dtype=torch.int32, device=self.device) * tokens,
            "accepted": torch.ones(REQUESTS, dtype=torch.int32, device=self.device),
        }

    def first_rows(self, tokens: int) -> torch.Tensor:
        starts = torch.arange(REQUESTS, device=self.device)[:, None] * TOKENS
        return (starts + torch.arange(tokens, device=self.device)).flatten()


def _mode_arm(chains: Chains, mode: str) -> Ready:
    bound = EXACT_BOUNDS[chains.kind]
    if mode not in EXACT_MODES:
        bound = 10 * U_BOUNDS.get(mode, 1e-1) if chains.kind == "normal" else float("inf")

    def checks() -> list[Check]:
        return chains.checks(chains.out_o, chains.set.u[: chains.round.nodes], chains.state, bound)

    return Ready(lambda i: chains.run(mode), checks)


def _replay_arm(chains: Chains) -> Ready:
    if chains.kind != "normal":
        raise Skip("the replay takes its values from the convolution, which cannot give values near a readout")

    def step(i: int) -> None:
        chains.state = chains.committed("replay")

    return Ready(step, lambda: chains.checks(state=chains.state, bound=EXACT_BOUNDS["normal"]))


def _serial_arm(chains: Chains) -> Ready:
    r, s = chains.round, chains.set

    def step(i: int) -> None:
        s.o = chains.out_o.fill_(float("nan"))
        r.serial_tree(0)

    def checks() -> list[Check]:
        last = torch.tensor([(n + 1) * TOKENS - 1 for n in range(REQUESTS)], device=chains.device)
        return chains.checks(chains.out_o, state=r.snapshots[0][last].transpose(-1, -2), bound=EXACT_BOUNDS[chains.kind])

    return Ready(step, checks, note="fp32 recurrence, the order of native decode")


def _native_arm(chains: Chains) -> Ready:
    """vLLM's Triton kernel on fp32 copies of the same activations, so that its output is not rounded."""
    kernel, n = vllm_kernels()["triton"], chains.native_inputs(TOKENS)
    s = chains.set

    def step(i: int) -> None:
        out, _ = kernel(
            A_log=n["A_log"],
            a=n["a"],
            b=n["b"],
            dt_bias=n["dt_bias"],
            q=s.inputs.q[None].float(),
            k=s.inputs.k[None].float(),
            v=s.inputs.v[None].float(),
            initial_state=n["state"],
            inplace_final_state=True,
            cu_seqlens=n["cu_seqlens"],
            ssm_state_indices=n["index"],
            num_accepted_tokens=n["accepted"],
            use_qk_l2norm_in_kernel=True,
        )
        chains.out_o.copy_(out.view_as(chains.out_o))

    def checks() -> list[Check]:
        return chains.checks(chains.out_o, state=n["state"][n["index"][:, -1].long()].transpose(-1, -2), bound=STATE_BOUND)

    return Ready(step, checks, note="fused_sigmoid_gating_delta_rule_update")


def _fused_arm(chains: Chains) -> Ready:
    """vLLM's fused CUDA kernel: its state after the tokens it takes at most (its output carries the gated norm)."""
    kernel, n = fused_kernel(), chains.native_inputs(MAX_FUSED_TOKENS)
    s, shape, rows = chains.set, chains.shape, chains.first_rows(MAX_FUSED_TOKENS)
    qkv = torch.cat([t[rows].flatten(1) for t in (s.inputs.q, s.inputs.k, s.inputs.v)], dim=1).contiguous()
    gate = torch.ones(rows.shape[0], shape.value_heads, shape.value_dim, dtype=DTYPE, device=chains.device)

    def step(i: int) -> None:
        kernel(
            mixed_qkv=qkv,
            a=n["a"],
            b=n["b"],
            A_log=n["A_log"],
            dt_bias=n["dt_bias"],
            state_indices=n["index"],
            cu_seqlens=n["cu_seqlens"],
            num_accepted_tokens=n["accepted"],
            state=n["state"],
            output_gate=gate,
            norm_weight=torch.ones(shape.value_dim, dtype=DTYPE, device=chains.device),
            scale=shape.key_dim**-0.5,
            norm_eps=NORM_EPS,
            output_gate_activation="silu",
        )

    def checks() -> list[Check]:
        _, _, want = chains.problem.solve(leaves=[MAX_FUSED_TOKENS - 1] * REQUESTS)
        return chains.checks(state=n["state"][n["index"][:, -1].long()].transpose(-1, -2), bound=STATE_BOUND, want_state=want)

    return Ready(step, checks, note=f"state after {MAX_FUSED_TOKENS} tokens")


def _error_arms(context: Context, shape: LayerShape, kind: str) -> list[Arm]:
    chains = Chains(shape, kind, context.device)
    return [
        *(Arm(mode, functools.partial(_mode_arm, chains, mode)) for mode in MODES),
        Arm("replay", functools.partial(_replay_arm, chains)),
        Arm("native Triton", functools.partial(_native_arm, chains)),
        Arm("native CUDA", functools.partial(_fused_arm, chains)),
        Arm("serial tree", functools.partial(_serial_arm, chains)),
    ]


def _time_arms(context: Context, shape: LayerShape, nodes: int, requests: int) -> list[Arm]:
    r = Round(shape, draft_trees(requests, nodes, MAX_DEPTH, SEED + nodes), SEED, context.device, sets=None if context.timed else 1)
    gates = Gates(r)
    floor = shape.solve_floor(r.nodes, requests, "factor")

    def solve(mode: str) -> Ready:
        assert r.inputs_filled
        r.poison("o", "u")
        return Ready(lambda i: r.tree_solve(i, "factor", mode), lambda: gates.solve("factor", mode), len(r.sets), floor)

    return [Arm(mode, functools.partial(solve, mode)) for mode in MODES]
