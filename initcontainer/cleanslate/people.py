"""Who runs a process and how much memory it has: what a report adds for people, by psutil. No verdict rests on it."""

import os
from dataclasses import dataclass

import psutil

from cleanslate.model import Identity

_PASSWD_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A process's user and resident memory in bytes; None where the process is gone or not readable."""

    user: str | None = None
    memory_bytes: int | None = None


def read_users(host_root: str) -> dict[int, str]:
    """The host's users by uid, from its passwd file alone: a directory service may hang when a node is sick."""
    try:
        with open(os.path.join(host_root, "etc/passwd"), encoding="utf-8", errors="replace") as file:
            lines = [line.split(":") for line in file.read(_PASSWD_LIMIT_BYTES).split("\n")]
    except OSError:
        return {}
    return {int(parts[2]): parts[0] for parts in lines if len(parts) > 2 and parts[2].isdigit()}


def person(identity: Identity, users: dict[int, str]) -> Person:
    """The user and memory of the process, if the pid still is that process."""
    try:
        process = psutil.Process(identity.pid)
        with process.oneshot():
            uid, memory_bytes = process.uids().real, process.memory_info().rss
    except psutil.Error:
        return Person()
    return Person(user=users.get(uid, str(uid)), memory_bytes=memory_bytes)
