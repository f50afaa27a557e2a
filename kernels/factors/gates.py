"""Gates of a node's path, shared by both kernels that make the factors."""

from __future__ import annotations

import triton.language as tl

from ..precision import device_function, exp_non_positive, finite_or_zero, is_finite


@device_function
def path_gates(p_beta, p_p, o_row, o_own, m_path, i_hv, HV: tl.constexpr):
    """Gates of nodes o_own [BN] and of their paths o_row [BN, D], made finite: the node's beta [BN], its path's beta, P and decay
    exp(P_own - P) [BN, D], and 1 [BN] where something on the path was not finite."""
    b_beta = tl.load(p_beta + o_row * HV + i_hv, mask=m_path, other=0.0)
    b_p = tl.load(p_p + o_row * HV + i_hv, mask=m_path, other=0.0)
    b_bad = tl.max(tl.where(is_finite(b_beta) & is_finite(b_p), 0.0, 1.0), axis=1)
    b_own = finite_or_zero(tl.load(p_p + o_own * HV + i_hv))
    b_decay = exp_non_positive(tl.where(m_path, b_own[:, None] - finite_or_zero(b_p), 0.0))
    return finite_or_zero(tl.load(p_beta + o_own * HV + i_hv)), finite_or_zero(b_beta), finite_or_zero(b_p), b_decay, b_bad
