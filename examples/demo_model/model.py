"""The demo network in plain PyTorch: a hybrid Gated DeltaNet target and its one-layer multi-token-prediction (MTP) head.

Parameter names and rounding points follow the checkpoint format of Qwen3.5, so `state_dict()` is the checkpoint. Written for training:
whole sequences, no caches. Shapes: B sequences, T tokens, H heads, D channels of a head, N chunks of C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "mtp_num_hidden_layers": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CHUNK = 64  # tokens of one chunk of the delta rule; the training length is a multiple of it


class RMSNorm(nn.Module):
    """Root-mean-square norm whose weight is stored relative to 1; computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> same shape and dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """Norm of the delta rule's output, then times silu of the output gate; this weight is stored as it is used."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., size] -> same shape, gate's dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight * F.silu(gate.float())).to(gate.dtype)


class Linear(nn.Linear):
    """Bias-free projection with fp32 master weights, computed in its input's dtype."""

    def __init__(self, size_in: int, size_out: int, zero: bool = False):
        super().__init__(size_in, size_out, bias=False)
        nn.init.zeros_(self.weight) if zero else nn.init.normal_(self.weight, std=0.5 * size_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size_in] -> [..., size_out]."""
        return F.linear(x, self.weight.to(x.dtype))


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A; its gradient is two products instead of two more solves."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        """a [..., C, C] -> (I + a)^-1 [..., C, C]."""
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """d(M^-1) = -M^-1 dM M^-1, kept to the strictly lower triangle."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from a zero state, chunk by chunk, in fp32.

    q, k, v [B, H, T, D] fp32, q and k of unit length and q scaled; g [B, H, T] log decay (<= 0); beta [B, H, T] in (0, 1).
    Returns [B, H, T, D]. T is a multiple of CHUNK.
    """
    batch, heads, length, _ = q.shape
    q, k, v = (x.view(batch, heads, length // CHUNK, CHUNK, -1) for x in (q, k, v))
    decay = g.view(batch, heads, -1, CHUNK).cumsum(-1)  # [B, H, N, C] log decay from the chunk's start
    beta = beta.view(batch, heads, -1, CHUNK, 1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()  # [B, H, N, C, C] from row j to row i
    grown = decay.exp().unsqueeze(-1)
    inverse = UnitLowerInverse.apply(((k * beta) @ k.transpose(-1, -2) * pair).tril(-1))
    u = inverse @ (v * beta)  # [B, H, N, C, D] values written if the chunk began at a zero state
    w = inverse @ (k * beta * grown)  # [B, H, N, C, D] what of the old state each row reads and takes back
    k_end = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = decay[..., -1, None, None].exp()
    state = torch.zeros_like(k_end[:, :, 0] @ u[:, :, 0])
    states, written = [], []
    for n in range(length // CHUNK):
        states.append(state)
        written.append(u[:, :, n] - w[:, :, n] @ state)
        state = state * chunk_decay[:, :, n] + k_end[:, :, n] @ written[-1]
    out = (q * grown) @ torch.stack(states, 2) + (q @ k.transpose(-1, -2) * pair) @ torch.stack(written, 2)
    return out.reshape(batch, heads, length, -1)


class GatedDeltaNet(nn.Module):
    """Linear attention: causal convolution of width 4, gates, delta rule, gated norm."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.k_heads = c["linear_num_value_heads"], c["linear_num_key_heads"]
        self.size = c["linear_key_head_dim"]
        self.key_dim, self.value_dim = self.k_heads * self.size, self.heads * c["linear_value_head_dim"]
        mixed, hidden = 2 * self.key_dim + self.value_dim, c["hidden_size"]
        width = c["linear_conv_kernel_dim"]
        self.in_proj_qkv = Linear(hidden, mixed)
        self.in_proj_z = Linear(hidden, self.value_dim)
        self.in_proj_b = Linear(hidden, self.heads)
        self.in_proj_a = Linear(hidden, self.heads)
        self.conv1d = nn.Conv1d(mixed, mixed, width, groups=mixed, bias=False)
        # Decay of a token at the start: about exp(-0.02 * 4**head), so the heads begin with memories of unlike lengths.
        self.A_log = nn.Parameter(torch.arange(self.heads) * torch.tensor(4.0).log())
        self.dt_bias = nn.Parameter(torch.full((self.heads,), 0.02).expm1().log())
        self.norm = GatedNorm(c["linear_value_head_dim"], c["rms_norm_eps"])
        self.out_proj = Linear(self.value_dim, hidden, zero=True)

    def convolve(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution and silu; x [B, T, channels] -> same."""
        weight = self.conv1d.weight.squeeze(1).to(x.dtype)  # [channels, width]
        width, length = weight.shape[1], x.shape[1]
        x = F.pad(x, (0, 0, width - 1, 0))
        return F.silu(sum(x[:, i : i + length] * weight[:, i] for i in range(width)))

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, T, heads * D] -> fp32 [B, H, T, D], key heads repeated to the number of value heads."""
        x = x.unflatten(-1, (heads, -1)).float()
        return x.repeat_interleave(self.heads // heads, 2).transpose(1, 2).contiguous()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, hidden] -> same; rope is not used here."""
        q, k, v = self.convolve(self.in_proj_qkv(x)).split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k, v = self.split_heads(q, self.k_heads), self.split_heads(k, self.k_heads), self.split_heads(v, self.heads)
        q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        g = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        out = gated_delta_rule(q * self.size**-0.5, k, v, g.contiguous(), beta.contiguous()).transpose(1, 2)
        return self.out_proj(self.norm(out, self.in_proj_z(x).unflatten(-1, (self.heads, -1))).flatten(2))


def rotary(length: int, c: dict, device: torch.device, start: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, rotated channels] of positions start..start+length-1, fp32."""
    size = int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"])
    rate = c["rope_parameters"]["rope_theta"] ** -(torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(start, start + length, device=device).float(), rate).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to the first channels of x [B, H, T, D]."""
    cos, sin = (y.to(x.dtype) for y in rope)
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms and a sigmoid output gate."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv_heads, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = Linear(c["hidden_size"], 2 * self.heads * self.size)
        self.k_proj = Linear(c["hidden_size"], self.kv_heads * self.size)
        self.v_proj = Linear(c["hidden_size"], self.kv_heads * self.size)
        self.o_proj = Linear(self.heads * self.size, c["hidden_size"], zero=True)
        self.q_norm = RMSNorm(self.size, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.size, c["rms_norm_eps"])

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, hidden] -> q [B, H, T, D], k and v [B, key heads, T, D], gate [B, T, H * D]."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        q, k = rotate(self.q_norm(q).transpose(1, 2), rope), rotate(k.transpose(1, 2), rope)
        return q, k, v.transpose(1, 2), gate.flatten(2).sigmoid()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: list | None = None, mask: Tensor | None = None) -> Tensor:
        """x [B, T, hidden] -> same. Keys and values are appended to `past`; `mask` says which of those in it a row sees (none: causal)."""
        q, k, v, gate = self.project(x, rope)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*past, strict=True))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)
        return self.o_proj(out.flatten(2) * gate)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, c: dict):
        super().__init__()
        self.gate_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.up_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = Linear(c["intermediate_size"], c["hidden_size"], zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer of either kind."""

    def __init__(self, c: dict, kind: str):
        super().__init__()
        self.mixer_name = "linear_attn" if kind == "linear_attention" else "self_attn"
        self.add_module(self.mixer_name, GatedDeltaNet(c) if kind == "linear_attention" else Attention(c))
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], *cache) -> Tensor:
        """x [B, T, hidden] -> same; `cache` goes to attention."""
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), rope, *cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The language model up to its final norm."""

    def __init__(self, c: dict):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=c["initializer_range"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [B, T] -> hidden states after the final norm [B, T, hidden] in dtype: what the head and the drafter read."""
        x = self.embed_tokens(tokens).to(dtype)
        rope = rotary(tokens.shape[1], self.config, tokens.device)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)


class Drafter(nn.Module):
    """MTP head: from the hidden state of position p and the token at p+1, the hidden state that predicts the token at p+2."""

    def __init__(self, c: dict):
        super().__init__()
        self.config = c
        self.pre_fc_norm_embedding = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.pre_fc_norm_hidden = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.fc = Linear(2 * c["hidden_size"], c["hidden_size"])
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], past: list, mask: Tensor) -> Tensor:
        """embedded, hidden [B, T, hidden] -> drafted hidden states [B, T, hidden]; one drafting step for every position at once."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(joined), rope, past, mask))


class DemoModel(nn.Module):
    """Target and drafter; the embedding is also the head of both."""

    def __init__(self, c: dict = CONFIG):
        super().__init__()
        self.config = c
        self.model = Target(c)
        self.mtp = Drafter(c)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> [..., vocabulary]."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def draft(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Draft `steps` tokens deep from every position, the true tokens fed in (teacher forcing).

        tokens [B, T], hidden [B, T, hidden] of the target. Item s of the result, [B, T, hidden], holds at row p the state that predicts
        token p+2+s. As in drafting, step s reads its own output of step s-1 as hidden state, stands at position p+s, and sees the keys of
        step 0 up to p and its own keys of the steps since. Rows with p+1+s >= T see padding and mean nothing. The embedding read
        here gets no gradient.
        """
        length = tokens.shape[1]
        embedded = self.model.embed_tokens.weight.detach().to(hidden.dtype)[tokens]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=tokens.device)
        past, out = [], []
        for step in range(steps):
            shifted = F.pad(embedded[:, step + 1 :], (0, 0, 0, step + 1))
            mask = torch.cat([causal, *[own] * step], 1)
            hidden = self.mtp(shifted, hidden, rotary(length, self.config, tokens.device, step), past, mask)
            out.append(hidden)
        return out
