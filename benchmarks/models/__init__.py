"""Checkpoints of large shapes that compute what a small trained model computes: real acceptance at real cost, without a download."""
