"""vLLM's own verification of a chain, one state slot per token, against a tree of as many nodes.

Chains of up to 8 tokens run in its fused CUDA kernel (which also applies the gated norm behind the layer), longer ones in its Triton
kernel. Both write the state after every token.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.kernels.case import Arm, Case, Check, Context, Ready, Skip
from benchmarks.kernels.gates import Gates, output_checks
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.oracle import Nodes, Problem, in_units, largest, node_inputs
from benchmarks.kernels.problem import DTYPE, ROTATED_SNAPSHOTS, Round
from benchmarks.shapes import CONV_WIDTH, LAYERS, TINY_LAYER, LayerShape
from benchmarks.trees import chain, draft_trees
from bole_vllm.kernels.conv import NodeInputs
from bole_vllm.kernels.conv.pointwise import native_rounds_products

MAX_FUSED_TOKENS = 8
MAX_DEPTH = 8
NORM_EPS = 1e-6
# vLLM's own kernels differ among each other by up to 1.6e-3; the precision table has their errors
STATE_BOUND = 1e-2


def cases(options: Options) -> list[Case]:
    shape = TINY_LAYER if options.tiny else LAYERS["9b"]
    return [
        Case(
            "native",
            {"shape": shape.name, "T": tokens, "B": requests, "ragged": False},
            functools.partial(_arms, shape=shape, tokens=tokens, requests=requests),
        )
        for tokens, requests in options.native_grid()
    ]


def vllm_kernels() -> dict:
    """vLLM's kernels by name. Raises Skip where it, or its CUDA build, is missing."""
    if not torch.cuda.is_available():
        raise Skip("vLLM's GPU kernels need a GPU")
    try:
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
        from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update
    except Exception as error:  # a build for another torch fails in many ways
        raise Skip(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    return {"conv": causal_conv1d_update, "triton": fused_sigmoid_gating_delta_rule_update}


def fused_kernel():
    """vLLM's fused CUDA kernel for short chains. Raises Skip where the build lacks it."""
    vllm_kernels()
    try:
        from vllm import _custom_ops
    except Exception as error:
        raise Skip(f"vLLM's compiled operators cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        raise Skip("torch.ops._C.fused_gdn_decode_post_conv_mtp is not built")
    return _custom_ops.fused_gdn_decode_post_conv_mtp


class NativeChain:
    """vLLM's verification of chains on the inputs of a round; state buffers of its own, [slots, HV, DV, DK], slot per token."""

    def __init__(self, r: Round) -> None:
        self.round, shape, device = r, r.shape, r.device
        self.tokens = len(r.trees[0])
        requests = len(r.trees)
        self.kernels = vllm_kernels()
        self.fused, self.path = None, "Triton kernel"
        if self.tokens <= MAX_FUSED_TOKENS:
            try:
                self.fused, self.path = fused_kernel(), "fused CUDA kernel, gated norm included"
            except Skip as reason:
                self.path = f"Triton kernel ({reason})"
        slots = requests * self.tokens + 1
        self.cu_seqlens = torch.arange(requests + 1, dtype=torch.int32, device=device) * self.tokens
        # [R, T] slot of every token's state; the round before left its state in the first one
        self.slots = torch.arange(1, slots, dtype=torch.int32, device=device).view(requests, self.tokens)
        self.accepted = torch.ones(requests, dtype=torch.int32, device=device)
        size = (slots, shape.value_heads, shape.value_dim, shape.key_dim)
        state_bytes = 4 * slots * size[1] * size[2] * size[3]
        count = min(len(r.sets), max(1, ROTATED_SNAPSHOTS // state_bytes))
        self.states = [torch.randn(size, device=device) for _ in range(count)]
        first = self.slots[:, 0].long()
        for i, state in enumerate(self.states):
            state[first] = r.sets[i].state[r.slots.long()].transpose(-1, -2)
        # conv columns of the drafts follow the three of the history
        columns = CONV_WIDTH - 1 + self.tokens - 1
        self.conv_states = [torch.randn(slots, columns, shape.channels, device=device).to(DTYPE).transpose(1, 2) for _ in r.sets]
        for s, conv in zip(r.sets, self.conv_states, strict=True):
            conv[first, :, : CONV_WIDTH - 1] = s.conv_state[r.slots.long()]
        self.after_conv = [torch.empty_like(s.x) for s in r.sets]
        self.norm_weight = torch.ones(shape.value_dim, dtype=DTYPE, device=device)
        self.gate = [torch.randn(r.rows, shape.value_heads, shape.value_dim, device=device).to(DTYPE) for _ in r.sets]
        self.out = [torch.empty_like(gate) for gate in self.gate]

    def conv(self, i: int) -> None:
        """vLLM overwrites its input; a buffer of its own keeps every replay the same."""
        s = self.round.sets[i]
        self.kernels["conv"](
            s.x,
            self.conv_states[i],
            s.weight,
            None,
            "silu",
            conv_state_indices=self.slots[:, 0],
            num_accepted_tokens=self.accepted,
            query_start_loc=self.cu_seqlens,
            max_query_len=self.tokens,
            validate_data=False,
            out=self.after_conv[i],
        )

    def update(self, i: int) -> None:
        s, shape = self.round.sets[i], self.round.shape
        state, qkv = self.states[i % len(self.states)], self.after_conv[i]
        if self.fused:
            self.fused(
                mixed_qkv=qkv,
                a=s.a,
                b=s.b,
                A_log=s.A_log,
                dt_bias=s.dt_bias,
                state_indices=self.slots,
                cu_seqlens=self.cu_seqlens,
                num_accepted_tokens=self.accepted,
                state=state,
                output_gate=self.gate[i],
                norm_weight=self.norm_weight,
                out=self.out[i],
                scale=shape.key_dim**-0.5,
                norm_eps=NORM_EPS,
                output_gate_activation="silu",
            )
            return
        q, k, v = split_qkv(qkv, shape)
        out, _ = self.kernels["triton"](
            A_log=s.A_log,
            a=s.a,
            b=s.b,
            dt_bias=s.dt_bias,
            q=q,
            k=k,
            v=v,
            initial_state=state,
            inplace_final_state=True,
            cu_seqlens=self.cu_seqlens,
            ssm_state_indices=self.slots,
            num_accepted_tokens=self.accepted,
            use_qk_l2norm_in_kernel=True,
        )
        self.out[i] = out.view_as(self.out[i])

    def core(self, i: int) -> None:
        self.conv(i)
        self.update(i)

    def gate_checks(self) -> list[Check]:
        """Convolution, outputs and last states of set 0, after one call on fresh states."""
        r, shape = self.round, self.round.shape
        s, nodes = r.sets[0], Nodes.of(r.trees, r.shape.state_bytes)
        want = node_inputs(s, shape, nodes, native_rounds_products(s.x, s.weight))
        rows = nodes.row_index(r.device)
        q, k, v = (part[0] for part in split_qkv(self.after_conv[0], shape))
        made = NodeInputs(q[rows], k[rows], v[rows], q_scale=None, k_scale=None, g=want["g"], p=want["p"], beta=want["beta"])
        checks = [Check(f"{name} (units of 2^-8)", in_units(getattr(made, name), want[name]), 2.1) for name in ("q", "k", "v")]
        alone = Nodes(nodes.requests, [i * self.tokens for i in range(len(nodes.trees))], nodes.first_row, nodes.trees)
        out_o, _, final = Problem.of(made, s.state, alone).solve(leaves=[self.tokens - 1] * len(nodes.trees))
        last = self.slots[torch.tensor(nodes.requests, device=r.device), -1].long()
        checks.append(Check("state", largest(self.states[0][last].transpose(-1, -2), final), STATE_BOUND))
        if self.fused is None:
            return [*checks, *output_checks(self.out[0][rows], out_o)]
        normed = out_o * torch.rsqrt(out_o.square().mean(-1, keepdim=True) + NORM_EPS)
        gate = self.gate[0][rows].double()
        return [*checks, Check("o", largest(self.out[0][rows], normed * gate * torch.sigmoid(gate)), 3e-2)]


def split_qkv(qkv: torch.Tensor, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous q, k, v [1, tokens, heads, dim] through one buffer, as vLLM's layer splits them."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = qkv.split([keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    flat = torch.cat([q.reshape(-1), k.reshape(-1), v.reshape(-1)])
    rows = qkv.shape[0]
    q, k, v = flat.split([rows * keys, rows * keys, rows * shape.value_heads * shape.value_dim])
    return (
        q.view(1, rows, shape.key_heads, shape.key_dim),
        k.view(1, rows, shape.key_heads, shape.key_dim),
        v.view(1, rows, shape.value_heads, shape.value_dim),
    )


def _arms(context: Context, shape: LayerShape, tokens: int, requests: int) -> list[Arm]:
    sets, requests = None if context.timed else 1, context.batch(requests)
    tree = Round(shape, draft_trees(requests, tokens, MAX_DEPTH, SEED + tokens), SEED, context.device, sets)
    gates = Gates(tree)

    @functools.cache
    def chains() -> NativeChain:
        return NativeChain(Round(shape, [chain(tokens)] * requests, SEED, context.device, sets))

    def native(name: str) -> Ready:
        c = chains()
        if name == "native update":
            for i in range(len(c.round.sets)):
                c.conv(i)
        step = c.core if name == "native core" else c.update
        # the gate is the core's; the update alone then runs on from the states that it left
        gate = c.gate_checks if name == "native core" else list
        return Ready(step, gate, len(c.round.sets), note=c.path)

    def core() -> Ready:
        tree.poison("o", "u")
        floor = shape.core_floor(tree.nodes, requests, "factor")
        return Ready(lambda i: tree.tree_core(i, "factor"), lambda: gates.solve("factor"), len(tree.sets), floor)

    def solve() -> Ready:
        assert tree.inputs_filled
        tree.poison("o", "u")
        floor = shape.solve_floor(tree.nodes, requests, "factor")
        return Ready(lambda i: tree.tree_verify(i, "factor"), lambda: gates.solve("factor"), len(tree.sets), floor)

    return [
        Arm("native core", functools.partial(native, "native core")),
        Arm("native update", functools.partial(native, "native update")),
        Arm("tree core", core, baseline="native core"),
        Arm("tree solve", solve, baseline="native update"),
    ]
