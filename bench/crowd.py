"""A crowd of ordinary processes around a measurement (crowd.c)."""

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

SOURCE = pathlib.Path(__file__).with_name("crowd.c")


@contextlib.contextmanager
def crowd(processes: int, *, descriptors: int, mappings: int) -> Iterator[None]:
    """So many processes with so many descriptors and mappings each, while the block runs. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/crowd"
        subprocess.run(["cc", "-O2", "-o", program, str(SOURCE)], check=True)
        numbers = [str(number) for number in (processes, descriptors, mappings)]
        with subprocess.Popen([program, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            if parent.stdout is None or parent.stdout.readline() != "ready\n":
                raise RuntimeError(
                    f"crowd of {processes}: cannot start; look at the limits on processes and descriptors"
                )
            yield
            parent.communicate()
