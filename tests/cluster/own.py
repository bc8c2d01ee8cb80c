"""A cluster of one's own (`kind`, or a real one) that the suites may be pointed at, if its context is on an allow-list.

`CLEANSLATE_TEST_CONTEXT` names the context of the usual kubeconfig. The allow-list is allowed-contexts.txt beside this file, and
`~/.config/cleanslate/test-contexts`: a pattern a line.
"""

import fnmatch
import os
import shutil
from pathlib import Path

from cluster.kubectl import Kubectl

VARIABLE = "CLEANSLATE_TEST_CONTEXT"
LISTS = (Path(__file__).resolve().parent / "allowed-contexts.txt", Path.home() / ".config/cleanslate/test-contexts")


class RefusedError(Exception):
    """A context that nobody allowed to be tested on."""


def kubectl() -> Kubectl | None:
    """kubectl for the cluster of one's own; None where none is named. Raises RefusedError."""
    context = os.environ.get(VARIABLE)
    if not context:
        return None
    if not any(fnmatch.fnmatchcase(context, pattern) for pattern in allowed()):
        places = " or ".join(map(str, LISTS))
        raise RefusedError(f"context {context}: cannot test there: not on the allow-list; add it to {places}")
    program = shutil.which("kubectl")
    if program is None:
        raise RefusedError(f"context {context}: cannot test there: no kubectl; install it")
    config = os.environ.get("KUBECONFIG") or Path.home() / ".kube/config"
    return Kubectl(program=Path(program), kubeconfig=Path(config), context=context)


def allowed() -> list[str]:
    """The patterns of contexts that tests may make and remove things in."""
    lines = [line.strip() for path in LISTS if path.exists() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
