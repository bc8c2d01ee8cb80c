"""The child in which NVML is asked: its start, apart from `nvml.py` so that it can come before everything else.

The program starts this child first, and loads the rest of itself while the child loads NVML: a gate is on every server's
path.
"""

from cleanslate.worker import Message, Worker


def start() -> Worker:
    """A worker that answers (library, reopen) as `nvml_session.answer` does. The parent never touches NVML itself."""
    return Worker(_serve, prepare=_load)


def _load() -> None:
    from cleanslate import nvml_session  # noqa: F401 - loaded, to be at hand for the first question


def _serve(request: Message) -> Message:
    from cleanslate import nvml_session

    library, reopen = request
    return nvml_session.answer(library, reopen=reopen)
