"""Tree speculative decoding for hybrid (Gated DeltaNet + attention) models in vLLM."""

from bole_vllm._pins import VERSION as __version__

__all__ = ["__version__"]
