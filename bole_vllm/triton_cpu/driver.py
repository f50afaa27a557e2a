"""The driver half of the `cpu` entry."""

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from bole_vllm import cpu


class InterpreterDriver(DriverBase):
    """Active only under TRITON_INTERPRET=1 on a machine without a GPU."""

    @classmethod
    def is_active(cls) -> bool:
        return cpu.interpreting()

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the interpreter launches no C++")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self):
        raise NotImplementedError("the interpreter's speed means nothing; benchmark on a GPU")
