from .best_tokens import MAX_CANDIDATES, best_tokens

__all__ = ["MAX_CANDIDATES", "best_tokens"]
