from .path_copy import KVTable, move_kv

__all__ = ["KVTable", "move_kv"]
