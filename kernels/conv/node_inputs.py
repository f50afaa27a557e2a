"""Every node's query, key, value and gates in one launch: causal convolution along its own path, SiLU, L2 norms, decay, write gate.

q and k are stored as the activations they are, with the factor that normalises them beside: a 16-bit activation is exact on tensor
cores, its normalised fp32 value is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..overlap import launch_options, let_next_start, overlaps, wait_for_previous
from ..precision import is_finite
from ..topology import Forest
from ..topology.locate import node_bound
from .pointwise import CONV_WIDTH, NORM_EPS, add_tap, log_decay, native_rounds_products, round_to, silu

# nodes and heads of one program on a GPU
TILE = (8, 2)


@dataclass
class NodeInputs:
    """What the closed form needs of every node. The normalised key is k * k_scale, the scaled normalised query q * q_scale."""

    q: torch.Tensor  # [capacity, HK, DK] activation dtype
    k: torch.Tensor  # [capacity, HK, DK] activation dtype
    v: torch.Tensor  # [capacity, HV, DV] activation dtype
    q_scale: torch.Tensor  # [capacity, HK] fp32, DK^-0.5 included
    k_scale: torch.Tensor  # [capacity, HK] fp32
    g: torch.Tensor  # [capacity, HV] fp32 log decay of the node alone, <= 0
    p: torch.Tensor  # [capacity, HV] fp32 log decay summed over the node's path
    beta: torch.Tensor  # [capacity, HV] fp32 write gate, linear, in [0, 1]

    @classmethod
    def allocate(
        cls, capacity: int, num_key_heads: int, head_k_dim: int, num_value_heads: int, head_v_dim: int, dtype: torch.dtype, device
    ) -> NodeInputs:
        """Zeroed buffers for `capacity` nodes."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(capacity, *shape, dtype=dtype, device=device)

        keys, values = (num_key_heads, head_k_dim), (num_value_heads, head_v_dim)
        return cls(
            q=zeros(*keys, dtype=dtype),
            k=zeros(*keys, dtype=dtype),
            v=zeros(*values, dtype=dtype),
            q_scale=zeros(num_key_heads),
            k_scale=zeros(num_key_heads),
            g=zeros(num_value_heads),
            p=zeros(num_value_heads),
            beta=zeros(num_value_heads),
        )

    def check(self) -> None:
        """Raise ValueError where shapes, dtypes or layouts do not fit each other."""
        capacity, heads_k, _ = self.k.shape
        heads_v = self.v.shape[1]
        per_head = {"q_scale": heads_k, "k_scale": heads_k, "g": heads_v, "p": heads_v, "beta": heads_v}
        wanted = {"q": (self.k.shape, self.k.dtype), "v": ((capacity, *self.v.shape[1:]), self.k.dtype)}
        wanted |= {name: ((capacity, heads), torch.float32) for name, heads in per_head.items()}
        for name, (shape, dtype) in {"k": (self.k.shape, self.k.dtype), **wanted}.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name}: expected contiguous {dtype} {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
        for dim in (self.k.shape[2], self.v.shape[2]):
            if dim & (dim - 1) or dim < 16:
                raise ValueError(f"head sizes must be powers of two of at least 16, got {dim}")
        if heads_v % heads_k:
            raise ValueError(f"{heads_v} value heads do not share {heads_k} key heads evenly")


@triton.jit
def load_input(
    p_x, p_state, b_source, b_slot, o_c, m_c, stride_x, stride_slot, stride_channel, stride_column, WIDTH: tl.constexpr, DENSE: tl.constexpr
):
    """Conv inputs [BN, BH, BD]: token row `b_source`, or a column of the conv state where it is negative."""
    p_row = p_x + b_source.to(tl.int64) * stride_x
    p_column = p_state + b_slot * stride_slot + (b_source + WIDTH - 1) * stride_column
    if DENSE:
        # channels of both lie side by side: one load
        b_y = tl.load(tl.where(b_source >= 0, p_row, p_column)[:, None, None] + o_c, mask=m_c)
    else:
        m_x = (b_source >= 0)[:, None, None] & m_c
        b_x = tl.load(p_row[:, None, None] + o_c, mask=m_x)
        m_state = (b_source < 0)[:, None, None] & m_c
        b_y = tl.where(m_x, b_x, tl.load(p_column[:, None, None] + o_c.to(tl.int64) * stride_channel, mask=m_state))
    return b_y


@triton.jit
def load_taps(p_weight, o_c, m_c, stride_weight, stride_tap, BH: tl.constexpr, BD: tl.constexpr):
    """The four taps [1, BH, BD] of the channels o_c, oldest first; a channel's taps in one load."""
    o_w = tl.arange(0, 4)[None, None, None, :]
    b_w = tl.load(p_weight + (o_c * stride_weight)[:, :, :, None] + o_w * stride_tap, mask=m_c[:, :, :, None], other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_w, (1, BH, BD, 2, 2)))
    b_w0, b_w2 = tl.split(b_even)
    b_w1, b_w3 = tl.split(b_odd)
    return b_w0, b_w1, b_w2, b_w3


@triton.jit(do_not_specialize=["R"])
def tree_inputs_kernel(
    x,  # [num token rows, C]
    a,  # [num token rows, HV]
    b,  # [num token rows, HV]
    weight,  # [C, WIDTH]
    bias,  # [C]
    A_log,  # [HV]
    dt_bias,  # [HV]
    conv_state,  # [S, C, WIDTH - 1]
    state_slot,  # [R]
    node_offset,  # [R + 1]
    request,  # [capacity]
    conv_source,  # [capacity, WIDTH]
    path,  # [capacity, LEVELS]
    token_start,  # [R]
    out_q,  # [capacity, HK, DK]
    out_k,  # [capacity, HK, DK]
    out_v,  # [capacity, HV, DV]
    out_q_scale,  # [capacity, HK]
    out_k_scale,  # [capacity, HK]
    out_g,  # [capacity, HV]
    out_p,  # [capacity, HV]
    out_beta,  # [capacity, HV]
    out_x,  # [capacity, C]
    scale,
    eps,
    R,
    last_entry,
    stride_x,
    stride_a,
    stride_b,
    stride_weight,
    stride_tap,
    stride_slot,
    stride_channel,
    stride_column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_X: tl.constexpr,
    ROUND: tl.constexpr,
    DENSE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    tl.static_assert(WIDTH == 4)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    if OVERLAPPED:
        let_next_start()
    i_n = tl.program_id(0)
    num_nodes = tl.load(node_offset + R)
    # [BN] nodes; what is read of those behind the last one is not looked at, and read only so that nothing waits for their number
    o_n = i_n * BN + tl.arange(0, BN)
    b_n = tl.minimum(o_n, last_entry).to(tl.int64)
    b_request = tl.load(request + b_n)
    b_source0 = tl.load(conv_source + b_n * WIDTH)
    b_source1 = tl.load(conv_source + b_n * WIDTH + 1)
    b_source2 = tl.load(conv_source + b_n * WIDTH + 2)
    b_row = tl.load(conv_source + b_n * WIDTH + 3).to(tl.int64)
    b_path = tl.load(path + b_n[:, None] * LEVELS + tl.arange(0, LEVELS)[None, :])
    if OVERLAP:
        wait_for_previous()
    if i_n * BN >= num_nodes:
        return
    m_n = o_n < num_nodes
    b_slot = tl.load(state_slot + b_request, mask=m_n, other=0).to(tl.int64)
    b_start = tl.load(token_start + b_request, mask=m_n, other=0).to(tl.int64)

    # [1, BH] heads in the order q, k, v; [1, BH, BD] their channels
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :]
    m_v = (o_h >= 2 * HK) & (o_h < 2 * HK + HV)
    o_d = tl.arange(0, BD)[None, None, :]
    if DK == DV:
        o_c = o_h[:, :, None] * DK + o_d
        m_c = (o_h < 2 * HK + HV)[:, :, None] & (o_d < DK)
    else:
        o_c = tl.where(o_h < 2 * HK, o_h * DK, 2 * HK * DK + (o_h - 2 * HK) * DV)[:, :, None] + o_d
        m_c = ((o_h < 2 * HK)[:, :, None] & (o_d < DK)) | (m_v[:, :, None] & (o_d < DV))
    m_nc = m_n[:, None, None] & m_c

    # [BN, BH] and, of every ancestor, [BN, LEVELS, BH]: what the gates at the end need, read early
    m_gate = m_n[:, None] & m_v
    o_hv = o_h - 2 * HK
    b_a = tl.load(a + (b_row * stride_a)[:, None] + o_hv, mask=m_gate, other=0.0)
    b_b = tl.load(b + (b_row * stride_b)[:, None] + o_hv, mask=m_gate, other=0.0)
    b_up = b_start[:, None] + b_path
    m_up = (b_path >= 0)[:, :, None] & m_gate[:, None, :]
    b_a_path = tl.load(a + (b_up * stride_a)[:, :, None] + o_hv[:, None, :], mask=m_up, other=0.0)

    # [BN, BH, BD] oldest to newest, as decode adds them
    b_w0, b_w1, b_w2, b_w3 = load_taps(weight, o_c, m_c, stride_weight, stride_tap, BH, BD)
    b_acc = tl.zeros([BN, BH, BD], dtype=tl.float32)
    if HAS_BIAS:
        b_acc += tl.load(bias + o_c, mask=m_c).to(tl.float32)
    b_x = load_input(x, conv_state, b_source0, b_slot, o_c, m_nc, stride_x, stride_slot, stride_channel, stride_column, WIDTH, DENSE)
    b_acc = add_tap(b_acc, b_x, b_w0, ROUND)
    b_x = load_input(x, conv_state, b_source1, b_slot, o_c, m_nc, stride_x, stride_slot, stride_channel, stride_column, WIDTH, DENSE)
    b_acc = add_tap(b_acc, b_x, b_w1, ROUND)
    b_x = load_input(x, conv_state, b_source2, b_slot, o_c, m_nc, stride_x, stride_slot, stride_channel, stride_column, WIDTH, DENSE)
    b_acc = add_tap(b_acc, b_x, b_w2, ROUND)
    b_x = tl.load(x + (b_row * stride_x)[:, None, None] + o_c, mask=m_nc)
    b_acc = add_tap(b_acc, b_x, b_w3, ROUND)
    if KEEP_X:
        tl.store(out_x + b_n[:, None, None] * C + o_c, b_x, mask=m_nc)

    # masked lanes were loaded undefined: neither norm nor flag may see them
    b_y = round_to(silu(b_acc), x.dtype.element_ty)
    b_f = tl.where(m_c, b_y.to(tl.float32), 0.0)
    b_square = tl.sum(b_f * b_f, axis=2)
    m_finite = is_finite(b_square)
    b_scale = tl.where(m_finite, tl.rsqrt(b_square + eps), float("nan"))
    # what later kernels multiply stays finite (0 * NaN would reach every row); the scale or the gate carries the NaN
    b_y = tl.where(m_finite[:, :, None], b_y, tl.zeros([BN, BH, BD], dtype=x.dtype.element_ty))
    b_n3 = b_n[:, None, None]
    tl.store(out_q + b_n3 * (HK * DK) + o_c, b_y, mask=m_nc & (o_h < HK)[:, :, None])
    tl.store(out_k + b_n3 * (HK * DK) + (o_c - HK * DK), b_y, mask=m_nc & ((o_h >= HK) & (o_h < 2 * HK))[:, :, None])
    tl.store(out_v + b_n3 * (HV * DV) + (o_c - 2 * HK * DK), b_y, mask=m_nc & m_v[:, :, None])
    b_n2 = b_n[:, None]
    tl.store(out_q_scale + b_n2 * HK + o_h, b_scale * scale, mask=m_n[:, None] & (o_h < HK))
    tl.store(out_k_scale + b_n2 * HK + o_h - HK, b_scale, mask=m_n[:, None] & (o_h >= HK) & (o_h < 2 * HK))

    # [BN, BH] gates of the value heads
    if (tl.program_id(1) + 1) * BH > 2 * HK:
        b_rate = -tl.exp(tl.load(A_log + o_hv, mask=m_v, other=0.0).to(tl.float32))
        b_bias = tl.load(dt_bias + o_hv, mask=m_v, other=0.0).to(tl.float32)
        b_g = log_decay(b_a, b_rate, b_bias)
        tl.store(out_g + b_n2 * HV + o_hv, tl.where(is_finite(b_g), b_g, float("nan")), mask=m_gate)
        tl.store(out_beta + b_n2 * HV + o_hv, tl.where(m_finite, tl.sigmoid(b_b.to(tl.float32)), float("nan")), mask=m_gate)
        # the decay of every ancestor is recomputed, since another program writes it, and summed by depth
        b_all = log_decay(b_a_path, b_rate[:, None, :], b_bias[:, None, :])
        b_p = tl.sum(tl.where(m_up, tl.where(is_finite(b_all), b_all, float("nan")), 0.0), axis=1)
        tl.store(out_p + b_n2 * HV + o_hv, b_p, mask=m_gate)


def tree_inputs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out: NodeInputs,
    out_x: torch.Tensor | None = None,
    round_products: bool | None = None,
    overlap: bool = False,
) -> None:
    """Query, key, value and gates of every node, written in place into `out`.

    A node's conv inputs are its own row and the rows of its ancestors, then the request's conv state. Sum in fp32 from bias and oldest
    tap, SiLU, rounded to x.dtype. The L2 norms are taken in fp32 (epsilon 1e-6 inside the root). Rounding points are those of vLLM's
    causal_conv1d_update and fused_sigmoid_gating_delta_rule_update, but for the norm, which is kept as a factor.

        g = -exp(A_log) softplus(a + dt_bias)      log space; softplus(x) = x above 20
        beta = sigmoid(b)
        P_i = g_root + ... + g_parent(i) + g_i     log space; summed by depth, so its bits depend on the path alone

    Entries behind the last node are not written, the conv state is only read. Where a head's k, q or v of a node is not finite (or its
    square overflows fp32), its k_scale, q_scale or beta is NaN and zeros are stored in its place; where g is not finite it is NaN, and P
    from there on.

    Args:
        x: [num token rows, C], C = 2 HK DK + HV DV, channels in the order q, k, v; any row stride.
        a, b: [num token rows, HV], any float dtype, any row stride. A_log, dt_bias: [HV].
        weight: [C, 4], tap 3 belongs to the node itself. bias: [C] or None.
        conv_state: [S, C, 3] in x.dtype, any strides, column 2 the newest input before the root.
        state_slot: [R] int32 request -> slot; not read for requests without nodes.
        out: buffers for at least `forest.capacity` nodes, q, k, v in x.dtype.
        out_x: [capacity, C] in x.dtype, the conv inputs by node, kept for the commit; or None.
        round_products: round each product to x.dtype before it is added; None: as native decode on this device does.
        overlap: the launch before this one on the stream does not write the forest; read that while it runs.

    Raises:
        ValueError: a shape, dtype or stride is wrong.
    """
    HK, DK = out.k.shape[1:]
    HV, DV = out.v.shape[1:]
    _check(x, a, b, weight, bias, A_log, dt_bias, conv_state, state_slot, forest, out, out_x)
    if forest.max_requests == 0:
        return
    BN, BH = _tile(x, 2 * HK + HV)
    overlap = overlap and overlaps(x.device)
    grid = (triton.cdiv(node_bound(forest), BN), triton.cdiv(2 * HK + HV, BH))
    tree_inputs_kernel[grid](
        x,
        a,
        b,
        weight,
        bias,
        A_log,
        dt_bias,
        conv_state,
        state_slot,
        forest.node_offset,
        forest.request,
        forest.conv_source,
        forest.path,
        forest.token_start,
        out.q,
        out.k,
        out.v,
        out.q_scale,
        out.k_scale,
        out.g,
        out.p,
        out.beta,
        out_x,
        DK**-0.5,
        NORM_EPS,
        forest.max_requests,
        forest.capacity - 1,
        x.stride(0),
        a.stride(0),
        b.stride(0),
        *weight.stride(),
        *conv_state.stride(),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        WIDTH=CONV_WIDTH,
        LEVELS=forest.path.shape[1],
        HAS_BIAS=bias is not None,
        KEEP_X=out_x is not None,
        ROUND=native_rounds_products(x, weight) if round_products is None else round_products,
        DENSE=conv_state.stride(1) == 1,
        OVERLAPPED=overlaps(x.device),
        OVERLAP=overlap,
        BN=BN,
        BH=BH,
        BD=triton.next_power_of_2(max(DK, DV)),
        **launch_options(overlap),
    )


def _tile(x: torch.Tensor, num_heads: int) -> tuple[int, int]:
    """Nodes and heads of one program. Never from the batch: the order of the norm's sum must not depend on it."""
    if x.is_cuda:
        return TILE
    # the interpreter pays per operation, not per element
    return 64, min(16, triton.next_power_of_2(num_heads))


def _check(x, a, b, weight, bias, A_log, dt_bias, conv_state, state_slot, forest, out, out_x) -> None:
    out.check()
    capacity, HK, DK = out.k.shape
    HV, DV = out.v.shape[1:]
    C = 2 * HK * DK + HV * DV
    if x.dim() != 2 or x.shape[1] != C or x.stride(1) != 1:
        raise ValueError(f"x must be [num token rows, {C}] with unit inner stride, got {list(x.shape)}, strides {x.stride()}")
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2 or tensor.shape[1] != HV or (HV > 1 and tensor.stride(1) != 1):
            raise ValueError(f"{name} must be [num token rows, {HV}] with unit inner stride, got {list(tensor.shape)}")
    if tuple(weight.shape) != (C, CONV_WIDTH):
        raise ValueError(f"weight must be [{C}, {CONV_WIDTH}], got {list(weight.shape)}")
    if bias is not None and (tuple(bias.shape) != (C,) or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous [{C}], got {list(bias.shape)}")
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        if tuple(tensor.shape) != (HV,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{HV}], got {list(tensor.shape)}")
    if tuple(conv_state.shape[1:]) != (C, CONV_WIDTH - 1) or conv_state.dtype != x.dtype:
        raise ValueError(f"conv_state must be {x.dtype} [S, {C}, {CONV_WIDTH - 1}], got {conv_state.dtype} {list(conv_state.shape)}")
    if state_slot.dim() != 1 or state_slot.shape[0] < forest.max_requests:
        raise ValueError(f"state_slot must cover {forest.max_requests} requests, got {list(state_slot.shape)}")
    if capacity < forest.capacity or out.k.dtype != x.dtype:
        raise ValueError(f"out must hold {forest.capacity} nodes in {x.dtype}, got {capacity} in {out.k.dtype}")
    if out_x is not None and (out_x.shape[0] < forest.capacity or tuple(out_x.shape[1:]) != (C,) or out_x.dtype != x.dtype):
        raise ValueError(f"out_x must be {x.dtype} [{forest.capacity}, {C}], got {out_x.dtype} {list(out_x.shape)}")
