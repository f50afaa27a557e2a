"""The compiler half of the `cpu` entry: there is nothing to compile under the interpreter."""

from triton.backends.compiler import BaseBackend

MESSAGE = "Triton's cpu entry only serves the interpreter: set TRITON_INTERPRET=1 before Triton is imported."


class InterpreterBackend(BaseBackend):
    """Refuses to compile; the interpreter never asks it to."""

    @staticmethod
    def supports_target(target) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError(MESSAGE)

    def add_stages(self, stages: dict, options: object, *args) -> None:
        raise NotImplementedError(MESSAGE)

    def load_dialects(self, context) -> None:
        raise NotImplementedError(MESSAGE)

    def get_module_map(self) -> dict:
        return {}
