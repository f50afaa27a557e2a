"""bole_vllm.engine_config on configurations that vLLM built: what is refused, with which advice, and what is set."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from bole_vllm import engine_config as checks
from bole_vllm.config import BoleConfigError

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
on_cpu = pytest.mark.skipif(current_platform.device_type != "cpu", reason="what the CPU path sets")


def engine_config(model: Path = DEMO_MODEL, drafts: int = 7, speculative: dict | None = None, bole: object = None, **kwargs):
    """What `LLM(model, ...)` would run with: vLLM's own configuration, Bole asked for.

    `speculative` is merged into the MTP settings; `bole` is the value of the additional config's key (default: {}).
    """
    spec = {"method": "mtp", "num_speculative_tokens": drafts, **(speculative or {})}
    defaults = {"speculative_config": spec, "additional_config": {"bole": {} if bole is None else bole}}
    return EngineArgs(model=str(model), **{**defaults, **kwargs}).create_engine_config()


def refusal(**kwargs) -> str:
    """The text with which building the engine's configuration is refused by Bole."""
    with pytest.raises(ValidationError) as refused:
        engine_config(**kwargs)
    (error,) = refused.value.errors()
    assert isinstance(error["ctx"]["error"], BoleConfigError)
    return str(error["ctx"]["error"])


def refusal_of(config) -> str:
    """The text with which Bole refuses a configuration changed after vLLM built it."""
    with pytest.raises(BoleConfigError) as refused:
        checks.prepare(config)
    return str(refused.value)


def variant(folder: Path, drop: str = "", **changes) -> Path:
    """The demo model's config.json with some entries changed; there is nothing else in the folder."""
    settings = {**json.loads((DEMO_MODEL / "config.json").read_text()), **changes}
    settings.pop(drop, None)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


# -- refused: how the engine is asked for --------------------------------------------------------------------------

CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
TWO_RANKS = {"distributed_executor_backend": "mp"}
REFUSED = {
    "no speculation": (
        {"speculative_config": None},
        'Bole needs a drafter: add --speculative-config \'{"method": "mtp", "num_speculative_tokens": 31}\', '
        'or remove "bole" from the additional config.',
    ),
    "ngram": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 7}},
        'Bole drafts with the model\'s own MTP head; the speculative method is \'ngram\'. Set "method": "mtp", '
        'or remove "bole" from the additional config.',
    ),
    "unknown key": (
        {"bole": {"top_k": 4}},
        "Unknown key 'top_k' in additional_config[\"bole\"]. Known keys: "
        "topk, max_depth, tree_size, verify, commit, precision, draft_vocab, draft_head, debug.",
    ),
    "a draft vocabulary on two ranks": (
        {"bole": {"draft_vocab": 512}, "tensor_parallel_size": 2, **TWO_RANKS},
        '"bole.draft_vocab" does not work with tensor parallelism: leave it out, or set --tensor-parallel-size 1.',
    ),
    "a draft vocabulary as large as the model's": (
        {"bole": {"draft_vocab": 4096}},
        '"bole.draft_vocab" is 4096, the vocabulary has 4096 tokens: set it to 0 to draft with all.',
    ),
    "pipeline parallelism": (
        {"pipeline_parallel_size": 2, **TWO_RANKS},
        "Bole does not support --pipeline-parallel-size 2: set it to 1 (use tensor parallelism instead).",
    ),
    "decode context parallelism": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2, **TWO_RANKS},
        "Bole does not support --decode-context-parallel-size 2: set it to 1 (use tensor parallelism instead).",
    ),
    "prefill context parallelism": (
        {"prefill_context_parallel_size": 2, **TWO_RANKS},
        "Bole does not support --prefill-context-parallel-size 2: set it to 1 (use tensor parallelism instead).",
    ),
    "batch-sharded sampling": (
        {"enable_batch_sharded_sampling": True},
        "Bole walks each tree on every rank: remove --enable-batch-sharded-sampling.",
    ),
    "dual batch overlap": ({"enable_dbo": True}, "Bole does not support dual batch overlap: remove --enable-dbo."),
    "sampled drafts": (
        {"speculative": {"draft_sample_method": "probabilistic"}},
        'Bole\'s drafts are the top-k of the draft head: leave "draft_sample_method" at "greedy".',
    ),
    "synthetic acceptance": (
        {"speculative": {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}},
        'Bole accepts by walking the tree with target samples: leave "rejection_sample_method" at "standard".',
    ),
    "adaptive verification": (
        {"speculative": {"enable_adaptive_verification": True}},
        'Bole does not work with "enable_adaptive_verification" in the speculative config: remove it.',
    ),
    "local argmax": (
        {"speculative": {"use_local_argmax_reduction": True}},
        'Bole does not work with "use_local_argmax_reduction" in the speculative config: remove it.',
    ),
    "unpadded drafter": (
        {"speculative": {"disable_padded_drafter_batch": True}},
        'Bole does not work with "disable_padded_drafter_batch" in the speculative config: remove it.',
    ),
    "KV connector": (
        {"kv_transfer_config": CONNECTOR},
        "Bole moves KV after sampling, which KV connectors do not wait for: remove --kv-transfer-config.",
    ),
    "fp8 KV cache": (
        {"kv_cache_dtype": "fp8"},
        "Bole's tree attention reads KV caches in the model's dtype; --kv-cache-dtype is 'fp8': set it to auto.",
    ),
    "worker class": (
        {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"},
        "Bole brings its own worker class; --worker-cls is 'vllm.v1.worker.gpu_worker.Worker': remove it.",
    ),
    "scheduler class": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "Bole brings its own scheduler class, for grammars on trees; --scheduler-cls is 'vllm.v1.core.sched.scheduler.Scheduler': "
        "remove it.",
    ),
    "bfloat16 state": (
        {"mamba_ssm_cache_dtype": "bfloat16"},
        "Bole commits into a float32 recurrent state; --mamba-ssm-cache-dtype is 'bfloat16': set it to float32.",
    ),
    "scheduled tokens": (
        {"max_num_seqs": 16, "max_num_scheduled_tokens": 127},
        "max_num_scheduled_tokens=127 is less than max_num_seqs * tree_size = 16 * 8 = 128: raise it, or lower max_num_seqs or "
        "num_speculative_tokens.",
    ),
    "batched tokens": (
        {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "enable_chunked_prefill": False},
        "max_num_batched_tokens=64 is less than max_num_seqs * tree_size = 128: raise it, or lower max_num_seqs or num_speculative_tokens.",
    ),
    "too many drafts": ({"drafts": 256}, "num_speculative_tokens must be at most 255 with Bole, got 256."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start(name):
    kwargs, text = REFUSED[name]
    assert refusal(**kwargs) == text


def test_v1_runner_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert refusal() == "Bole runs on vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER=0 (or set it to 1)."


@on_cpu
def test_cpu_without_the_interpreter_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert refusal() == "On a CPU Bole's kernels run in Triton's interpreter: set TRITON_INTERPRET=1 in the environment."


def test_watermark_refused():
    config = engine_config()
    config.watermark_config = object()
    assert refusal_of(config) == "Bole does not support watermarking: remove the watermark config."


def test_state_cached_at_every_token_refused():
    """vLLM 0.32 offers `all` for other models only; should it come, it is refused."""
    config = engine_config()
    object.__setattr__(config.cache_config, "mamba_cache_mode", "all")
    assert refusal_of(config) == "Bole supports --mamba-cache-mode align or none, not all."


# -- refused: the model --------------------------------------------------------------------------------------------

NO_WEIGHTS = {"skip_tokenizer_init": True, "load_format": "dummy"}


def test_model_without_gated_deltanet_layers_refused(tmp_path):
    model = variant(tmp_path, layer_types=["full_attention"] * 4)
    text = 'This model has no Gated DeltaNet layers (layer_types has no linear_attention): remove "bole".'
    assert refusal(model=model, **NO_WEIGHTS) == text


def test_model_without_mtp_head_refused(tmp_path):
    model = variant(tmp_path, drop="mtp_num_hidden_layers")
    assert refusal(model=model, **NO_WEIGHTS) == (
        "This checkpoint has no MTP head (mtp_num_hidden_layers is 0 or missing), so there is nothing to draft with: "
        'use a checkpoint that has one, or remove "bole".'
    )


def test_other_architecture_refused(tmp_path):
    """vLLM itself refuses the method mtp for a Llama; other models with an MTP head reach this check."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**llama, **sizes, "max_position_embeddings": 64}))
    config = engine_config()
    config.model_config = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    assert refusal_of(config) == (
        "Bole needs a model with Gated DeltaNet layers and an MTP head; LlamaForCausalLM is not one it knows "
        "(Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration, "
        'Qwen3NextForCausalLM). Remove "bole" from the additional config to serve this model.'
    )


# -- set -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def log():
    """Bole's log lines (vLLM's loggers do not propagate, so caplog does not see them)."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, level = Keep(), checks.logger.level
    checks.logger.addHandler(handler)
    checks.logger.setLevel(logging.INFO)
    yield lines
    checks.logger.setLevel(level)
    checks.logger.removeHandler(handler)


@on_cpu
def test_what_is_set_on_a_cpu(log):
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    config = engine_config(drafts=31, max_num_seqs=128, max_num_batched_tokens=2048)
    assert config.parallel_config.worker_cls == "bole_vllm.worker_cpu.CPUTreeWorker"
    assert config.scheduler_config.scheduler_cls == "bole_vllm.scheduler.make_scheduler"
    assert config.scheduler_config.max_num_batched_tokens == 128 * 32
    assert config.scheduler_config.max_num_scheduled_tokens == 128 * 32
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.use_v2_model_runner
    assert log == [
        "Bole: trees of 32 nodes (topk 4, depth 8, commit replay, fp32); set worker CPUTreeWorker, float32 recurrent state, "
        "max_num_batched_tokens 4096, eager execution, tree attention, scheduler."
    ]


@pytest.mark.parametrize(("seqs", "tokens", "expected"), [(4, 16, 32), (4, 31, 32), (4, 32, 32), (4, 33, 33)])
def test_token_budget_covers_every_request(seqs, tokens, expected, log):
    config = engine_config(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert config.scheduler_config.max_num_batched_tokens == expected
    assert ("max_num_batched_tokens 32" in log[0]) == (tokens < 32)


def test_settings_reach_the_log_line(log):
    engine_config(bole={"topk": 2, "max_depth": 3, "commit": "replay", "precision": "ieee"})
    assert len(log) == 1
    assert log[0].startswith("Bole: trees of 8 nodes (topk 2, depth 3, commit replay, ieee); set worker ")


def test_preparing_twice_changes_nothing():
    config = engine_config(max_num_seqs=512)
    before = (repr(config.scheduler_config), repr(config.parallel_config), repr(config.cache_config), repr(config.compilation_config))
    checks.prepare(config)
    after = (repr(config.scheduler_config), repr(config.parallel_config), repr(config.cache_config), repr(config.compilation_config))
    assert after == before


def test_the_drafters_view_is_left_alone(log):
    """vLLM builds the draft model under a copy of the configuration that names the draft architecture."""
    from vllm.config import replace

    config = engine_config()
    log.clear()
    view = replace(config, model_config=config.speculative_config.draft_model_config)
    assert view.model_config.architecture == "Qwen3_5MTP"
    assert checks.prepare(view) is None
    assert log == []
    assert_registries_are_boles()


def test_no_state_is_reserved_for_drafts():
    """vLLM sizes the recurrent state's conv window by the number of drafts; with Bole it is that of plain decoding."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM as Stock

    from bole_vllm.models import Qwen3_5ForCausalLM

    few, many, plain = engine_config(drafts=1), engine_config(drafts=31), engine_config(speculative_config=None, additional_config={})
    shapes = {Qwen3_5ForCausalLM.get_mamba_state_shape_from_config(config) for config in (few, many)}
    assert shapes == {Stock.get_mamba_state_shape_from_config(plain)}
    assert Stock.get_mamba_state_shape_from_config(many) not in shapes


# -- inert without the key -----------------------------------------------------------------------------------------


def assert_registries_are_vllms() -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    modules = {name: ModelRegistry.models[name].module_name for name in checks.ARCHITECTURES}
    assert set(modules.values()) == {"vllm.model_executor.models.qwen3_5", "vllm.model_executor.models.qwen3_next"}
    assert "QwenGatedDeltaNetAttention" not in op_registry_oot
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()


def assert_registries_are_boles() -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from bole_vllm.gdn import TreeGatedDeltaNet

    assert {ModelRegistry.models[name].module_name for name in checks.ARCHITECTURES} == {"bole_vllm.models"}
    assert op_registry_oot["QwenGatedDeltaNetAttention"] is TreeGatedDeltaNet
    if current_platform.device_type == "cpu":
        assert AttentionBackendEnum.CPU_ATTN.get_path() == "bole_vllm.attention_cpu.TreeCPUAttentionBackend"
    else:
        assert AttentionBackendEnum.CUSTOM.get_path() == "bole_vllm.attention_gpu.TreeFlashAttentionBackend"


PLAIN = {
    "no speculation": {"speculative_config": None},
    "vLLM's MTP chain": {},
    "another plugin's key": {"additional_config": {"other": {"bole": 1}}},
}


@pytest.mark.parametrize("after_bole", [False, True], ids=["alone", "after an engine with Bole"])
@pytest.mark.parametrize("kind", PLAIN)
def test_inert_without_the_key(kind, after_bole, log):
    if after_bole:
        engine_config()
        assert_registries_are_boles()
        log.clear()
    config = engine_config(**{"additional_config": {}, **PLAIN[kind]})
    assert_registries_are_vllms()
    assert (
        config.parallel_config.worker_cls
        == {
            "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
            "cuda": "vllm.v1.worker.gpu_worker.Worker",
        }[current_platform.device_type]
    )
    assert log == []


def test_on_again_after_off():
    for _ in range(2):
        engine_config()
        assert_registries_are_boles()
        engine_config(additional_config={})
        assert_registries_are_vllms()


def test_refused_engine_does_not_switch_bole_on():
    engine_config(additional_config={})
    refusal(bole={"topk": 0})
    assert_registries_are_vllms()


def test_much_memory_for_a_round_comes_with_advice():
    """At 9B, 32 nodes and vLLM's default of 1,024 requests a round's buffers are a tenth of an H200."""
    from bole_vllm.state_cache import memory_advice

    device = 140 << 30
    assert memory_advice(int(0.38 * 2**20 * 32 * 64), device, 64) is None
    assert memory_advice(int(0.38 * 2**20 * 32 * 1024), device, 1024) == (
        "Bole's buffers take 12.2 GiB, 9% of the device: they hold a whole tree for each of max_num_seqs=1024 requests. "
        "Lower --max-num-seqs to what you serve at once, or num_speculative_tokens."
    )
