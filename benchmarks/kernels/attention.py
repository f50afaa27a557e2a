"""Tree attention against FlashAttention 3 verifying a causal chain of as many rows over the same paged cache.

Another way to attend joins by one more entry in `_arms`: a step, and the mask that its gate has to expect.
"""

from __future__ import annotations

import functools
import math

import torch

from benchmarks.kernels.case import Arm, Case, Check, Context, Ready, Skip
from benchmarks.kernels.gates import flag
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.oracle import largest
from benchmarks.kernels.problem import DTYPE, make_forest
from benchmarks.shapes import ATTENTION, LAYERS, TINY_ATTENTION, AttentionShape
from benchmarks.timing import num_sets
from benchmarks.trees import draft_trees
from bole_vllm.kernels.attention import tree_attention

MAX_DEPTH = 8
SMALL_BLOCK = 16
# scores of the keys after the prefix are larger by this, so that a wrong mask shows beside thousands of prefix keys
TAIL_GAIN = 4.0
# largest error over the largest output; probabilities are rounded to bfloat16 before they meet V
BOUND = 1.5e-2


def hybrid_block_size() -> int:
    """Tokens of vLLM's attention blocks in a hybrid 9B model: as many as a GDN layer's state has bytes for, a multiple of 16."""
    layer, attention = LAYERS["9b"], ATTENTION["9b"]
    per_token = 2 * attention.kv_heads * attention.head_size * 2
    return SMALL_BLOCK * math.ceil((layer.state_bytes + layer.conv_state_bytes) / (SMALL_BLOCK * per_token))


def cases(options: Options) -> list[Case]:
    shape = TINY_ATTENTION if options.tiny else ATTENTION["9b"]
    blocks = (SMALL_BLOCK,) if options.tiny else (SMALL_BLOCK, hybrid_block_size())
    return [
        Case(
            "attention",
            {"shape": shape.name, "T": rows, "prefix": prefix, "B": requests, "block_size": block},
            functools.partial(_arms, shape=shape, rows=rows, prefix=prefix, requests=requests, block=block),
        )
        for rows, prefix, requests in options.attention_grid()
        for block in blocks
    ]


class Attention:
    """One attention layer over a paged cache; input set i has its own blocks and queries."""

    def __init__(
        self, shape: AttentionShape, rows: int, prefix: int, requests: int, block: int, device: torch.device, sets: int | None
    ) -> None:
        self.shape, self.rows, self.prefix, self.requests, self.device = shape, rows, prefix, requests, device
        keys = prefix + rows
        per_request = math.ceil(keys / block)
        self.num_sets = sets or num_sets(shape.floor(rows * requests, keys * requests))
        gen = torch.Generator(device=device).manual_seed(SEED)
        total = self.num_sets * requests * per_request
        size = (total + 1, block, shape.kv_heads, 2 * shape.head_size)
        # [blocks, HKV, block size, 2 D] with tokens outside heads, vLLM's default order; block 0 is nobody's
        self.cache = torch.randn(size, generator=gen, device=device, dtype=DTYPE).transpose(1, 2)
        order = torch.randperm(total, generator=gen, device=device).to(torch.int32) + 1
        self.tables = list(order.view(self.num_sets, requests, per_request))
        tail = torch.arange(prefix, keys, device=device)
        for table in self.tables:
            blocks = table[:, tail // block].long()
            self.cache[blocks, :, tail % block, : shape.head_size] *= TAIL_GAIN
        query = (requests * rows, shape.query_heads, shape.head_size)
        self.q = [torch.randn(query, generator=gen, device=device, dtype=DTYPE) for _ in self.tables]
        self.out = [torch.full(query, float("nan"), dtype=DTYPE, device=device) for _ in self.tables]
        self.trees = draft_trees(requests, rows, MAX_DEPTH, SEED + rows)
        self.forest = make_forest(self.trees, device)
        self.num_rows = self._filled(rows)
        self.prefix_len = self._filled(prefix)
        self.seq_len = self._filled(keys)
        self.query_start = torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
        self.scale = shape.head_size**-0.5

    def _filled(self, value: int) -> torch.Tensor:
        return torch.full((self.requests,), value, dtype=torch.int32, device=self.device)

    @property
    def tree_arguments(self) -> dict:
        """Those of the tree kernels that every input set shares."""
        return {
            "kv_cache": self.cache,
            "token_start": self.forest.token_start,
            "num_rows": self.num_rows,
            "prefix_len": self.prefix_len,
            "row_mask": self.forest.ancestors,
            "mask_start": self.forest.node_offset[:-1],
            "scale": self.scale,
            "num_slots": self.rows,
            "max_rows": self.rows,
        }

    def tree(self, i: int) -> None:
        tree_attention(q=self.q[i], block_table=self.tables[i], out=self.out[i], **self.tree_arguments)

    def wanted(self, visible: torch.Tensor) -> torch.Tensor:
        """[token rows, HQ, D] fp32 arithmetic over what rows see: [R, rows, keys] bool."""
        shape, keys = self.shape, self.prefix + self.rows
        group, block = shape.query_heads // shape.kv_heads, self.cache.shape[2]
        at = torch.arange(keys, device=self.device)
        found = []
        for r in range(self.requests):
            # [keys, HKV, 2 D]
            kv = self.cache[self.tables[0][r, at // block].long(), :, at % block].float()
            k, v = kv.repeat_interleave(group, 1).split(shape.head_size, dim=-1)
            q = self.q[0][r * self.rows : (r + 1) * self.rows].float()
            scores = torch.einsum("thd,khd->htk", q, k) * self.scale
            weights = torch.softmax(scores.masked_fill(~visible[r], float("-inf")), dim=-1)
            found.append(torch.einsum("htk,khd->thd", weights, v))
        return torch.cat(found)

    def visible(self, trees: list[list[int]] | None) -> torch.Tensor:
        """[R, rows, keys] by the parents of `trees`; None: causal."""
        seen = torch.zeros(self.requests, self.rows, self.prefix + self.rows, dtype=torch.bool)
        seen[:, :, : self.prefix] = True
        for r in range(self.requests):
            for i in range(self.rows):
                parent = i - 1 if trees is None else trees[r][i]
                if parent >= 0:
                    seen[r, i] |= seen[r, parent]
                seen[r, i, self.prefix + i] = True
        return seen.to(self.device)

    def gate(self, trees: list[list[int]] | None) -> list[Check]:
        out = self.out[0]
        precise = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        want = self.wanted(self.visible(trees))
        torch.backends.cuda.matmul.allow_tf32 = precise
        return [Check("out", largest(out, want), BOUND), flag("every row finite", not bool(out.isfinite().all()))]


class Flash:
    """FlashAttention 3 as vLLM calls it, on the inputs of an `Attention`."""

    def __init__(self, attention: Attention) -> None:
        if not torch.cuda.is_available():
            raise Skip("FlashAttention 3 needs a GPU")
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
        except Exception as error:  # a build for another torch fails in many ways
            raise Skip(f"vLLM's FlashAttention cannot be imported: {type(error).__name__}: {error}") from error
        self.function, self.schedule, self.attention = flash_attn_varlen_func, get_scheduler_metadata, attention
        self.k, self.v = attention.cache.transpose(1, 2).split(attention.shape.head_size, dim=-1)

    def metadata(self, keys: torch.Tensor, max_keys: int, causal: bool, splits: int) -> torch.Tensor:
        """The work plan that vLLM makes once a step and all layers share."""
        a = self.attention
        return self.schedule(
            batch_size=a.requests,
            max_seqlen_q=a.rows,
            max_seqlen_k=max_keys,
            num_heads_q=a.shape.query_heads,
            num_heads_kv=a.shape.kv_heads,
            headdim=a.shape.head_size,
            cache_seqlens=keys,
            qkv_dtype=DTYPE,
            cu_seqlens_q=a.query_start,
            page_size=a.cache.shape[2],
            causal=causal,
            num_splits=splits,
        )

    def call(self, i: int, keys: torch.Tensor, max_keys: int, causal: bool, splits: int = 0, plan=None, with_lse: bool = False):
        a = self.attention
        return self.function(
            q=a.q[i],
            k=self.k,
            v=self.v,
            out=a.out[i],
            cu_seqlens_q=a.query_start,
            max_seqlen_q=a.rows,
            seqused_k=keys,
            max_seqlen_k=max_keys,
            softmax_scale=a.scale,
            causal=causal,
            block_table=a.tables[i],
            return_softmax_lse=with_lse,
            scheduler_metadata=plan,
            num_splits=splits,
            fa_version=3,
        )


# vLLM's bound on splits while it captures graphs
GRAPH_SPLITS = 32


def _arms(context: Context, shape: AttentionShape, rows: int, prefix: int, requests: int, block: int) -> list[Arm]:
    a = Attention(shape, rows, prefix, requests, block, context.device, sets=None if context.timed else 1)
    floor = shape.floor(rows * requests, (prefix + rows) * requests)

    def ready(step, trees: list[list[int]] | None, note: str = "") -> Ready:
        a.out[0].fill_(float("nan"))
        return Ready(step, lambda: a.gate(trees), a.num_sets, floor, note)

    def chain(planned: bool) -> Ready:
        flash = Flash(a)
        plan = flash.metadata(a.seq_len, prefix + rows, True, GRAPH_SPLITS) if planned else None
        splits = GRAPH_SPLITS if planned else 0
        note = "schedule made ahead, as vLLM under CUDA graphs" if planned else "schedule made in every call"
        return ready(lambda i: flash.call(i, a.seq_len, prefix + rows, True, splits, plan), None, note)

    def merged(planned: bool) -> Ready:
        from bole_vllm.kernels.attention import merge_tree_attention

        flash = Flash(a)
        plan = flash.metadata(a.prefix_len, prefix, False, GRAPH_SPLITS) if planned else None
        splits = GRAPH_SPLITS if planned else 0

        def step(i: int) -> None:
            out, lse = flash.call(i, a.prefix_len, prefix, False, splits, plan, with_lse=True)
            merge_tree_attention(q=a.q[i], block_table=a.tables[i], out=out, lse=lse, **a.tree_arguments)

        return ready(step, a.trees, "FlashAttention 3 over the prefix, then the tree")

    return [
        Arm("tree", lambda: ready(a.tree, a.trees), baseline="fa3 chain planned"),
        Arm("prefix merged planned", functools.partial(merged, True), baseline="fa3 chain planned"),
        Arm("prefix merged", functools.partial(merged, False), baseline="fa3 chain planned"),
        Arm("fa3 chain planned", functools.partial(chain, True)),
        Arm("fa3 chain", functools.partial(chain, False)),
    ]
