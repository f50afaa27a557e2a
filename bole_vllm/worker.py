"""The part of Bole's worker that does not depend on the platform."""

from __future__ import annotations

from typing import Any

from bole_vllm import activation


class TreeWorker:
    """Mixin before one of vLLM's worker classes, named by `parallel_config.worker_cls`."""

    def __init__(self, vllm_config, *args: Any, **kwargs: Any) -> None:
        activation.activate()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """As the base class, then with Bole's speculator in place of the MTP chain speculator."""
        super().init_device()
        from bole_vllm.proposer import TreeSpeculator

        runner = self.model_runner
        runner.speculator = TreeSpeculator(self.vllm_config, runner.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As the base class, then with drafts that go to the scheduler as trees."""
        super().load_model(*args, **kwargs)
        from bole_vllm.draft_tokens import TreeDraftTokensHandler
        from bole_vllm.lora import TreeLoraState

        runner = self.model_runner
        runner.draft_tokens_handler = TreeDraftTokensHandler(runner.device, runner.model_state.trees)
        if runner.lora_config is not None:
            runner.lora_state = runner.model_state.lora_state = TreeLoraState(runner.max_num_reqs)

    def bole_stats(self) -> dict[str, Any]:
        """Counters and sizes of this worker; synchronises with the device. See bole_vllm.metrics."""
        return self.model_runner.model_state.stats()
