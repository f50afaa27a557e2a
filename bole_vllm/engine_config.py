"""Checks an engine's configuration and sets what trees need, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from bole_vllm.config import BoleConfig, BoleConfigError, is_requested
from bole_vllm.draft_head import load_token_ids

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

logger = init_logger("vllm.bole")

# model architecture -> class in bole_vllm.models that replaces it while Bole is on
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLM",
}
SCHEDULER = "bole_vllm.scheduler.make_scheduler"
WORKERS = {"cpu": "bole_vllm.worker_cpu.CPUTreeWorker", "cuda": "bole_vllm.worker_gpu.GPUTreeWorker"}

# attribute of the speculative config of an engine with Bole: all that a request's validation gets to see
_EVERY_NODE = "bole_samples_every_node"


def samples_every_node(speculative_config: SpeculativeConfig | None) -> bool:
    """Whether this is the speculative config of an engine with Bole."""
    return getattr(speculative_config, _EVERY_NODE, False)


def prepare(vllm_config: VllmConfig) -> BoleConfig | None:
    """Check and complete the configuration of an engine in place; None where Bole was not asked for.

    Raises:
        BoleConfigError: for anything that cannot work; the text says what to change.
    """
    if not is_requested(vllm_config) or _is_draft_view(vllm_config):
        return None
    _check_method(vllm_config)
    config = BoleConfig.from_vllm(vllm_config)
    _check_model(vllm_config)
    _check_runner(vllm_config)
    _check_parallelism(vllm_config)
    _check_speculation(vllm_config)
    _check_features(vllm_config)
    _check_draft_vocab(vllm_config, config)
    changes = _choose_worker(vllm_config)
    changes += _set_state_dtype(vllm_config)
    changes += _set_token_budget(vllm_config, config)
    changes += _set_graphs(vllm_config, config)
    changes += _set_attention_backend(vllm_config)
    changes += _set_scheduler(vllm_config)
    setattr(vllm_config.speculative_config, _EVERY_NODE, True)
    logger.info(
        "Bole: trees of %d nodes (topk %d, depth %d, commit %s, %s); set %s.",
        config.tree_size,
        config.topk,
        config.deepest,
        config.commit,
        config.precision,
        ", ".join(changes),
    )
    return config


def _is_draft_view(vllm_config: VllmConfig) -> bool:
    """The drafter's model is built under a copy of the engine's configuration, checked already."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is speculative.target_model_config:
        return False  # drafters without a model of their own (ngram) name the target's
    return vllm_config.model_config is speculative.draft_model_config


def _check_method(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise BoleConfigError(
            'Bole needs a drafter: add --speculative-config \'{"method": "mtp", "num_speculative_tokens": 31}\', '
            'or remove "bole" from the additional config.'
        )
    if speculative.method != "mtp":
        raise BoleConfigError(
            f'Bole drafts with the model\'s own MTP head; the speculative method is {speculative.method!r}. Set "method": "mtp", '
            'or remove "bole" from the additional config.'
        )


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    architecture = model.architecture
    if architecture not in ARCHITECTURES:
        raise BoleConfigError(
            f"Bole needs a model with Gated DeltaNet layers and an MTP head; {architecture} is not one it knows "
            f'({", ".join(ARCHITECTURES)}). Remove "bole" from the additional config to serve this model.'
        )
    text = model.hf_text_config
    if "linear_attention" not in (getattr(text, "layer_types", None) or []):
        raise BoleConfigError('This model has no Gated DeltaNet layers (layer_types has no linear_attention): remove "bole".')
    num_mtp = getattr(text, "mtp_num_hidden_layers", None) or getattr(text, "num_nextn_predict_layers", None) or 0
    if num_mtp < 1 and "Next" not in architecture:
        raise BoleConfigError(
            "This checkpoint has no MTP head (mtp_num_hidden_layers is 0 or missing), so there is nothing to draft with: "
            'use a checkpoint that has one, or remove "bole".'
        )


def _check_draft_vocab(vllm_config: VllmConfig, config: BoleConfig) -> None:
    if not config.draft_vocab:
        return
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise BoleConfigError('"bole.draft_vocab" does not work with tensor parallelism: leave it out, or set --tensor-parallel-size 1.')
    vocab_size = vllm_config.model_config.get_vocab_size()
    if isinstance(config.draft_vocab, str):
        load_token_ids(config.draft_vocab, vocab_size, config.topk)
    elif config.draft_vocab >= vocab_size:
        raise BoleConfigError(
            f'"bole.draft_vocab" is {config.draft_vocab}, the vocabulary has {vocab_size} tokens: set it to 0 to draft with all.'
        )


def _check_runner(vllm_config: VllmConfig) -> None:
    if not vllm_config.use_v2_model_runner:
        raise BoleConfigError("Bole runs on vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER=0 (or set it to 1).")


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name, option in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise BoleConfigError(
                f"Bole does not support {option} {getattr(parallel, name)}: set it to 1 (use tensor parallelism instead)."
            )
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise BoleConfigError("Bole walks each tree on every rank: remove --enable-batch-sharded-sampling.")
    if getattr(parallel, "enable_dbo", False):
        raise BoleConfigError("Bole does not support dual batch overlap: remove --enable-dbo.")


def _check_speculation(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative.draft_sample_method != "greedy":
        raise BoleConfigError('Bole\'s drafts are the top-k of the draft head: leave "draft_sample_method" at "greedy".')
    if speculative.rejection_sample_method != "standard":
        raise BoleConfigError('Bole accepts by walking the tree with target samples: leave "rejection_sample_method" at "standard".')
    for name in ("enable_adaptive_verification", "use_local_argmax_reduction", "disable_padded_drafter_batch"):
        if getattr(speculative, name, False):
            raise BoleConfigError(f'Bole does not work with "{name}" in the speculative config: remove it.')


def _check_features(vllm_config: VllmConfig) -> None:
    if vllm_config.kv_transfer_config is not None:
        raise BoleConfigError("Bole moves KV after sampling, which KV connectors do not wait for: remove --kv-transfer-config.")
    if getattr(vllm_config, "watermark_config", None) is not None:
        raise BoleConfigError("Bole does not support watermarking: remove the watermark config.")
    cache = vllm_config.cache_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        raise BoleConfigError(
            f"Bole's tree attention reads KV caches in the model's dtype; --kv-cache-dtype is {cache.cache_dtype!r}: set it to auto."
        )
    if cache.mamba_cache_mode == "all":
        raise BoleConfigError("Bole supports --mamba-cache-mode align or none, not all.")


def _choose_worker(vllm_config: VllmConfig) -> list[str]:
    parallel = vllm_config.parallel_config
    worker = WORKERS.get(current_platform.device_type)
    if worker is None:
        raise BoleConfigError(f"Bole runs on CUDA GPUs (and on CPUs for testing), not on {current_platform.device_type}.")
    if current_platform.device_type == "cpu":
        from bole_vllm import cpu

        if not cpu.interpreting():
            raise BoleConfigError("On a CPU Bole's kernels run in Triton's interpreter: set TRITON_INTERPRET=1 in the environment.")
    if parallel.worker_cls not in ("auto", worker):
        raise BoleConfigError(f"Bole brings its own worker class; --worker-cls is {parallel.worker_cls!r}: remove it.")
    parallel.worker_cls = worker
    return [f"worker {worker.rsplit('.', 1)[1]}"]


def _set_state_dtype(vllm_config: VllmConfig) -> list[str]:
    cache = vllm_config.cache_config
    wanted = getattr(vllm_config.model_config.hf_text_config, "mamba_ssm_dtype", None)
    if cache.mamba_ssm_cache_dtype == "auto" and wanted in (None, "float32"):
        cache.mamba_ssm_cache_dtype = "float32"
        return ["float32 recurrent state"]
    if cache.mamba_ssm_cache_dtype != "float32":
        raise BoleConfigError(
            f"Bole commits into a float32 recurrent state; --mamba-ssm-cache-dtype is {cache.mamba_ssm_cache_dtype!r}: set it to float32."
        )
    return []


def _set_token_budget(vllm_config: VllmConfig, config: BoleConfig) -> list[str]:
    """Every decode row costs `tree_size` tokens of the step's budget; fewer would make requests wait a step."""
    scheduler = vllm_config.scheduler_config
    needed = scheduler.max_num_seqs * config.tree_size
    if scheduler.max_num_scheduled_tokens is not None and scheduler.max_num_scheduled_tokens < needed:
        raise BoleConfigError(
            f"max_num_scheduled_tokens={scheduler.max_num_scheduled_tokens} is less than max_num_seqs * tree_size = "
            f"{scheduler.max_num_seqs} * {config.tree_size} = {needed}: raise it, or lower max_num_seqs or num_speculative_tokens."
        )
    if scheduler.max_num_batched_tokens >= needed:
        return []
    if not scheduler.enable_chunked_prefill:
        raise BoleConfigError(
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than max_num_seqs * tree_size = {needed}: raise it, "
            "or lower max_num_seqs or num_speculative_tokens."
        )
    scheduler.max_num_batched_tokens = needed
    return [f"max_num_batched_tokens {needed}"]


def _set_graphs(vllm_config: VllmConfig, config: BoleConfig) -> list[str]:
    """CUDA graphs and torch.compile stay as vLLM has them; on a CPU, where the kernels are interpreted, both are off."""
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if current_platform.device_type == "cpu":
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.model_config.enforce_eager = True
        return ["eager execution"]
    largest = compilation.max_cudagraph_capture_size or max(compilation.cudagraph_capture_sizes or [0])
    if 0 < largest < config.tree_size:
        raise BoleConfigError(
            f"The largest CUDA graph to capture holds {largest} tokens, less than one tree of {config.tree_size} nodes: leave "
            "cudagraph_capture_sizes and max_cudagraph_capture_size out."
        )
    return []


def _set_attention_backend(vllm_config: VllmConfig) -> list[str]:
    if current_platform.device_type == "cpu":
        return ["tree attention"]  # the CPU platform has one backend, which the worker overrides
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention = vllm_config.attention_config
    if attention.backend not in (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM):
        raise BoleConfigError(
            f"Bole verifies trees with its own attention backend, built on FlashAttention; --attention-backend is "
            f"{attention.backend.name}: remove it."
        )
    draft_backend = getattr(vllm_config.speculative_config, "attention_backend", None)
    if draft_backend not in (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM):
        raise BoleConfigError('Remove "attention_backend" from the speculative config: trees are drafted with Bole\'s own backend.')
    attention.backend = AttentionBackendEnum.CUSTOM
    return ["attention backend CUSTOM (tree attention)"]


def _set_scheduler(vllm_config: VllmConfig) -> list[str]:
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise BoleConfigError(
            f"Bole brings its own scheduler class, for grammars on trees; --scheduler-cls is {scheduler.scheduler_cls!r}: remove it."
        )
    scheduler.scheduler_cls = SCHEDULER
    return ["scheduler"]
