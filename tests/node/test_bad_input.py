"""Bad input and a bad place to run: one clear line on stderr, exit 2, 4 or 5, and nothing half done."""

from collections.abc import Iterator

import pytest

from gpusim import gpusim
from node import servers
from node.eight_gpus import CANNOT_TELL
from node.machine import Machine, program

NOW = ("--timeout", "5s", "--shm-min-age", "0s")
NAME = "psm_0badcafe"


class Mess:
    """A machine with one orphaned worker on a GPU and one leftover name: what must be untouched after a refusal."""

    def __init__(self, machine: Machine, orphan: int) -> None:
        self.machine, self.orphan = machine, orphan
        machine.path(f"/dev/shm/{NAME}").write_bytes(b"left over")

    def untouched(self) -> bool:
        """Whether both are there."""
        return self.machine.alive(self.orphan) and self.machine.names() == {NAME}


@pytest.fixture
def mess() -> Iterator[Mess]:
    """A machine with something to clean."""
    with (
        Machine(gpus=gpusim.gpus(1)) as machine,
        servers.role(machine, "--title", "VLLM::Worker_TP0", gpus=[0], under=servers.SHELL) as orphan,
    ):
        yield Mess(machine, orphan)


def one_line(stderr: str, *words: str) -> bool:
    """Whether standard error is one line that holds every word."""
    return stderr.endswith("\n") and stderr.count("\n") == 1 and all(word in stderr for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--gpu", "GPU-12345"], ["--gpu", "GPU-12345", "UUID"]),
        (["--gpu", "-1"], ["--gpu", "-1"]),
        (["--timeout", "15x"], ["--timeout", "15x", "15s"]),
        (["--scope", "everything"], ["--scope", "everything", "orphans"]),
        (["--stable-reads", "0"], ["--stable-reads", "0"]),
        (["--bytecode", "no-colon"], ["--bytecode", "no-colon"]),
        (["--cache", "no-such-cache"], ["no-such-cache", "triton"]),
        (["--log", "relative/*.log"], ["--log", "relative"]),
        (["surplus"], ["surplus"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_parsed_is_a_usage_error(mess: Mess, arguments: list[str], words: list[str]) -> None:
    """A wrong flag or value: exit 2, and a line that says which it is and what to write."""
    result = mess.machine.cleanslate("reset", *arguments)
    assert result.code == 2
    assert result.stdout == ""
    assert one_line(result.stderr, *words)
    assert mess.untouched()


def test_a_wrong_environment_variable_is_named(mess: Mess) -> None:
    """A setting from the environment is checked like a flag, under its own name."""
    result = mess.machine.cleanslate("reset", env={"CLEANSLATE_TIMEOUT": "soon"})
    assert result.code == 2
    assert one_line(result.stderr, "CLEANSLATE_TIMEOUT", "soon", "15s")
    assert mess.untouched()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"\xff\xfe", b" " * (1 << 20) + b"{}"],
    ids=["missing", "empty", "cut short", "no object", "no text", "too large"],
)
def test_a_plan_that_cannot_be_read_is_refused(mess: Mess, content: bytes | None) -> None:
    """A missing file, and anything that is not a plan: exit 5."""
    if content is not None:
        mess.machine.path("/run/plan.json").write_bytes(content)
    result = mess.machine.cleanslate("reset", "--plan", "/run/plan.json", *NOW)
    assert (result.code, result.report["result"]) == (5, "Refused")
    assert one_line(result.stderr, "/run/plan.json", "nothing was touched")
    assert mess.untouched()


@pytest.mark.parametrize("verb", ["inspect", "reset"])
def test_without_root_nothing_can_be_told(mess: Mess, verb: str) -> None:
    """A user sees half of a node: exit 4, and what to do."""
    result = mess.machine.cleanslate(verb, user=1000)
    assert (result.code, result.report["result"]) == (4, "CannotTell")
    assert one_line(result.stderr, "not root", "sudo")
    assert mess.untouched()


@pytest.mark.parametrize("verb", ["inspect", "reset"])
def test_hidden_processes_cannot_be_told(mess: Mess, verb: str) -> None:
    """Where /proc hides processes even from this root: exit 4."""
    mess.machine.run("mount", "-o", "remount,hidepid=invisible", "/proc")
    without = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
    result = mess.machine.cleanslate(verb, under=without)
    assert (result.code, result.report["result"]) == (4, "CannotTell")
    assert one_line(result.stderr, "hidepid", "CAP_SYS_PTRACE")
    assert mess.untouched()


def test_hidepid_does_not_stop_a_root_that_may_see(mess: Mess) -> None:
    """With CAP_SYS_PTRACE hidepid hides nothing, and the reset does its work."""
    mess.machine.run("mount", "-o", "remount,hidepid=invisible", "/proc")
    assert mess.machine.cleanslate("reset", *NOW).code == 0
    assert not mess.machine.alive(mess.orphan)
    assert mess.machine.names() == set()


def test_a_read_only_host_is_told_before_anything_is_done(mess: Mess) -> None:
    """A reset that cannot remove what it would find says so first: exit 4 or 5, and nothing half done."""
    mess.machine.run("mount", "-o", "remount,ro", "/dev/shm")
    result = mess.machine.cleanslate("reset", *NOW)
    assert result.code in {4, 5}
    assert one_line(result.stderr, "/dev/shm", "ead-only")
    assert mess.untouched()


def test_a_full_disk_for_the_report_is_told(mess: Mess) -> None:
    """A report that nobody can read leaves nobody knowing: exit 4, and the result on stderr."""
    done = mess.machine.run("sh", "-c", '"$@" > /dev/full', "sh", *program("reset", *NOW))
    assert done.returncode == 4
    assert one_line(done.stderr, "cannot write the report", "No space left", "Clean")


@pytest.mark.parametrize("options", ["size=4k", "ro"])
def test_a_termination_message_that_cannot_be_written_is_told(mess: Mess, options: str) -> None:
    """A full or read-only place for the summary: exit 4, and never half a summary."""
    mess.machine.path("/run/full").mkdir()
    mess.machine.mount("tmpfs", "/run/full", "tmpfs", 0, "size=4k")
    mess.machine.path("/run/full/block").write_bytes(b"x" * 4096)
    mess.machine.path("/run/full/message").touch()
    mess.machine.run("mount", "-o", f"remount,{options}", "/run/full")
    result = mess.machine.cleanslate("reset", "--termination-message", "/run/full/message", *NOW)
    assert result.code == CANNOT_TELL[1]
    assert one_line(result.stderr, "/run/full/message", "cannot write")
    assert mess.machine.path("/run/full/message").read_bytes() == b""
