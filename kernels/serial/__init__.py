from .snapshot_tree import serial_tree

__all__ = ["serial_tree"]
