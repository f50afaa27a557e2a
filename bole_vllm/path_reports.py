"""What requests are told of their emitted tokens besides the tokens: log-probabilities, and which tokens could have been sampled."""

from __future__ import annotations

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler


class PathReports:
    """The reports of one round. Only rows along the accepted paths are looked at: W a request, the most that a path may have."""

    def __init__(self, sampler: Sampler, idx_mapping_np: np.ndarray) -> None:
        """idx_mapping_np [R]: slots of the round's requests."""
        self.sampler, self.slots = sampler, idx_mapping_np
        # (log-probabilities besides the token's own, token ids that a request names), the most of any request; None: nobody asks
        self.dims = sampler.get_logprobs_dims(idx_mapping_np)
        processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        self.masks, self.processed = sampler.return_sampling_mask, self.dims is not None and processed

    @property
    def wanted(self) -> bool:
        return self.masks or self.dims is not None

    @property
    def need_processed(self) -> bool:
        """Whether logits as they were sampled from are looked at."""
        return self.masks or self.processed

    def logprobs(self, logits: torch.Tensor, sampled: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> LogprobsTensors | None:
        """Of some requests that follow each other. logits [num rows, V]: raw or processed as the mode wants; sampled [num rows]: each row's
        sample; rows [R, W]: the row of every emitted token, any row beyond the last one; slots [R]."""
        if self.dims is None:
            return None
        count, ids = self.dims
        flat = rows.flatten()
        return compute_topk_scores(
            logits[flat], count, sampled[flat], logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots.repeat_interleave(rows.shape[1], output_size=flat.shape[0]), max_per_req_token_ids=ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )  # fmt: skip

    def sampling_mask(self, processed: torch.Tensor, rows: torch.Tensor, num_sampled: torch.Tensor) -> SamplingMaskTensors | None:
        """Of the same requests; processed [num rows, V], num_sampled [R]."""
        if not self.masks:
            return None
        num_reqs, width = rows.shape
        first = torch.arange(0, (num_reqs + 1) * width, width, dtype=torch.int32, device=rows.device)
        most = int(self.sampler.sampling_states.top_k.np[self.slots].max())
        return SamplingMaskTensors.from_logits(processed[rows.flatten()], first, num_sampled, most, width)

    def joined_logprobs(self, parts: list[LogprobsTensors | None], num_reqs: int, width: int) -> LogprobsTensors | None:
        """One for the round: a request's tokens begin every `width` rows."""
        found = [part for part in parts if part is not None]
        return LogprobsTensors.cat(found, list(range(0, (num_reqs + 1) * width, width))) if found else None

    def joined_masks(self, parts: list[SamplingMaskTensors | None]) -> SamplingMaskTensors | None:
        found = [part for part in parts if part is not None]
        return SamplingMaskTensors.cat(found) if found else None


def rows_of_paths(path: torch.Tensor, path_len: torch.Tensor, first_row: torch.Tensor) -> torch.Tensor:
    """[R, W] int64 logits row of every emitted token; a request's first row beyond them. path [R, W] node, path_len [R], first_row [R]."""
    step = torch.arange(path.shape[1], device=path.device)
    return first_row[:, None].long() + torch.where(step < path_len[:, None], path, 0)
