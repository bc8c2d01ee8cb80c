"""What tells why a test failed: the logs of every component and container, and the objects as they were."""

import contextlib
import shutil
import subprocess
from pathlib import Path

from cluster import binaries
from cluster.places import Place

_ASKED = ("get nodes -o wide", "get pods -A -o wide", "describe pods -A", "get events -A --sort-by=.lastTimestamp")
_ANSWER_S = 20


def keep(place: Place, folder: Path) -> None:
    """Copies it into a new folder. An API server that does not answer costs seconds and is told there; nothing raises."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # shutil.Error is one: a log that went while it was copied
        shutil.copytree(place.logs, folder, symlinks=True, ignore_dangling_symlinks=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "objects.txt").open("w") as told:
        for words in _ASKED:
            told.write(f"$ kubectl {words}\n")
            told.flush()
            argv = [binaries.kubectl(), f"--kubeconfig={place.kubeconfig}", "--request-timeout=5s", *words.split()]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(argv, stdout=told, stderr=told, check=False, timeout=_ANSWER_S)
