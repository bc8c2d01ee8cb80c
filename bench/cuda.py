"""Holds memory on a real GPU through the CUDA driver itself: it needs no PyTorch.

Run as a program (`cuda.py GPU BYTES`) it prints "ready" and holds until its standard input ends.
"""

import ctypes
import sys

CHUNK_BYTES = 1 << 30


def hold(gpu: int, size_bytes: int) -> None:
    """Makes a context on GPU `gpu` and allocates there until this process ends. Raises RuntimeError."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(cuda.cuInit, 0)
    _call(cuda.cuDeviceGet, ctypes.byref(device), gpu)
    _call(cuda.cuCtxCreate_v2, ctypes.byref(context), 0, device)
    held = 0
    while held < size_bytes:
        piece = min(CHUNK_BYTES, size_bytes - held)
        pointer = ctypes.c_uint64()
        _call(cuda.cuMemAlloc_v2, ctypes.byref(pointer), ctypes.c_size_t(piece))
        _call(cuda.cuMemsetD8_v2, pointer, ctypes.c_ubyte(1), ctypes.c_size_t(piece))
        held += piece


def _call(function: "ctypes._FuncPointer", *arguments: object) -> None:
    """Calls the driver. Raises RuntimeError with CUresult's number."""
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"{function.__name__}: cannot do: CUresult {code}; look it up in cuda.h")


if __name__ == "__main__":
    hold(int(sys.argv[1]), int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.read()
