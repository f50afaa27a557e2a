"""The one place that says which releases this version of Bole supports.

Read by setup.py, the start-up checks, the patches, the README's table and CI. It imports nothing, so that setup.py can
execute it before anything is installed.
"""

VERSION = "0.1.0"
PYTHON = ">=3.11"
VLLM = "0.32.0"
TORCH = "2.13.0"
TRITON_CPU = "3.9.0"  # under the interpreter; a GPU installation takes the release that its torch asks for
FLASH_LINEAR_ATTENTION = "0.6.0"
