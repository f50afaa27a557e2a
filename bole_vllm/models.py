"""vLLM's hybrid models with Bole's per-step state and a recurrent state that holds no drafts."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_5, qwen3_next

from bole_vllm.state_shape import one_state_per_request


class TreeModel:
    """Mixin before a vLLM model class."""

    @staticmethod
    def get_model_state_cls():
        """vLLM's hook for the per-step state of a model (V2 runner)."""
        from bole_vllm.model_state import TreeModelState

        return TreeModelState

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        """(conv state, recurrent state) shapes of one request; vLLM sizes the hybrid cache pages from it."""
        return one_state_per_request(super().get_mamba_state_shape_from_config(vllm_config), vllm_config.num_speculative_tokens)


class Qwen3_5ForCausalLM(TreeModel, qwen3_5.Qwen3_5ForCausalLM):
    pass


class Qwen3_5MoeForCausalLM(TreeModel, qwen3_5.Qwen3_5MoeForCausalLM):
    pass


class Qwen3_5ForConditionalGeneration(TreeModel, qwen3_5.Qwen3_5ForConditionalGeneration):
    pass


class Qwen3_5MoeForConditionalGeneration(TreeModel, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    pass


class Qwen3NextForCausalLM(TreeModel, qwen3_next.Qwen3NextForCausalLM):
    pass
