"""What a CUDA graph does to the Python around it, without a GPU.

A captured graph runs kernels on the addresses that its capture saw; whatever Python made since then it never hears of. Here
"capture" keeps vLLM's forward closure with the metadata and tensors of the capture, and "replay" calls it again. A tensor that a step
makes anew, where it should have filled a fixed one, leaves the replay with the capture's contents.
"""

from __future__ import annotations

from collections import Counter

import torch
from e2e_helpers import graph_managers, runner


def install(llm, monkeypatch) -> Counter:
    """Capture an engine's decode batches as on a GPU with FULL graphs; counts the replays by manager."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    run, replays = runner(llm), Counter()

    @torch.inference_mode()
    def capture(self, create_forward_fn, _description="") -> None:
        for descriptor in self._capture_descs[CUDAGraphMode.FULL]:
            forward = create_forward_fn(descriptor, warmup=False)
            forward(CUDAGraphMode.NONE)
            self.graphs[descriptor] = forward
        self._graphs_captured = True

    @torch.inference_mode()
    def replay(self, descriptor) -> None:
        replays[names[id(self)]] += 1
        self.graphs[descriptor](CUDAGraphMode.NONE)

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", replay)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _self: None, raising=False)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    mode, compilation = CUDAGraphMode.FULL_DECODE_ONLY, run.vllm_config.compilation_config
    nodes = run.decode_query_len
    # one request, and four for what lies between (of every number of drafts)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 4, nodes, 4 * nodes], 4 * nodes
    compilation.cudagraph_mode = mode
    run.cudagraph_manager = ModelCudaGraphManager(run.vllm_config, run.device, mode, decode_query_len=nodes)
    run.speculator.init_cudagraph_manager(mode)
    run.cudagraph_manager.capture(
        run.model, run.model_state, run.input_buffers, run.intermediate_tensors, run.block_tables, run.attn_groups, run.kv_cache_config
    )
    run.model_state.capture_inner_cudagraphs(run.input_buffers, run.block_tables, run.attn_groups, run.kv_cache_config)
    run.speculator.capture()
    names = {id(manager): name for name, manager in graph_managers(llm).items()}
    return replays
