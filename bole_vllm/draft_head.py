"""The drafter's LM head over a part of the vocabulary.

Most of a draft step is the product with the whole head (248,320 rows in Qwen3.5). Drafts only propose: a token that the drafter cannot
name is sampled all the same, as the bonus token, so a smaller vocabulary and rounded rows cost acceptance and never change the output.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.utils.torch_utils import async_tensor_h2d

from bole_vllm.config import BoleConfig, BoleConfigError
from bole_vllm.kernels.draft import int8_logits, quantize_rows

# tokens that drafts name where nothing else is said: an eighth of Qwen3.5's head, which as a whole takes longer than the rest of a draft
# step (docs/LOG.md)
DEFAULT_SIZE = 32768
# rounds after which the vocabulary follows what was served: powers of two from the first number, then every so many
FIRST_REFRESH, REFRESH_EVERY = 16, 4096


def load_token_ids(path: str, vocab_size: int, at_least: int) -> list[int]:
    """Distinct token ids of a JSON list, most frequent first.

    Raises:
        BoleConfigError: the file cannot be read, is not such a list, or names fewer than `at_least` tokens of the vocabulary.
    """
    try:
        ids = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BoleConfigError(f'"bole.draft_vocab": cannot read {path!r} as a JSON list of token ids: {error}.') from error
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise BoleConfigError(f'"bole.draft_vocab": {path!r} must hold a JSON list of token ids in 0..{vocab_size - 1}.')
    ids = list(dict.fromkeys(ids))
    if len(ids) < at_least:
        raise BoleConfigError(f'"bole.draft_vocab": {path!r} names {len(ids)} tokens, at least {at_least} (topk) are needed.')
    return ids


class DraftHead:
    """Rows of the LM head that drafts may name, at a fixed address, and the counts that choose them.

    With ids the rows are fixed. With a size, they are the tokens served most often so far (prompts and outputs); before anything was
    served the lowest ids, which a BPE tokenizer gives to its earliest and so most frequent merges.
    """

    def __init__(self, head: Tensor, ids: list[int] | None, size: int, int8: bool = False) -> None:
        """head [V, H]: the whole LM head, kept by reference; int8: its rows here are rounded, with a scale each."""
        self.head = head
        vocab_size, device = head.shape[0], head.device
        # [V] tokens served; the fraction orders what was not served by id. None: the ids are given
        self.counts = None if ids is not None else torch.linspace(0.5, 0, vocab_size, device=device)
        # [N] int64 row -> token id
        self.token_ids = torch.tensor(range(size) if ids is None else ids, dtype=torch.int64, device=device)
        rows = len(self.token_ids)
        # [N, H]; [N] fp32 where that is int8
        self.weight = torch.empty(rows, head.shape[1], dtype=torch.int8 if int8 else head.dtype, device=device)
        self.scale = torch.empty(rows, dtype=torch.float32, device=device) if int8 else None
        self._take_rows()
        self.rounds = 0

    def _take_rows(self) -> None:
        """The weights of `token_ids`, in place."""
        if self.scale is None:
            torch.index_select(self.head, 0, self.token_ids, out=self.weight)
        else:
            quantize_rows(self.head, self.token_ids, self.weight, self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, H] -> [rows, N]."""
        return F.linear(hidden, self.weight) if self.scale is None else int8_logits(hidden, self.weight, self.scale)

    def count_prompt(self, prompt: list[int] | None) -> None:
        """Count a new request's prompt; None: it came as embeddings. Served tokens are counted where rounds are (metrics.py). No host
        sync."""
        if self.counts is not None and prompt:
            tokens = async_tensor_h2d(prompt, dtype=torch.int64, device=self.head.device)
            self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def end_round(self) -> None:
        """Follow the counts when it is time. In place and without host sync, so that captured graphs see the new rows."""
        self.rounds += 1
        due = self.rounds % REFRESH_EVERY == 0 or (self.rounds >= FIRST_REFRESH and self.rounds & (self.rounds - 1) == 0)
        if self.counts is not None and due:
            self.token_ids.copy_(self.counts.topk(self.token_ids.shape[0]).indices.sort().values)
            self._take_rows()


def build_draft_head(draft_model: nn.Module, config: BoleConfig) -> DraftHead | None:
    """The head asked for by `bole.draft_vocab` and `bole.draft_head`; None where it is the whole one.

    Raises:
        BoleConfigError: a part is asked for, and the model's head is no plain matrix of one rank.
    """
    draft_vocab, int8 = config.draft_vocab, config.draft_head == "int8"
    if draft_vocab == 0:
        return None
    head = _plain_head(draft_model)
    if draft_vocab is None:
        return None if head is None or head.shape[0] <= 2 * DEFAULT_SIZE else DraftHead(head, None, DEFAULT_SIZE, int8)
    if head is None:
        raise BoleConfigError('"bole.draft_vocab" needs an unquantized LM head without scaling: leave it out for this model.')
    if isinstance(draft_vocab, str):
        ids = load_token_ids(draft_vocab, head.shape[0], config.topk)
        return DraftHead(head, ids, len(ids), int8)
    return DraftHead(head, None, min(draft_vocab, head.shape[0]), int8)


def _plain_head(draft_model: nn.Module) -> Tensor | None:
    """[V, H] the LM head's rows, if its logits are nothing but products with them, and all of them lie here."""
    weight, processor = getattr(draft_model.lm_head, "weight", None), draft_model.logits_processor
    plain = weight is not None and weight.dim() == 2 and weight.is_floating_point() and weight.element_size() >= 2
    if not plain or weight.shape[0] < processor.org_vocab_size or processor.scale != 1.0 or processor.soft_cap is not None:
        return None
    return weight.detach()[: processor.org_vocab_size]
