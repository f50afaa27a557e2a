"""Takes four costs out of Triton's interpreter that buy nothing. CPU only; changes no result.

1. Every device function called inside a kernel (tl.max, tl.sum, our helpers) patches `triton.language` again, about
   0.4 ms a call, though the launch has patched it already.
2. Every int32 add, subtract and multiply computes an overflow check that is dropped unless debugging is on.
3. Every tensor and every block type makes its shape anew, checks it and spells it out, though there are a few dozen shapes.
4. Every operation makes the table of NumPy's types again.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple

from bole_vllm import _pins

_state: dict[str, Any] = {"installed": False, "core_patched": False}
_np_dtypes: dict[str, Any] = {}


def speed_up() -> None:
    """Patch the interpreter of the pinned Triton release; idempotent, and nothing on another release."""
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    if _state["installed"] or triton.__version__ != _pins.TRITON_CPU:
        return
    _state["installed"] = True
    interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _state["init_block_type"], _state["init_tensor"] = core.block_type.__init__, core.tensor.__init__
    core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
    _state["np_dtype"], interpreter._get_np_dtype = interpreter._get_np_dtype, _np_dtype


class _Shape(NamedTuple):
    """What block types and tensors of one shape share; none of it is ever written."""

    of_type: Any
    of_tensor: Any
    num_elements: int
    numel: Any
    text: str


@cache
def _shape(dims: tuple[int, ...]) -> _Shape:
    from triton._utils import validate_block_shape
    from triton.language import core

    of_type, num_elements = core.tuple(dims), validate_block_shape(dims)
    of_tensor = core.tuple([core.constexpr(d) for d in dims])
    return _Shape(of_type, of_tensor, num_elements, core.constexpr(num_elements), str(of_type))


def _init_block_type(self, element_ty, shape):
    """block_type.__init__ for shapes of plain integers, as the interpreter has them; Triton's own for all others, and its errors."""
    dims = tuple(shape if isinstance(shape, list) else getattr(shape, "values", ()))
    if not dims or any(type(d) is not int for d in dims):
        return _state["init_block_type"](self, element_ty, shape)
    shared = self.shared_shape = _shape(dims)
    self.element_ty, self.shape, self.numel = element_ty, shared.of_type, shared.num_elements
    self.name = f"<{shared.text}, {element_ty}>"


def _init_tensor(self, handle, type):
    shared = getattr(type, "shared_shape", None) if type.is_block() else _shape(())
    if shared is None:
        return _state["init_tensor"](self, handle, type)
    self.handle, self.type, self.dtype, self.shape, self.numel = handle, type, type.scalar, shared.of_tensor, shared.numel


def _np_dtype(of):
    """_get_np_dtype, looked up by the scalar type's name."""
    name = of.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _state["np_dtype"](of)
    return _np_dtypes[name]


def _call_device_function(self, *args, **kwargs):
    import triton.language as tl
    from triton.runtime import interpreter

    # Functions of triton's own library see `tl.core`, which the launch does not patch and which, once patched, stays so.
    if not _state["core_patched"] and tl.core in self.fn.__globals__.values():
        interpreter._patch_lang(self.fn)
        _state["core_patched"] = True
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
