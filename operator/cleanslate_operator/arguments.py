"""What a reset asks of the node program, as its command line. Pure; docs/cli.md says what each flag means."""

from collections.abc import Iterator

from cleanslate_operator.reset import ResetSpec, Scope
from cleanslate_operator.settings import Settings

HOST_ROOT = "/host"
PLAN_FILE = "/plan/plan.json"
MESSAGE_FILE = "/dev/termination-log"
NODE_VARIABLE = "NODE_NAME"


def command_line(spec: ResetSpec, settings: Settings) -> tuple[str, ...]:
    """The arguments of a reset pod's container. The kubelet puts the node's name in, and expands nothing else.

    Every default is written out: what a reset does is in its DaemonSet for anybody to read.
    """
    return ("reset", *_places(settings), *map(_literal, (*_aims(spec), *_processes(spec), *_files(spec))))


def _places(settings: Settings) -> Iterator[str]:
    yield f"--host-root={HOST_ROOT}"
    yield f"--plan={PLAN_FILE}"
    yield f"--host-name=$({NODE_VARIABLE})"
    yield f"--termination-message={MESSAGE_FILE}"
    yield "--exit-zero"
    yield "--output=table"
    if settings.nvml_library:
        yield _literal(f"--nvml-library={settings.nvml_library}")


def _aims(spec: ResetSpec) -> Iterator[str]:
    yield f"--scope={spec.scope.lower()}"
    if spec.dry_run:
        yield "--dry-run"
    yield from (f"--gpu={device}" for device in spec.devices)
    if spec.expected_gpus is not None:
        yield f"--expect-gpus={spec.expected_gpus}"
    if spec.max_used_mib is not None:
        yield f"--max-used-mib={spec.max_used_mib}"
    yield f"--stable-reads={spec.stable_reads}"
    # The program counts from its start, and live work may take its grace period before there is anything to verify.
    yield f"--timeout={spec.verify_timeout_s + (spec.grace_s if spec.scope is Scope.ALL else 0)}s"


def _processes(spec: ResetSpec) -> Iterator[str]:
    yield f"--grace={spec.grace_s}s"
    yield from (f"--protect={name}" for name in spec.protect)
    yield from (f"--end-owner={owner}" for owner in spec.end_owners)


def _files(spec: ResetSpec) -> Iterator[str]:
    yield f"--shm-min-age={spec.shm_min_age_s}s"
    if spec.shm_any_name:
        yield "--shm-any-name"
    yield from (f"--shm-root={root}" for root in spec.shm_roots)
    yield from (f"--cache={one.name}={one.path}" if one.path else f"--cache={one.name}" for one in spec.compile_caches)
    yield from (f"--bytecode={one.path}:{one.pattern}" for one in spec.bytecode)
    yield from (f"--allow-root={root}" for root in spec.allow_roots)
    yield from (f"--log={pattern}" for pattern in spec.logs)
    yield f"--log-min-age={spec.log_min_age_s}s"


def _literal(argument: str) -> str:
    """The argument as it has to be written for the kubelet to leave it alone: `$(NAME)` would be a variable's value."""
    return argument.replace("$", "$$")
