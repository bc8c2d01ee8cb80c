"""The forked child that may be given up: its deadline, its death, and what it does not keep of its parent's."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cleanslate import worker
from cleanslate.worker import Message, Worker, WorkerDiedError, WorkerSilentError

DEADLINE_S = 20.0  # for what takes milliseconds: a loaded machine must not fail a test
PRODUCT = Path(worker.__file__).parents[1]


def echo(message: Message) -> Message:
    """The answer is the question."""
    return message


def never(_: Message) -> Message:
    """No answer, ever: only SIGKILL ends it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        signal.pause()


def spin(_: Message) -> Message:
    """No answer either, and no rest."""
    while True:
        pass


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    """Makes workers and ends them, whatever becomes of the test."""
    made: list[Worker] = []

    def start(*arguments: Any) -> Worker:
        made.append(Worker(*arguments))
        return made[-1]

    yield start
    for one in made:
        one.close()


def is_there(pid: int) -> bool:
    """Whether a process of this pid exists, zombies included."""
    return Path(f"/proc/{pid}").exists()


def wait_until(true: Callable[[], bool]) -> None:
    """Poll with a deadline, for what sends no event to this process."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, "it never came true"
        select.select([], [], [], 0.005)


def test_questions_are_answered_in_their_order(make: Callable[..., Worker]) -> None:
    """Also when several are put before the first answer is heard."""
    one = make(lambda number: (number, number * 2))
    assert one.ask(1, deadline_s=DEADLINE_S) == (1, 2)
    one.tell(2)
    one.tell(3)
    assert one.hear(deadline_s=DEADLINE_S) == (2, 4)
    assert one.hear(deadline_s=DEADLINE_S) == (3, 6)


@pytest.mark.parametrize(
    "message",
    [None, True, 0, -(2**70), 1.5, "text", "\udc80", b"\0\xff", (), ("a", (1, None)), [1], {"a": [b""]}, {1, 2}],
    ids=repr,
)
def test_a_message_comes_back_as_it_went(message: Message, make: Callable[..., Worker]) -> None:
    """Numbers, text with stray bytes, and containers of them."""
    assert make(echo).ask(message, deadline_s=DEADLINE_S) == message


@pytest.mark.parametrize("size_bytes", [1, 65_535, 65_536, 65_537, 8 << 20])
def test_messages_may_be_larger_than_a_pipe(size_bytes: int, make: Callable[..., Worker]) -> None:
    """Both ways, around the size of a pipe and far above."""
    data = os.urandom(1024) * (size_bytes // 1024) + b"x" * (size_bytes % 1024)
    assert make(echo).ask(data, deadline_s=DEADLINE_S) == data


def test_preparation_comes_before_the_first_question() -> None:
    """In the child alone."""
    state: list[str] = []
    with Worker(lambda _: tuple(state), lambda: state.append("prepared")) as one:
        assert one.ask(None, deadline_s=DEADLINE_S) == ("prepared",)
    assert state == []


@pytest.mark.parametrize("serve", [never, spin], ids=["asleep", "in an endless loop"])
def test_a_silent_child_is_killed_at_its_deadline_and_leaves_nothing(
    serve: Callable[[Message], Message], make: Callable[..., Worker]
) -> None:
    """It ignores every signal it can, and is gone and collected when the caller hears of it."""
    before = set(os.listdir("/proc/self/fd"))
    one = make(serve)
    start = time.monotonic()
    with pytest.raises(WorkerSilentError) as silence:
        one.ask(None, deadline_s=0.2)
    assert 0.2 <= time.monotonic() - start < DEADLINE_S
    assert (silence.value.pid, silence.value.deadline_s, silence.value.stuck) == (one.pid, 0.2, False)
    assert str(silence.value) == f"no answer in 0.2 s, child {one.pid} killed"
    assert not is_there(one.pid)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("serve", "status"),
    [
        (lambda _: os._exit(7), 7),
        (lambda _: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
        (lambda _: 1 / 0, 1),
        (lambda _: sys.exit(3), 1),
        (lambda _: object(), 1),
    ],
    ids=["exits", "a fault", "an exception", "sys.exit", "an answer that can't be sent"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_dying_child_is_reported_with_its_status(
    serve: Callable[[Message], Message], status: int, make: Callable[..., Worker]
) -> None:
    """A fault in a library is its child's end, not the program's; nothing of it is left."""
    one = make(serve)
    with pytest.raises(WorkerDiedError) as death:
        one.ask(None, deadline_s=DEADLINE_S)
    assert death.value.pid == one.pid
    assert death.value.status is not None
    assert os.waitstatus_to_exitcode(death.value.status) == status
    assert f"ended with status {status}" in str(death.value)
    assert not is_there(one.pid)


def test_an_exception_while_preparing_is_a_death_too(make: Callable[..., Worker]) -> None:
    """It is heard at the first question or answer, and never raised in the parent."""
    one = make(echo, lambda: 1 / 0)
    with pytest.raises(WorkerDiedError):
        one.ask(None, deadline_s=DEADLINE_S)
    assert not is_there(one.pid)


def test_a_child_killed_from_outside_is_reported(make: Callable[..., Worker]) -> None:
    """Before a question as after it."""
    one = make(never)
    one.tell(None)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="status -9"):
        one.hear(deadline_s=DEADLINE_S)


def test_an_answer_cut_short_is_no_answer(make: Callable[..., Worker]) -> None:
    """A child that dies in the middle of its answer has not answered."""

    def cut(_: Message) -> Message:
        answering = max(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_pipe(int(name)))
        os.write(answering, b"\xff\0\0\0half")
        os._exit(0)

    with pytest.raises(WorkerDiedError):
        make(cut).ask(None, deadline_s=DEADLINE_S)


def _is_pipe(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")
    except OSError:
        return False


def test_closing_ends_and_collects_the_child_at_once(make: Callable[..., Worker]) -> None:
    """A second time is nothing."""
    one = make(never)
    one.tell(None)
    status = one.close()
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert one.close() is None
    assert not is_there(one.pid)


def test_leaving_the_block_leaves_no_child() -> None:
    """Also by an exception."""
    with pytest.raises(KeyError), Worker(never) as one:
        raise KeyError
    assert not is_there(one.pid)


def test_closing_without_waiting_kills_all_the_same() -> None:
    """For a program that ends itself next: the child is dead, and init's to collect."""
    one = Worker(never)
    one.tell(None)
    status = one.close(wait=False)  # None unless it was dead at once
    status = os.waitpid(one.pid, 0)[1] if status is None else status
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_the_answer_can_be_polled_for(make: Callable[..., Worker]) -> None:
    """Its descriptor turns readable with the answer, and not before."""
    one = make(echo)
    poll = select.poll()
    poll.register(one.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    one.tell(1)
    assert poll.poll(DEADLINE_S * 1000)
    assert one.hear(deadline_s=DEADLINE_S) == 1


def look_around(_: Message) -> Message:
    """What the child sees of itself: open files, session, terminal, signals."""
    opened = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            opened[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the directory just read
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        terminal = True
    except OSError:
        terminal = False
    return opened, os.getsid(0), os.getpgid(0), terminal, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_child_holds_nothing_of_its_parents(make: Callable[..., Worker], tmp_path: Path) -> None:
    """No file, pipe or terminal, in a session of its own: a child that never dies blocks nobody's report."""
    report = os.open(tmp_path / "report", os.O_WRONLY | os.O_CREAT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = os.dup2(report, min(soft, 4096) - 1, inheritable=True)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        one = make(look_around)
        opened, session, group, terminal, default = one.ask(None, deadline_s=DEADLINE_S)
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.close(report)
        os.close(high)
    assert {opened.pop(number) for number in (0, 1, 2)} == {"/dev/null"}
    assert len(opened) == 2
    assert all(target.startswith("pipe:") for target in opened.values())
    assert (session, group) == (one.pid, one.pid)
    assert (terminal, default) == (False, True)
    assert hard >= soft


PARENT = f"""
import os, signal, sys
sys.path.insert(0, {str(PRODUCT)!r})
from cleanslate.worker import Worker

def serve(message):
    if message == "pid":
        return os.getpid()
    while True:
        signal.pause()

worker = Worker(serve)
out = os.fdopen(int(sys.argv[1]), "w")
print(worker.ask("pid", deadline_s=20), file=out, flush=True)
worker.tell("hang")
signal.pause()
"""


def parent_of_a_worker() -> tuple[subprocess.Popen[bytes], int]:
    """A program with a worker that never answers, and the worker's pid."""
    reads, writes = os.pipe()
    program = subprocess.Popen([sys.executable, "-c", PARENT, str(writes)], pass_fds=(writes,))
    os.close(writes)
    with os.fdopen(reads) as told:
        return program, int(told.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_parents_death_takes_the_child_along(number: signal.Signals) -> None:
    """Also SIGKILL, after which nobody else could: the kernel does."""
    program, child = parent_of_a_worker()
    assert is_there(child)
    program.send_signal(number)
    program.wait()
    wait_until(lambda: not is_there(child))


@pytest.mark.parametrize("closed", ["", "0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"], ids=lambda how: how or "none")
def test_standard_streams_that_were_closed_do_not_mix_with_the_channel(closed: str) -> None:
    """Started by a daemon that closed them, the pipes get their numbers, and must work all the same."""
    reads, writes = os.pipe()
    start = f'exec 9>&{writes} {writes}>&- {closed}; exec {sys.executable} -c "$0" 9'
    program = subprocess.Popen(["bash", "-c", start, PARENT], pass_fds=(writes,), stderr=subprocess.DEVNULL)
    os.close(writes)
    try:
        with os.fdopen(reads) as told:
            line = told.readline()
        assert line.strip().isdigit()
    finally:
        program.kill()
        program.wait()
    wait_until(lambda: not is_there(int(line)))
