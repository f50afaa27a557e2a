"""Tree speculative decoding for hybrid (Gated DeltaNet + attention) models in vLLM."""

from pathlib import Path

from bole_vllm._pins import VERSION as __version__

__all__ = ["__version__"]

# In a source tree `kernels` and `patches` lie beside this folder; an installation holds them inside it.
_HERE = Path(__file__).parent
if not (_HERE / "kernels").exists() and (_HERE.parent / "kernels" / "precision.py").exists():
    __path__.append(str(_HERE.parent))
