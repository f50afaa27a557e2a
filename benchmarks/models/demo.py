"""The demo model's network, corpus, evaluation and training as modules; its scripts import each other by bare names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _load(names: tuple[str, ...]) -> list[ModuleType]:
    """Modules of examples.demo_model, each known by its bare name too while those after it are imported."""
    before = {name: sys.modules.get(name) for name in names}
    try:
        for name in names:
            sys.modules[name] = importlib.import_module(f"examples.demo_model.{name}")
        return [sys.modules[name] for name in names]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


model, corpus, evaluate, train = _load(("model", "corpus", "evaluate", "train"))
