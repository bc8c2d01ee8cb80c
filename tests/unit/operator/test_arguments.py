"""The command line of a reset pod: every field of a spec gets to the node program as it was meant, and nothing is expanded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import settings as program
from cleanslate import usage
from cleanslate.cli import VERBS
from cleanslate_operator import arguments
from cleanslate_operator.reset import Bytecode, Cache, ResetSpec, Scope
from unit.operator.resetpods import settings

NODE = "gpu-17"


def expanded(argument: str) -> str:
    """What the kubelet makes of an argument: `$$` is a dollar, `$(NODE_NAME)` the node, anything else itself."""
    out, rest = "", argument
    while rest:
        if rest.startswith("$$"):
            out, rest = out + "$", rest[2:]
        elif rest.startswith("$(NODE_NAME)"):
            out, rest = out + NODE, rest[len("$(NODE_NAME)") :]
        else:
            out, rest = out + rest[0], rest[1:]
    return out


def understood(spec: ResetSpec, **known: Any) -> program.Settings:
    """The node program's settings for a spec, by way of a kubelet."""
    argv = [expanded(one) for one in arguments.command_line(spec, settings(**known))]
    return program.build(*usage.parse(argv, VERBS), {})


def test_an_empty_spec_is_a_reset_of_leftovers_in_a_pod() -> None:
    """With the node program's own defaults, and what the reset pod needs."""
    found = understood(ResetSpec())
    assert found == program.Settings(
        verb="reset",
        host_root="/host",
        plan="/plan/plan.json",
        host_name=NODE,
        termination_message="/dev/termination-log",
        exit_zero=True,
    )


def test_every_field_gets_to_the_node_program() -> None:
    """In its units."""
    spec = ResetSpec(
        scope=Scope.ALL,
        devices=("0", "1"),
        expected_gpus=8,
        grace_s=45,
        protect=("nvtop",),
        end_owners=("service:vllm.service",),
        shm_roots=("/mnt/shm",),
        shm_min_age_s=0,
        shm_any_name=True,
        compile_caches=(Cache(name="triton"), Cache(name="vllm", path="/srv/cache")),
        bytecode=(Bytecode(path="/opt/vllm", pattern="*/deepseek_v2*"),),
        allow_roots=("/srv",),
        logs=("/var/log/vllm/*.log",),
        log_min_age_s=60,
        max_used_mib=0,
        stable_reads=5,
        verify_timeout_s=90,
        dry_run=True,
    )
    found = understood(spec, nvml_library="/usr/lib/libnvidia-ml.so.1")
    assert found == program.Settings(
        verb="reset",
        scope=program.Scope.ALL,
        dry_run=True,
        gpus=("0", "1"),
        grace_s=45.0,
        timeout_s=135.0,
        max_used_bytes=0,
        stable_reads=5,
        expect_gpus=8,
        protect=("nvtop",),
        end_owners=("service:vllm.service",),
        shm_roots=("/mnt/shm",),
        shm_min_age_s=0.0,
        shm_any_name=True,
        bytecode=("/opt/vllm:*/deepseek_v2*",),
        caches=("triton", "vllm=/srv/cache"),
        logs=("/var/log/vllm/*.log",),
        log_min_age_s=60.0,
        allow_roots=("/srv",),
        plan="/plan/plan.json",
        host_root="/host",
        host_name=NODE,
        nvml_library="/usr/lib/libnvidia-ml.so.1",
        termination_message="/dev/termination-log",
        exit_zero=True,
    )


@pytest.mark.parametrize(
    "text", ["$(NODE_NAME)", "$$(NODE_NAME)", "$$$(NODE_NAME)", "a$", "$", "--dry-run", "a b", "'\""]
)
def test_a_users_text_is_taken_as_it_stands(text: str) -> None:
    """No variable is expanded in it, no shell reads it, and it cannot become a flag."""
    assert understood(ResetSpec(protect=(text,))).protect == (text,)
    assert not understood(ResetSpec(protect=(text,))).dry_run


@given(st.text(min_size=1, max_size=40).filter(str.isprintable) | st.text("$()NODE_AM", min_size=1, max_size=20))
def test_any_text_is_taken_as_it_stands(text: str) -> None:
    """Byte for byte."""
    found = understood(ResetSpec(protect=(text,), logs=(f"/{text}",)))
    assert (found.protect, found.logs) == ((text,), (f"/{text}",))


def test_a_reset_of_leftovers_waits_for_no_grace_period() -> None:
    """There is nothing that is ended gracefully."""
    assert understood(ResetSpec(grace_s=600, verify_timeout_s=30)).timeout_s == 30.0
