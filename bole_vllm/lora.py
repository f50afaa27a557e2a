"""LoRA adapters of a step's rows."""

from __future__ import annotations

import numpy as np
from vllm.v1.worker.gpu.lora_utils import LoraState


class TreeLoraState(LoraState):
    """vLLM's, with an adapter for every row of logits: vLLM names one a request, which an LM head's adapter needs more of."""

    def __init__(self, max_num_reqs: int) -> None:
        super().__init__(max_num_reqs)
        # [num_reqs] rows of logits of each request of the step; set by the model state before the adapters are asked for
        self.num_logits_np = np.ones(0, dtype=np.int32)

    def make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens):
        _, of_tokens, requests = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens)
        return tuple(self.lora_ids[idx_mapping].repeat(self.num_logits_np)), of_tokens, requests
