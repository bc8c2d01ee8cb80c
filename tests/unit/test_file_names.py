"""File names, patterns and the texts of /proc, over arbitrary bytes: nothing crashes, nothing is mistaken for a leftover."""

import errno
import importlib.util
import os
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import bytecode, caches, filesystems, ledger, logs, names, openfiles, printing, removal, tree
from cleanslate.model import Verdict

NAMES = st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name)
NEVER_TOUCHED = [
    "lttng-ust-wait-8", "libpod_lock", "libpod_rootless_lock_1000", "dcgm", "PostgreSQL.12", "pulse-shm-1", "mps.shm",
    "nvidia-mps",
]  # fmt: skip
FAMILIES = [
    ("psm_3fa2b1c0", "python-shared-memory"),
    ("sem.mp-a1_b2c3d", "python-semaphore"),
    ("sem.loky-4711-x9", "loky-semaphore"),
    ("vllm_mm_AbCdEfGhIjKlMnOpQrSt-_", "vllm"),
    ("VLLM_OBJECT_STORAGE_SHM_BUFFER", "vllm"),
    ("VLLM_OBJECT_STORAGE_SHM_BUFFER_" + "0123456789abcdef" * 2, "vllm"),
    ("vllm_offload_engine-0.mmap", "vllm"),
    ("vllm_ec_1.mmap", "vllm"),
    ("my-vLLM-buffer", "vllm-chosen-name"),
    ("nccl-Xa81Bz", "nccl"),
    ("rccl-Xa81Bz", "rccl"),
    ("hsa_1", "rocm"),
    ("torch_4711_1804289383_0", "torch"),
    ("cuda.shm.3e8.1a2b.1", "cuda-ipc"),
    ("sgl_shm_kv_4711_0a1b2c3d", "sglang"),
    ("multi_tokenizer_args_4711", "sglang"),
    ("sglang_loads_x_0a1b.shm", "sglang"),
    ("nvshmem-shm4711", "nvshmem"),
    ("ucx_shm_posix_1a2b", "ucx"),
    ("vader_segment.node.0.1.0", "open-mpi"),
    ("sm_segment.node.0.1.0", "open-mpi"),
    ("psm2_shm.1", "psm2"),
    ("mooncake_segment", "mooncake"),
    ("plasma-1", "ray"),
]
STRANGERS = [
    "psm_3fa2b1c", "psm_3fa2b1c0d", "psm_3FA2B1C0", "psm_3fa2b1c0\n", "\npsm_3fa2b1c0", "xpsm_3fa2b1c0",
    "sem.mp-a1b2c3d", "sem.mp-A1B2C3D4", "semXmp-a1b2c3d4", "sem.other", "nccl", "torch_x", "my-app", "VLL_M", "dcgm_vllm_psm",
]  # fmt: skip


@pytest.mark.parametrize(("name", "family"), FAMILIES)
def test_a_known_programs_name_has_its_family(name: str, family: str) -> None:
    """Every form in the field has a row."""
    assert names.family(name.encode()) == family


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_name_has_no_family(name: str) -> None:
    """The whole name counts, to the last byte, a line feed included."""
    assert names.family(name.encode()) is None


def test_a_chosen_name_counts_only_where_it_may() -> None:
    """In a volume, only the names that vLLM itself makes."""
    assert names.family(b"vllm.yaml", broad=False) is None
    assert names.family(b"vllm_ec_1.mmap", broad=False) == "vllm"


@given(NAMES)
def test_every_name_with_vllm_in_it_has_a_family_unless_never_touched(name: bytes) -> None:
    """In any case, between any bytes."""
    for inner in (b"vllm", b"vLLM", b"VLLM"):
        whole = name + inner + name
        assert (names.family(whole) is None) == names.is_never_touched(whole)


@pytest.mark.parametrize("name", NEVER_TOUCHED)
@pytest.mark.parametrize("rest", ["", "vllm", "\nvllm"])
def test_what_is_never_touched_has_no_family(name: str, rest: str) -> None:
    """Although a family's pattern matches it too."""
    assert names.is_never_touched((name + rest).encode())
    assert names.family((name + rest).encode()) is None


@given(NAMES)
def test_a_printed_name_is_one_line_of_valid_text(name: bytes) -> None:
    """Whatever the bytes, it can be written to a terminal and to JSON."""
    text = printing.printable(name)
    assert text.isprintable()
    assert text.encode("utf-8")
    assert printing.printable(os.fsdecode(name)) == text


@given(NAMES, NAMES)
def test_two_names_never_look_the_same(one: bytes, other: bytes) -> None:
    """Nobody can hide a file behind another's name."""
    assert (printing.printable(one) == printing.printable(other)) == (one == other)


@given(st.text(st.sampled_from("\\x0a\n\x85\xff\udcff\u2028u"), min_size=1))
def test_an_escape_cannot_be_forged(text: str) -> None:
    """A name that spells an escape prints otherwise than the byte that the escape stands for."""
    assert os.fsencode(text) == _unprinted(printing.printable(text))


def _unprinted(text: str) -> bytes:
    """The bytes of a printed name: what a reader does with the escapes."""
    result, rest = b"", text
    while rest:
        if not rest.startswith("\\"):
            result, rest = result + rest[0].encode(), rest[1:]
        elif rest[1] == "\\":
            result, rest = result + b"\\", rest[2:]
        elif rest[1] == "x":
            result, rest = result + bytes([int(rest[2:4], 16)]), rest[4:]
        else:
            digits = 4 if rest[1] == "u" else 8
            result, rest = result + chr(int(rest[2 : 2 + digits], 16)).encode(), rest[2 + digits :]
    return result


@given(st.lists(st.one_of(st.binary(max_size=80), st.just(b"7f00-7f01 r--s 0 00:2c 6   /dev/shm/a b (deleted)"))))
def test_any_maps_text_is_read(lines: list[bytes]) -> None:
    """A mapping is found whatever surrounds it, and no text is fatal."""
    found = openfiles.parse_maps(b"\n".join(lines))
    good = lines.count(b"7f00-7f01 r--s 0 00:2c 6   /dev/shm/a b (deleted)")
    assert found.count((os.makedev(0, 0x2C), 6, b"a b")) >= good


TMPFS, OVERLAY = filesystems.Filesystem.of_kind("tmpfs", 44), filesystems.Filesystem.of_kind("overlay", 45)


@pytest.mark.parametrize(
    ("seen", "filesystem", "used"),
    [
        ({"opened": {(7, 3)}}, TMPFS, True),
        ({"opened": {(8, 3), (7, 4)}}, TMPFS, False),
        ({"mapped": {(44, 3)}}, TMPFS, True),
        ({"mapped": {(43, 3), (44, 4)}}, TMPFS, False),
        ({"mapped_names": {b"x.so"}}, TMPFS, False),
        ({"mapped_names": {b"x.so"}}, OVERLAY, True),
        ({"mapped": {(44, 3)}, "unread": "/proc/9"}, TMPFS, True),
        ({"unread": "/proc/9"}, TMPFS, None),
        ({}, filesystems.UNKNOWN, None),
    ],
)
def test_the_slower_proof_says_used_unused_or_unknown(
    seen: dict[str, Any], filesystem: filesystems.Filesystem, used: bool | None
) -> None:
    """A device and an inode together are a file; one process unread makes every other answer unknown."""
    sets = {key: frozenset(value) if isinstance(value, set) else value for key, value in seen.items()}
    status = os.stat_result((0o100600, 3, 7, 1, 0, 0, 0, 0, 0, 0))
    assert openfiles.OpenFiles(taken_s=0.0, **sets).uses(status, "x.so", filesystem) is used


@given(st.binary(max_size=300))
def test_any_mountinfo_is_read(noise: bytes) -> None:
    """No text is fatal."""
    assert filesystems.Mounts(noise).of(-1) is filesystems.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "proof"),
    [
        ("tmpfs", filesystems.Proof.LEASE),
        ("ext4", filesystems.Proof.LEASE),
        ("overlay", filesystems.Proof.SCAN),
        ("nfs4", filesystems.Proof.NONE),
        ("lustre", filesystems.Proof.NONE),
        ("fuse.juicefs", filesystems.Proof.NONE),
        ("a new one", filesystems.Proof.NONE),
    ],
)
def test_the_proof_that_holds_depends_on_the_filesystem(kind: str, proof: filesystems.Proof) -> None:
    """What other machines may have open cannot be proved unused from here."""
    assert filesystems.Filesystem.of_kind(kind, 1).proof is proof


def test_a_file_on_a_shared_filesystem_is_kept(tmp_path: object) -> None:
    """Whatever this machine says about its use."""
    path = os.path.join(str(tmp_path), "log")
    with open(path, "w", encoding="utf-8"):
        pass
    fd = os.open(str(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        folder = ledger.Folder(fd, str(tmp_path), filesystems.Filesystem.of_kind("nfs4", 1))
        remover = removal.Remover(now=os.stat(path).st_mtime + 1, min_age_s=0, dry_run=False)
        finding = remover.dispose(folder, "log")
    finally:
        os.close(fd)
    assert finding is not None
    assert (finding.verdict, finding.reason) == (Verdict.KEEP, "its use cannot be told")
    assert os.path.exists(path)


@given(st.text(max_size=60))
def test_a_path_is_plain_or_refused(text: str) -> None:
    """Its components are real names, and joined they are an absolute path."""
    try:
        parts = tree.parts_of(text)
    except tree.RefusedPathError as refusal:
        parts, message = (), str(refusal)
    if not parts:
        assert message.isprintable()
        return
    assert not {"", ".", ".."} & set(parts)
    assert os.path.normpath(text).lstrip("/") == "/".join(parts)


@given(st.lists(st.sampled_from(["var", "lib", "docker", "etc", "opt", "", ".", "..", "dev"]), max_size=6))
def test_no_spelling_gets_past_the_limits(parts: list[str]) -> None:
    """A path that is admitted is below none of the places off limits, however many slashes it has."""
    try:
        admitted = tree.joined(tree.admit("/" + "/".join(parts), ()))
    except tree.RefusedPathError:
        return
    assert not any(tree.is_below(admitted, limit) for limit in tree.OFF_LIMITS)


@given(st.text(max_size=60))
def test_any_request_is_read_or_refused_with_a_sentence(text: str) -> None:
    """Bad input is one line that says what is known and what to write."""
    parsers = (
        bytecode.parse_bytecode,
        logs.parse_log,
        lambda text: caches.parse_cache(text, environ={}, home="/root", user="root"),
    )
    for parse in parsers:
        message = None
        try:
            parse(text)
        except ValueError as refusal:
            message = str(refusal)
        assert message is None or ("cannot parse" in message and ";" in message)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (bytecode.parse_bytecode, "/opt", "--bytecode '/opt': cannot parse: not PATH:PATTERN"),
        (bytecode.parse_bytecode, "opt:*", "--bytecode 'opt:*': cannot parse: not PATH:PATTERN"),
        (logs.parse_log, "*.log", "--log '*.log': cannot parse: not an absolute pattern of files"),
        (logs.parse_log, "/var/**/x", "--log '/var/**/x': cannot parse: '**' is not known"),
    ],
)
def test_a_bad_request_says_which_and_why(parse: object, text: str, message: str) -> None:
    """The message begins with the flag and its value."""
    assert callable(parse)
    with pytest.raises(ValueError, match="cannot parse") as refusal:
        parse(text)
    assert str(refusal.value).startswith(message)


def test_an_unknown_cache_lists_the_known() -> None:
    """So that the next try is right."""
    with pytest.raises(ValueError, match="no such cache; known are vllm, triton, inductor"):
        caches.parse_cache("vlm", environ={}, home="/root", user="root")


@pytest.mark.parametrize(
    ("text", "environ", "path"),
    [
        ("vllm", {}, "/root/.cache/vllm"),
        ("vllm", {"VLLM_CACHE_ROOT": "/data/vllm", "XDG_CACHE_HOME": "/x"}, "/data/vllm"),
        ("vllm", {"VLLM_CACHE_ROOT": "~/vllm"}, "/root/vllm"),
        ("vllm", {"XDG_CACHE_HOME": "/x"}, "/x/vllm"),
        ("vllm=/y", {"VLLM_CACHE_ROOT": "/data/vllm"}, "/y"),
        ("triton", {"TRITON_HOME": "/t"}, "/t/.triton/cache"),
        ("inductor", {}, "/tmp/torchinductor_root"),
        ("inductor", {"TORCHINDUCTOR_CACHE_DIR": "/i"}, "/i"),
        ("flashinfer", {"FLASHINFER_WORKSPACE_BASE": "/f"}, "/f/.cache/flashinfer"),
        ("deep-gemm", {}, "/root/.deep_gemm"),
        ("cuda-jit", {"CUDA_CACHE_PATH": ""}, "/root/.nv/ComputeCache"),
        ("torch-extensions", {"TORCH_EXTENSIONS_DIR": "/e"}, "/e"),
        ("torch-extensions-locks", {}, "/root/.cache/torch_extensions"),
    ],
)
def test_a_cache_lies_where_its_own_program_puts_it(text: str, environ: dict[str, str], path: str) -> None:
    """The variables of each program first, then the user's home."""
    assert caches.parse_cache(text, environ=environ, home="/root", user="root").path == path


MODULES = st.text(st.sampled_from(string.ascii_letters + string.digits + "_-."), min_size=1, max_size=20)


@given(MODULES.filter(lambda name: not name.startswith(".")), st.sampled_from(["", "1", "2"]))
def test_bytecode_is_traced_to_the_source_that_python_compiled(module: str, optimization: str) -> None:
    """By the very names that this interpreter gives, dots in a file's name included."""
    compiled = os.path.basename(importlib.util.cache_from_source(f"/x/{module}.py", optimization=optimization))
    assert bytecode.source_of(compiled) == f"{module}.py"


@given(NAMES)
def test_any_name_has_a_source_file_name_or_none(name: bytes) -> None:
    """Never a path out of the directory."""
    source = bytecode.source_of(os.fsdecode(name))
    assert source is None or (source.endswith(".py") and "/" not in source and source != "..")


def test_a_long_report_keeps_its_failures() -> None:
    """What could not be removed is listed though a thousand files were kept for good reasons before it."""
    book = ledger.Ledger(dry_run=False)
    folder = ledger.Folder(-1, "/dev/shm", filesystems.UNKNOWN)
    for number in range(ledger.LIST_LIMIT + 5):
        book.add(ledger.Finding(Verdict.KEEP, "it is in use", "lease"), folder, f"psm_{number:08x}")
    book.add(ledger.Finding(Verdict.REMOVE, "unused", "lease", 4096, os.strerror(errno.EPERM)), folder, "stuck")
    tally = book.tally(("/dev/shm",))
    assert tally.kept[0].path == "/dev/shm/stuck"
    assert len(tally.kept) == ledger.LIST_LIMIT
    assert tally.kept_count == ledger.LIST_LIMIT + 6
    assert (tally.removed_count, tally.bytes_freed) == (0, 0)
