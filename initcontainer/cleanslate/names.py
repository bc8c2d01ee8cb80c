"""The names of shared memory: which program's leftovers a name can be, and which names are never touched.

A name proves nothing. It only says which files are worth a proof. Names are bytes: the kernel allows every byte but `/` and NUL.
"""

import re

# One row a family: what made it, and the whole name. `.` stands for any byte, line feeds included.
FAMILIES = (
    ("python-shared-memory", rb"psm_[0-9a-f]{8}"),  # CPython multiprocessing.shared_memory; not PSM2's psm2_*
    ("python-semaphore", rb"sem\.mp-[a-z0-9_]{8}"),  # CPython multiprocessing.synchronize
    ("loky-semaphore", rb"sem\.loky-[0-9]+-.+"),
    (
        "vllm",  # multimodal cache of 0.32 and before, key-value offload, encoder cache
        rb"vllm_mm_[A-Za-z0-9_-]{22}|VLLM_OBJECT_STORAGE_SHM_BUFFER(?:_[0-9a-f]{32})?|vllm_(?:offload|ec)_.+\.mmap",
    ),
    ("nccl", rb"nccl-.+"),
    ("rccl", rb"rccl-.+"),
    ("rocm", rb"hsa_.+"),
    ("torch", rb"torch_[0-9]+(?:_[0-9]+){1,2}"),
    ("cuda-ipc", rb"cuda\.shm\.[0-9a-f]+\.[0-9a-f]+\.[0-9a-f]+"),
    ("sglang", rb"sgl_shm_.+|multi_tokenizer_args_[0-9]+|sglang_loads_.+\.shm|sglang_download_lock_.+"),
    ("nvshmem", rb"nvshmem-shm.*"),
    ("ucx", rb"ucx_shm_posix_[0-9a-f]+"),
    ("open-mpi", rb"(?:vader|sm)_segment\..+"),
    ("psm2", rb"psm[23]_.+"),
    ("mooncake", rb"mooncake_.+"),
    ("ray", rb"plasma.*"),
)
# vLLM lets its users choose a name; so broad a pattern holds only where nothing but shared memory lives.
BROAD_FAMILY = ("vllm-chosen-name", rb"(?i:.*vllm.*)")
NEVER = (
    rb"lttng-ust-wait.*",  # tracing
    rb"libpod.*",  # podman's locks
    rb"dcgm.*",
    rb"PostgreSQL\..+",
    rb"pulse-shm-.+",
    rb"(?i:(?:nvidia-)?(?:cuda-)?mps[-_.].*|.*nvidia.*mps.*)",  # the CUDA multi-process service
)


def _table(rows: tuple[tuple[str, bytes], ...]) -> re.Pattern[bytes]:
    """One pattern with a group a family, in order, and none for what is never touched."""
    families = b"|".join(b"(" + pattern + b")" for _, pattern in rows)
    return re.compile(rb"(?!(?:" + b"|".join(NEVER) + rb")\Z)(?:" + families + b")", re.DOTALL)


_ROWS = (*FAMILIES, BROAD_FAMILY)
_STRICT = _table(FAMILIES)
_BROAD = _table(_ROWS)
_NEVER = re.compile(b"|".join(NEVER), re.DOTALL)


def family(name: bytes, *, broad: bool = True) -> str | None:
    """The family that a name in a shared memory directory belongs to; None if it has none or is never touched.

    `broad` allows the names that users choose.
    """
    match = (_BROAD if broad else _STRICT).fullmatch(name)
    return _ROWS[match.lastindex - 1][0] if match and match.lastindex else None


def is_never_touched(name: bytes) -> bool:
    """Whether the name is another program's that must not lose it, whatever else matches."""
    return _NEVER.fullmatch(name) is not None
