"""The record of one patch."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A change to one attribute of vLLM, with the paperwork that lets it go again.

    Attributes:
        id: short name, unique.
        target: `module:qualified.name` of what is replaced.
        kind: "wrapped method" | "swapped name" | "replaced body".
        why: what it is for, and why no hook serves.
        upstream: link of the upstream change that would remove it, or why there is none.
        remove_when: the condition under which it goes.
        fingerprint: first 16 hex digits of the SHA-256 of the target's source in the supported vLLM.
        test: the test that fails without it.
        replace: original -> replacement.
    """

    id: str
    target: str
    kind: str
    why: str
    upstream: str
    remove_when: str
    fingerprint: str
    test: str
    replace: Callable[[Any], Any]

    def resolve(self) -> tuple[Any, str, Any]:
        """(owner, attribute name, current value); AttributeError or ImportError if the target is gone."""
        module_name, path = self.target.split(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name)


def fingerprint(function: Any) -> str:
    """Fingerprint of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
