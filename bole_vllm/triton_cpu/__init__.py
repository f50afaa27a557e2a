"""A `cpu` entry for Triton's backend table, so that vLLM's CPU build keeps Triton enabled.

vLLM's CPU wheel disables Triton unless `triton.backends.backends` has a "cpu" entry, and its V2 model runner needs
Triton. With TRITON_INTERPRET=1 every kernel runs in Triton's interpreter and nothing is ever compiled here; without
it, or where a GPU is present, the entry reports itself inactive.

Triton imports this package in every process that imports Triton, which makes it the earliest moment at which the CPU
path can prepare the process (see bole_vllm.cpu).
"""

from bole_vllm import cpu

cpu.prepare_process()
