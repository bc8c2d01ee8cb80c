"""Settings from flags and environment: each row, its precedence, and one clear line for whatever is wrong."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cleanslate import settings, usage
from cleanslate.settings import ROWS, Row, Scope, SettingError, Settings, build
from unit.examples import GPU_0, MIG_0

VERBS = {"inspect": "look", "reset": "end", "gate": "wait", "idle": "sleep"}

# By field: a text as one would write it, and what it means.
EXAMPLES: dict[str, tuple[str, Any]] = {
    "scope": ("orphans", Scope.ORPHANS),
    "dry_run": ("true", True),
    "gpus": (GPU_0, (GPU_0,)),
    "grace_s": ("20s", 20.0),
    "timeout_s": ("2m", 120.0),
    "max_used_bytes": ("64", 64 << 20),
    "stable_reads": ("3", 3),
    "expect_gpus": ("8", 8),
    "protect": ("nvtop", ("nvtop",)),
    "end_owners": ("service:vllm.service", ("service:vllm.service",)),
    "shm_roots": ("/mnt/shm", ("/mnt/shm",)),
    "shm_min_age_s": ("10s", 10.0),
    "shm_any_name": ("yes", True),
    "bytecode": ("/srv/model:*/deepseek_v2*", ("/srv/model:*/deepseek_v2*",)),
    "caches": ("vllm=/root/.cache/vllm", ("vllm=/root/.cache/vllm",)),
    "logs": ("/var/log/vllm/*.log", ("/var/log/vllm/*.log",)),
    "log_min_age_s": ("500ms", 0.5),
    "allow_roots": ("/srv", ("/srv",)),
    "plan": ("/etc/cleanslate/plan.json", "/etc/cleanslate/plan.json"),
    "host_root": ("/host", "/host"),
    "host_name": ("gpu-17.example.com", "gpu-17.example.com"),
    "nvml_library": ("/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1",) * 2,
    "termination_message": ("/dev/termination-log",) * 2,
    "exit_zero": ("yes", True),
    "output": ("json", "json"),
}
BY_FIELD = {row.field: row for row in ROWS}


def verb_of(row: Row) -> str:
    """A verb that has this setting."""
    return "reset" if "reset" in row.verbs else min(row.verbs)


def of_flag(flag: str, text: str) -> Any:
    """The value that a flag gives `reset`."""
    (row,) = (row for row in ROWS if row.flag == flag)
    return getattr(build("reset", {row.field: [text]}, {}), row.field)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_each_row_reads_its_example_from_flag_and_variable(row: Row) -> None:
    """The same text means the same on the command line and in a pod's environment."""
    text, value = EXAMPLES[row.field]
    verb = verb_of(row)
    assert getattr(build(verb, {row.field: [text]}, {}), row.field) == value
    assert getattr(build(verb, {}, {row.variable: text}), row.field) == value
    assert row.variable == "CLEANSLATE_" + row.flag[2:].upper().replace("-", "_")


def test_every_field_has_one_row_and_a_default() -> None:
    """The table is the only place where settings come from."""
    fields = [row.field for row in ROWS]
    assert sorted(fields) == sorted(set(Settings._fields) - {"verb"})
    assert build("reset", {}, {}) == Settings(verb="reset")
    assert all(row.help and row.default for row in ROWS)
    assert EXAMPLES.keys() == set(fields)


@pytest.mark.parametrize(
    "field",
    ["scope", "grace_s", "timeout_s", "stable_reads", "shm_min_age_s", "log_min_age_s", "host_root", "output"],
)
def test_a_stated_default_is_the_default(field: str) -> None:
    """Where the help names a value, it is the one that holds."""
    row = BY_FIELD[field]
    assert row.parse(row.default) == getattr(Settings(verb="reset"), field)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_a_flag_goes_before_its_variable(row: Row) -> None:
    """Even if the variable could not be read."""
    text, value = EXAMPLES[row.field]
    environ = {row.variable: "\0"}
    assert getattr(build(verb_of(row), {row.field: [text]}, environ), row.field) == value


def test_a_setting_of_another_verb_is_not_read() -> None:
    """A pod's environment may hold what only another container of it needs."""
    assert build("gate", {}, {"CLEANSLATE_SCOPE": "nonsense", "CLEANSLATE_GRACE": "nonsense"}) == Settings(verb="gate")


def test_the_last_of_a_repeated_single_flag_counts() -> None:
    """As everywhere."""
    assert build("reset", {"timeout_s": ["1s", "2s"]}, {}).timeout_s == 2.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1", ("0", "1")),
        (f" 0 , {GPU_0} ", ("0", GPU_0)),
        ("0\n1\n", ("0", "1")),
    ],
)
def test_a_variable_holds_several_values(text: str, values: tuple[str, ...]) -> None:
    """One a line, or on one line with commas between."""
    assert build("reset", {}, {"CLEANSLATE_GPU": text}).gpus == values


@pytest.mark.parametrize("text", ["", " , ", "\n"])
def test_an_empty_variable_names_nothing_but_never_every_gpu(text: str) -> None:
    """A field reference that came out empty must not widen a reset to the whole node."""
    assert build("reset", {}, {"CLEANSLATE_PROTECT": text}).protect == ()
    with pytest.raises(settings.SettingError, match="names no GPU"):
        build("reset", {}, {"CLEANSLATE_GPU": text})


def test_lines_may_hold_commas() -> None:
    """A pattern with a comma needs a line of its own."""
    environ = {"CLEANSLATE_LOG": "/var/log/{a,b}.log\n/tmp/x.log"}
    assert build("reset", {}, environ).logs == ("/var/log/{a,b}.log", "/tmp/x.log")


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("15", 15.0), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    """With a unit, or in seconds."""
    assert settings.duration(text) == seconds


WRONG = {
    "--scope": ["Orphans", "everything", ""],
    "--dry-run": ["maybe", "2"],
    "--gpu": ["", "-1", "GPU-1", f"{GPU_0}x", f"{GPU_0}\n", "99999", "gpu0", "GPU-" + "g" * 36, "²"],
    "--grace": ["", "-1", "15x", "1e9", "8d", "169h", "1s2", " 1s", "nan", "inf", "1_0"],
    "--max-used-mib": ["", "-1", "1.5", "64MiB", "9" * 10, "²", "٣"],
    "--stable-reads": ["0", "-1", "1001", "3.0", "", "9" * 5000, "0010000"],
    "--expect-gpus": ["0", "eight"],
    "--protect": ["", "a\0b"],
    "--end-owner": ["vllm.service", "pod:x", "service:", "service:a b", "login:uid 0"],
    "--shm-root": ["dev/shm", "", "/a\0"],
    "--log": ["*.log"],
    "--host-root": ["host", "/\0"],
    "--host-name": ["", "GPU-17", "gpu_17", "-gpu", "gpu-", "a..b", "gpu-17\n", "a" * 254, "gpü"],
    "--nvml-library": ["libnvidia-ml.so.1"],
    "--output": ["yaml", "JSON"],
}


@pytest.mark.parametrize(("flag", "text"), [(flag, text) for flag, texts in WRONG.items() for text in texts])
def test_a_wrong_value_is_one_line_with_flag_value_and_what_to_write(flag: str, text: str) -> None:
    """`flag='value': cannot parse: why`, and nothing is guessed."""
    with pytest.raises(SettingError) as refused:
        of_flag(flag, text)
    message = str(refused.value)
    assert message.startswith(f"{flag}={text[:80]!r}: cannot parse: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 400


def test_a_wrong_variable_is_named_itself() -> None:
    """So that a pod's author knows where to look."""
    with pytest.raises(SettingError, match=r"^CLEANSLATE_TIMEOUT='15x': cannot parse: not a duration"):
        build("reset", {}, {"CLEANSLATE_TIMEOUT": "15x"})


@given(st.sampled_from(ROWS), st.text(max_size=100) | st.text("0123456789.smh-", max_size=12))
@example(BY_FIELD["stable_reads"], "0" * 3 + "10000")
@example(BY_FIELD["gpus"], "\u0663")
def test_arbitrary_values_are_understood_or_refused_in_one_line(row: Row, text: str) -> None:
    """Never another error, never a value out of its range."""
    found, refusal = Settings(verb="reset"), "understood"
    try:
        found = build(verb_of(row), {row.field: [text]}, {})
    except SettingError as refused:
        refusal = str(refused)
    assert len(refusal.splitlines()) == 1
    assert 0 <= found.timeout_s <= 7 * 24 * 3600
    assert 1 <= found.stable_reads <= 1000
    assert all(one.isascii() for one in found.gpus)
    assert found.host_root.startswith("/")


def test_the_command_line_gives_texts_by_field() -> None:
    """What argparse makes of it: repeated flags are lists, switches are true, what is not given is not there."""
    argv = ["reset", "--gpu", "0", f"--gpu={MIG_0}", "--dry-run", "--scope", "all", "--timeout=5s"]
    verb, flags = usage.parse(argv, VERBS)
    assert verb == "reset"
    assert flags == {"gpus": ["0", MIG_0], "dry_run": ["true"], "scope": ["all"], "timeout_s": ["5s"]}
    built = build(verb, flags, {})
    assert (built.gpus, built.dry_run, built.scope, built.timeout_s) == (("0", MIG_0), True, Scope.ALL, 5.0)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["destroy"],
        ["reset", "--unknown"],
        ["reset", "--time", "5s"],
        ["reset", "--gpu"],
        ["reset", "stray"],
        ["gate", "--scope", "all"],
        ["idle", "--timeout", "5s"],
        ["reset", "--un\nknown"],
        ["reset", "stray\r\nline"],
        ["de\nstroy"],
    ],
    ids=lambda argv: " ".join(argv) or "nothing",
)
def test_a_wrong_command_line_is_one_line_that_points_to_help(argv: list[str]) -> None:
    """No usage dump, no abbreviations, no flags of other verbs; line feeds in it make no second line."""
    with pytest.raises(SettingError) as refused:
        usage.parse(argv, VERBS)
    assert "--help" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("verb", ["inspect", "reset", "gate"])
def test_help_explains_each_flag_with_default_and_variable(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One place to look."""
    with pytest.raises(SystemExit) as left:
        usage.parse([verb, "--help"], VERBS)
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for row in ROWS:
        assert (row.flag in text.split()) is (verb in row.verbs)
        assert (f"; {row.variable})" in text) is (verb in row.verbs)
