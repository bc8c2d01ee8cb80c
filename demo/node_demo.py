"""`make demo-node`: one machine without a cluster: a real mess, its reset by hand, the proof, and a verdict."""

import os
import shlex
import sys
import time

import places

CLEANSLATE = (sys.executable, "-m", "cleanslate")


def say(text: str = "") -> None:
    """One line, at once."""
    print(text, flush=True)


def bold(text: str) -> str:
    """Bold on a terminal, plain elsewhere."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def step(number: int, text: str) -> None:
    """A heading of the story."""
    say()
    say(bold(f"{number}. {text}"))


def make_a_mess(place: places.Place) -> str:
    """A server whose front end dies and leaves the rest of it behind; the name of its shared memory."""
    step(1, "A server starts: a front end, an engine, two workers that hold GPU memory, shared memory.")
    server = place.start_server()
    workers = ", ".join(str(pid) for pid in server["workers"])
    say(
        f"   front end {server['front_end']}, engine {server['engine']}, workers {workers}, segment {server['segment']}"
    )
    step(2, f"Its front end is killed (SIGKILL to {server['front_end']}), as when memory runs out. The rest lives on.")
    place.kill_front_end()
    return str(server["segment"])


def list_shared_memory(place: places.Place) -> str:
    """Shows what lies in /dev/shm; the names."""
    say("   $ ls /dev/shm")
    names = place.run("ls", "/dev/shm")[1].strip()
    say(f"   {names or '(nothing)'}")
    return names


def cleanslate(place: places.Place, *arguments: str) -> int:
    """Runs the program as a person would, shows what it prints; its exit code."""
    say(f"   $ {shlex.join(('cleanslate', *arguments))}")
    begun = time.monotonic()
    code, printed = place.run(*CLEANSLATE, *arguments)
    for line in printed.splitlines():
        say(f"   {line}")
    say(f"   (exit {code}, {time.monotonic() - begun:.2f} s)")
    return code


def tell(place: places.Place) -> list[str]:
    """The whole story; what went otherwise than it should."""
    say(bold("Clean Slate on one machine, a demonstration"))
    say(place.title)
    segment = make_a_mess(place)
    step(3, "What is left over? inspect changes nothing. Exit 3 says: not clean.")
    before = cleanslate(place, "inspect", "--shm-min-age", "0", *place.arguments)
    step(4, "The reset ends and removes what is left over, nothing else, and measures.")
    reset = cleanslate(place, "reset", "--shm-min-age", "0", *place.arguments)
    step(5, "And now? Exit 0 says: measured, and clean.")
    after = cleanslate(place, "inspect", *place.arguments)
    expected = (("the first inspect", before, 3), ("the reset", reset, 0), ("the second inspect", after, 0))
    wrong = [f"{what} ended with {code}, expected {wanted}" for what, code, wanted in expected if code != wanted]
    return wrong + ([f"/dev/shm/{segment} is still there"] if segment in list_shared_memory(place) else [])


def main() -> int:
    """Exit 0 if the node was dirty, was reset, and is clean."""
    try:
        with places.place() as place:
            wrong = tell(place)
    except RuntimeError as error:
        say(f"demo-node: cannot run: {error}")
        return 1
    say()
    if wrong:
        say(bold("demo-node: FAILED: " + "; ".join(wrong)))
        return 1
    say(bold("demo-node: PASSED: the leak was found, removed, and every GPU measured clean"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
