"""Parsers of /proc over the texts that the kernel writes and over arbitrary bytes, and reads of this very process."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import procfs
from cleanslate.devices import DeviceNumbers
from cleanslate.model import Pid
from unit.examples import process

# comm, state, ppid, pgrp, session, tty, tpgid, flags, four faults, four times, priority, nice, threads, interval, start
AFTER_COMM = b" S 1 42 40 0 -1 4194560 10 0 0 0 5 6 0 0 20 0 3 0 98765 1000 200 18446744073709551615"
NO_DEVICES = DeviceNumbers(nodes={}, majors={})

comms = st.binary(max_size=64) | st.sampled_from(
    [b"", b")", b"(", b") S 1 1 1", b"a) R 0 (b", b"new\nline", b"\xff\xfe", b"((sd-pam))", b"x" * 15]
)


@given(comms, st.integers(1, 2**22))
def test_stat_is_parsed_whatever_the_comm_is(comm: bytes, pid: int) -> None:
    """Anyone may name a process so that its stat seems to have other fields: the last parenthesis ends the comm."""
    stat = procfs.parse_stat(b"%d (%b)%b\n" % (pid, comm, AFTER_COMM))
    assert os.fsencode(stat.comm) == comm
    assert (stat.pid, stat.state, stat.ppid, stat.pgid, stat.sid) == (pid, "S", 1, 42, 40)
    assert (stat.flags, stat.threads, stat.start_ticks) == (4194560, 3, 98765)


@given(st.binary(max_size=300) | st.binary(max_size=40).map(lambda junk: b"1 (x" + junk + AFTER_COMM))
def test_stat_of_arbitrary_bytes_is_parsed_or_refused(text: bytes) -> None:
    """ValueError, and nothing else, says that this is no stat."""
    try:
        stat = procfs.parse_stat(text)
    except ValueError:
        return
    assert isinstance(stat.start_ticks, int)


@pytest.mark.parametrize("text", [b"", b"1", b"1 (a) S 1", b"x (a)" + AFTER_COMM, b"1 (a) S x" + AFTER_COMM[4:]])
def test_a_stat_cut_short_or_garbled_is_refused(text: bytes) -> None:
    """Nothing is guessed of a process that could not be read."""
    with pytest.raises(ValueError):
        procfs.parse_stat(text)


@given(st.lists(st.binary(max_size=20).map(lambda part: part.replace(b"\0", b"")), max_size=6), st.integers(0, 50))
def test_cmdline_gives_back_the_arguments(arguments: list[bytes], padding: int) -> None:
    """Each argument byte for byte, empty ones between others too; padding at the end is none."""
    found = procfs.parse_cmdline(b"".join(one + b"\0" for one in arguments) + b"\0" * padding)
    while arguments and not arguments[-1]:
        arguments.pop()
    assert [os.fsencode(one) for one in found] == arguments


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ()),
        (b"\0\0\0", ()),
        (b"VLLM::EngineCore\0\0\0\0\0", ("VLLM::EngineCore",)),
        (b"VLLM::EngineCore", ("VLLM::EngineCore",)),
        (b"vllm\0\0serve\0", ("vllm", "", "serve")),
        (b"\xff\0", ("\udcff",)),
    ],
    ids=["a kernel thread", "all erased", "a padded title", "a title cut off", "an empty argument", "not UTF-8"],
)
def test_cmdline_forms(data: bytes, expected: tuple[str, ...]) -> None:
    """A title that setproctitle wrote over the arguments is one argument."""
    assert procfs.parse_cmdline(data) == expected


@given(st.binary(max_size=200))
def test_cmdline_of_arbitrary_bytes_has_no_nul(data: bytes) -> None:
    """Whatever it holds."""
    found = procfs.parse_cmdline(data)
    assert not any("\0" in one for one in found)
    assert found == () or found[-1] != ""


def test_status_is_read_line_by_line() -> None:
    """Tabs and blanks are trimmed; a value may hold colons; a name with an escaped line feed makes no line."""
    text = "Name:\tvllm\\nUid:\t7\nUid:\t1000\t1000\t1000\t1000\nNSpid:\t4711\t12\nGroups:\t \nx:\ty: z\nno colon\n"
    status = procfs.parse_status(text)
    assert status["Uid"] == "1000\t1000\t1000\t1000"
    assert status["NSpid"].split() == ["4711", "12"]
    assert (status["Groups"], status["x"]) == ("", "y: z")
    assert "no colon" not in status


@given(st.text(max_size=200))
def test_status_of_arbitrary_text_never_fails(text: str) -> None:
    """Every key comes from a line with a colon."""
    assert len(procfs.parse_status(text)) <= text.count(":")


def test_this_process_is_in_a_scan_as_it_is() -> None:
    """Identity, parent, group and command line, against what the system calls say."""
    scan = procfs.scan(NO_DEVICES)
    me = scan.processes[Pid(os.getpid())]
    assert (me.ppid, me.pgid, me.sid) == (os.getppid(), os.getpgid(0), os.getsid(0))
    assert me.argv[0] == os.fsdecode(pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\0")[0])
    assert me.device_numbers == frozenset()
    assert scan.silent == ()


def test_details_of_this_process_are_what_it_says_of_itself() -> None:
    """Executable, cgroups, user and PID namespace."""
    stat = procfs.read_stat(Pid(os.getpid()))
    assert stat is not None
    me = procfs.with_details(procfs.bare(stat))
    assert me.executable == os.path.realpath("/proc/self/exe")
    assert me.cgroup == pathlib.Path("/proc/self/cgroup").read_text() == procfs.own_cgroup()
    assert me.uid == os.getuid()
    assert me.inner_pid == os.getpid()
    assert abs(procfs.started_at_s(me) - time.time()) < 24 * 3600


def test_what_is_gone_is_unknown_and_no_error() -> None:
    """A process that ended in between: nothing of it is known."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pid = Pid(gone.pid)
    assert procfs.read_stat(pid) is None
    assert procfs.pipes(pid) is None
    assert procfs.is_severed(pid, Pid(os.getpid())) is None
    assert procfs.wait_channel(pid) == ""
    unknown = procfs.with_details(process(pid, executable="x", cgroup="y", uid=0))
    assert (unknown.executable, unknown.cgroup, unknown.uid) == (None, "", None)
    assert (unknown.executable_trusted, unknown.foreign_pid_namespace) == (None, None)


def test_pipes_are_told_by_inode_and_end() -> None:
    """The reading end only reads; sockets and files are no pipes."""
    reads, writes = os.pipe()
    try:
        inode = os.fstat(reads).st_ino
        found = procfs.pipes(Pid(os.getpid()))
        assert found is not None
        assert (found[reads], found[writes]) == ((inode, True), (inode, False))
    finally:
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize(("kept_by_parent", "severed"), [("reads", False), ("writes", False), ("none", True)], ids=str)
def test_a_child_is_severed_when_nobody_writes_and_its_parent_shares_nothing(
    kept_by_parent: str, severed: bool
) -> None:
    """The kernel's answer on a pipe whose creator is gone, and the opposite while the parent holds either end."""
    reads, writes = os.pipe()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(reads,))
    ends = {"reads": reads, "writes": writes}
    for name, descriptor in ends.items():
        if name != kept_by_parent:
            os.close(descriptor)
    try:
        assert procfs.is_severed(Pid(child.pid), Pid(os.getpid())) is severed
    finally:
        child.communicate()
        if kept_by_parent in ends:
            os.close(ends[kept_by_parent])


def test_standard_streams_sever_nobody() -> None:
    """A server whose log reader is gone has an orphaned pipe on its standard streams, and that proves nothing."""
    reads, writes = os.pipe()
    child = subprocess.Popen(["sleep", "60"], stdin=reads)
    os.close(reads)
    os.close(writes)
    try:
        assert procfs.is_severed(Pid(child.pid), Pid(os.getpid())) is False
    finally:
        child.kill()
        child.wait()
