"""What the interpreter's sped-up types hold: the same as Triton's own, and the same errors."""

import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from bole_vllm import _pins, interpreter

pytestmark = pytest.mark.skipif(triton.__version__ != _pins.TRITON_CPU, reason="nothing is patched on another release")

SHAPES = ([1], [16], [4, 8], [2, 1, 32], tl.core.tuple([64, 2]))


@pytest.fixture(autouse=True)
def sped_up():
    interpreter.speed_up()


def triton_made(cls, init: str, *args):
    made = cls.__new__(cls)
    interpreter._state[init](made, *args)
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("element", [tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.int64)], ids=str)
def test_block_types_and_tensors(element, shape):
    ours, theirs = tl.block_type(element, shape), triton_made(tl.block_type, "init_block_type", element, shape)
    assert ours == theirs
    assert (ours.name, ours.numel, ours.scalar) == (theirs.name, theirs.numel, theirs.scalar)
    assert ours.shape.values == theirs.shape.values and ours.shape.type == theirs.shape.type
    check_tensors(ours)


def check_tensors(of):
    handle = object()
    ours, theirs = tl.tensor(handle, of), triton_made(tl.tensor, "init_tensor", handle, of)
    assert ours.handle is handle and ours.type is of and vars(ours).keys() == vars(theirs).keys()
    assert ours.dtype == theirs.dtype and ours.numel.value == theirs.numel.value
    assert [d.value for d in ours.shape] == [d.value for d in theirs.shape] and ours.shape.type == theirs.shape.type


def test_scalars():
    for of in (tl.float32, tl.pointer_type(tl.bfloat16)):
        check_tensors(of)


@pytest.mark.parametrize("shape", [[], [3], [16, 0], [tl.constexpr(12)], [1 << 21], (4, 8)], ids=str)
def test_errors_are_tritons(shape):
    with pytest.raises((TypeError, ValueError, AssertionError)) as theirs:
        triton_made(tl.block_type, "init_block_type", tl.float32, shape)
    with pytest.raises(type(theirs.value)) as ours:
        tl.block_type(tl.float32, shape)
    assert str(ours.value) == str(theirs.value)


def test_numpy_types():
    own = interpreter._state["np_dtype"]
    scalars = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32)]
    for of in (*scalars, *(tl.block_type(one, [8]) for one in scalars)):
        assert triton_interpreter._get_np_dtype(of) == own(of)
