"""(b) Which of 10,001 files in /dev/shm nobody uses, and removing those: the kernel's lease against a scan and `rm`."""

import json
import os
import subprocess
import sys
import time

import crowd
import figures

LEFTOVERS = 10_000
SHM = "/dev/shm"
LIVE = "psm_live"
AROUND = ((300, 30, 100), (3000, 30, 100))  # processes, descriptors, mappings
RESET = [sys.executable, "-m", "cleanslate", "reset", "--shm-min-age", "0", "--output", "json"]
HOLD_MAPPED = """
import mmap, sys
with open(sys.argv[1], "r+b") as segment:
    mapping = mmap.mmap(segment.fileno(), 0)
print("ready", flush=True)
sys.stdin.read()
"""


def make_leftovers() -> None:
    """One page each, as small segments and semaphores have."""
    for number in range(LEFTOVERS):
        with open(f"{SHM}/psm_{number:08x}", "wb") as segment:
            segment.write(bytes(4096))


def used_inodes() -> set[tuple[int, int]]:
    """Device and inode of everything that any process has mapped or open, in one pass over /proc."""
    used: set[tuple[int, int]] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        used |= mapped(pid) | opened(pid)
    return used


def mapped(pid: str) -> set[tuple[int, int]]:
    """From /proc/PID/maps: `start-end perms offset major:minor inode path`."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                fields = line.split(None, 5)
                if fields[4] != b"0":
                    major, _, minor = fields[3].partition(b":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    except OSError:
        return found
    return found


def opened(pid: str) -> set[tuple[int, int]]:
    """From /proc/PID/fd."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            status = entry.stat()
            found.add((status.st_dev, status.st_ino))
    except OSError:
        return found
    return found


def scan_and_rm() -> float:
    """The rival: one scan, then `rm` of what it does not name."""
    make_leftovers()
    begun = time.perf_counter()
    used = used_inodes()
    unused = []
    for entry in os.scandir(SHM):
        status = entry.stat(follow_symlinks=False)
        if (status.st_dev, status.st_ino) not in used:
            unused.append(entry.path)
    subprocess.run(["xargs", "-0", "rm", "-f", "--"], input="\0".join(unused).encode(), check=True)
    elapsed_s = time.perf_counter() - begun
    check_only_the_live_one_is_left()
    return elapsed_s


def check_only_the_live_one_is_left() -> None:
    """Both must be right before their speed matters."""
    left = os.listdir(SHM)
    if left != [LIVE]:
        raise RuntimeError(f"shared memory: {len(left)} files left, expected {LIVE} alone")


def compare(around: tuple[int, int, int]) -> None:
    """Measures both in turn, amid so many processes."""
    wholes: list[float] = []

    def purge() -> float:
        make_leftovers()
        elapsed_s, said = figures.timed(RESET)
        wholes.append(elapsed_s)
        check_only_the_live_one_is_left()
        return float(json.loads(said)["timings"]["purge"])

    processes, descriptors, mappings = around
    with crowd.crowd(processes, descriptors=descriptors, mappings=mappings):
        ours, theirs = figures.side_by_side(purge, scan_and_rm)
    figures.faster(
        f"proof and purge of {LEFTOVERS} shared-memory leftovers amid {processes} processes",
        ours,
        "scan of /proc/*/maps and fd, then rm",
        theirs,
        times=5,
        note=f"{descriptors} descriptors, {mappings} mappings each; whole reset {figures.spread(wholes[1:])}",
    ).emit()


def main() -> int:
    """Runs in a machine with a /dev/shm of its own; one segment in it is live, mapped through a closed descriptor."""
    if os.listdir(SHM):
        print(f"shared memory: {SHM} is not empty; this needs one of its own", file=sys.stderr)
        return 1
    with open(f"{SHM}/{LIVE}", "wb") as segment:
        segment.write(bytes(4096))
    argv = [sys.executable, "-c", HOLD_MAPPED, f"{SHM}/{LIVE}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        if user.stdout is None or user.stdout.readline() != "ready\n":
            raise RuntimeError(f"{SHM}/{LIVE}: cannot map")
        for around in AROUND:
            compare(around)
        user.communicate()
    os.unlink(f"{SHM}/{LIVE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
