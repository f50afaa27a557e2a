"""vLLM load format `scale_up`: a large checkpoint's weights go from the small model straight into the parameters, on their device.

    register_loader()
    LLM(folder, load_format="scale_up", model_loader_extra_config={"small": "examples/demo_model", "seed": 0}, ...)

`folder` holds config.json and tokenizer (`scale_up.write_folder`). Register in the process that loads: with
VLLM_ENABLE_V1_MULTIPROCESSING=0, or under fork, the caller's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.models.scale_up import scaled_weights

FORMAT = "scale_up"
OPTIONS = {"small", "seed"}


def load_small(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """(tensors, configuration) of a small model's folder."""
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def target_only(name: str) -> bool:
    """Whether the target, and not its drafter alone, has this tensor."""
    return not name.startswith("mtp.")


def register_loader() -> None:
    """Make the load format known to vLLM in this process; a second call changes nothing."""
    from vllm.model_executor import model_loader

    if FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @model_loader.register_model_loader(FORMAT)
    class ScaleUpLoader(model_loader.BaseModelLoader):
        """Loads target or drafter, each its own tensors only."""

        def __init__(self, load_config):
            super().__init__(load_config)
            options = dict(load_config.model_loader_extra_config)
            if not {"small"} <= set(options) <= OPTIONS:
                raise ValueError(f"{FORMAT}: model_loader_extra_config takes {sorted(OPTIONS)}, 'small' always; found {sorted(options)}")
            self.small, self.seed = Path(options["small"]), int(options.get("seed", 0))

        def download_model(self, model_config) -> None:
            """Nothing to download."""

        def load_weights(self, model, model_config) -> None:
            state, small_config = load_small(self.small)
            config = json.loads(Path(model_config.model, "config.json").read_text())
            unused = getattr(model, "is_unused_checkpoint_weight", None)  # drafters have it
            only = target_only if unused is None else lambda name: not unused(name)
            device = next(model.parameters()).device
            weights = scaled_weights(state, small_config, config, self.seed, dtype=model_config.dtype, device=device, only=only)
            with torch.no_grad():
                loaded = model.load_weights(weights)
            if missing := {name for name, _ in model.named_parameters()} - loaded:
                raise ValueError(f"{FORMAT}: not loaded: {', '.join(sorted(missing))}")
