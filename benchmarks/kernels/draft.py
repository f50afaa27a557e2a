"""Naming a depth's drafts: from the rows' hidden vectors to their best tokens, with the whole LM head and with parts of it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Arm, Case, Check, Context, Ready
from benchmarks.kernels.gates import flag
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.oracle import largest
from benchmarks.kernels.problem import DTYPE
from bole_vllm.draft_head import DEFAULT_SIZE, DraftHead
from bole_vllm.kernels.draft import top_children

# rows a request and depth, as many as children of a node
BEAM = 4
# (hidden size, vocabulary)
HEADS = {"9b": (4096, 248320), "27b": (5120, 248320), "tiny": (96, 300)}
# largest error of logits over the largest: rounded to bfloat16, and with int8 weights besides
BOUND, BOUND_INT8 = 1e-2, 3e-2


def cases(options: Options) -> list[Case]:
    return [
        Case("draft", {"shape": shape, "T": BEAM, "B": requests}, functools.partial(_arms, shape=shape, requests=requests))
        for shape, requests in options.draft_grid()
    ]


def _arms(context: Context, shape: str, requests: int) -> list[Arm]:
    (width, vocab), device = HEADS[shape], context.device
    gen = torch.Generator(device=device).manual_seed(SEED)
    hidden = torch.randn(context.batch(requests) * BEAM, width, generator=gen, device=device, dtype=DTYPE)
    head = torch.randn(vocab, width, generator=gen, device=device, dtype=DTYPE) * width**-0.5
    part = min(DEFAULT_SIZE, vocab // 2)

    def ready(logits, num_rows: int, bound: float, weight_bytes: int) -> Ready:
        found = {}

        def step(_i: int) -> None:
            found["logits"] = logits(hidden)
            found["token"], _ = top_children(found["logits"], BEAM)

        def gate() -> list[Check]:
            exact = hidden.float() @ head[:num_rows].float().T
            best = exact.topk(BEAM).indices
            shared = (found["token"][:, :, None] == best[:, None, :]).any(-1).float().mean().item()
            one.extra["best_kept"] = round(shared, 4)
            return [Check("logits", largest(found["logits"], exact), bound), flag("a best token of four is lost", shared < 0.75)]

        one = Ready(step, gate, floor_bytes=weight_bytes)
        return one

    def whole() -> Ready:
        return ready(lambda x: F.linear(x, head), vocab, BOUND, head.nbytes)

    def of_part(int8: bool) -> Ready:
        own = DraftHead(head, None, part, int8)
        return ready(own.logits, part, BOUND_INT8 if int8 else BOUND, own.weight.nbytes)

    return [
        Arm("int8 part", functools.partial(of_part, True), baseline="part"),
        Arm("part", functools.partial(of_part, False), baseline="whole"),
        Arm("whole", whole),
    ]
