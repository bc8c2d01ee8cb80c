"""The operator's settings: from flags and variables, checked, and refused with a line that says what to write."""

import dataclasses

import pytest

from cleanslate_operator import settings


def build(environ: dict[str, str] | None = None, **flags: str) -> settings.Settings:
    """Settings with an image, and these."""
    given = {"image": ["registry.local/cleanslate:1"], **{name: [text] for name, text in flags.items()}}
    return settings.build(given, environ or {"POD_NAME": "operator-0"})


def test_defaults_are_those_of_the_table() -> None:
    """What --help says and what happens are the same."""
    made = build()
    told = {row.field: row for row in settings.ROWS}
    assert set(told) == {field.name for field in dataclasses.fields(settings.Settings)}
    for field, row in told.items():
        value = getattr(made, field)
        if value is None or value == () or field in {"image", "identity"}:
            continue
        assert row.parse(row.default) == value, field
    assert made.identity == "operator-0"


def test_a_flag_wins_over_its_variable() -> None:
    """And a variable over the default."""
    environ = {"CLEANSLATE_OPERATOR_WORKERS": "7", "CLEANSLATE_OPERATOR_PORT": "9090"}
    made = build(environ, workers="2")
    assert (made.workers, made.port) == (2, 9090)


def test_everything_can_come_from_the_environment() -> None:
    """As the chart does it; lists by line or comma."""
    made = settings.build(
        {},
        {
            "CLEANSLATE_OPERATOR_IMAGE": "a/b@sha256:0123",
            "CLEANSLATE_OPERATOR_IMAGE_PULL_SECRET": "one, two",
            "CLEANSLATE_OPERATOR_LEASE_DURATION": "1m",
            "CLEANSLATE_OPERATOR_RENEW_DEADLINE": "40s",
            "CLEANSLATE_OPERATOR_RETRY_PERIOD": "500ms",
            "CLEANSLATE_OPERATOR_RESET_RESOURCES": '{"limits":{"cpu":"1","memory":"1.5Gi"}}',
            "POD_NAME": "",
        },
    )
    assert made.image == "a/b@sha256:0123"
    assert made.image_pull_secrets == ("one", "two")
    assert (made.lease_duration_s, made.renew_deadline_s, made.retry_period_s) == (60.0, 40.0, 0.5)
    assert made.reset_resources == {"limits": {"cpu": "1", "memory": "1.5Gi"}}
    assert made.identity


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("image", "", "not an image's name"),
        ("image", "a b", "not an image's name"),
        ("image", "-x", "not an image's name"),
        ("image_pull_policy", "Sometimes", "not one of Always, IfNotPresent, Never"),
        ("operator_namespace", "Cleanslate", "not a namespace's name"),
        ("resets_namespace", "a.b", "not a namespace's name"),
        ("resets_namespace", "../../x", "not a namespace's name"),
        ("reset_service_account", "a/b", "not an object's name"),
        ("workers", "0", "not a number from 1 to 64"),
        ("workers", "²", "not a number from 1 to 64"),
        ("port", "65536", "not a number from 0 to 65535"),
        ("bind", "localhost", "not an IP address; write * for every address of the pod"),
        ("log_level", "loud", "not one of debug, info, warning, error"),
        ("kubeconfig", "config", "not an absolute path"),
        ("lease_duration_s", "15x", "not a duration of at most 60 minutes; write for example 15s or 1m"),
        ("lease_duration_s", "0", "not a duration of at most 60 minutes; write for example 15s or 1m"),
        ("reset_resources", "{", "not requests and limits of cpu and memory"),
        ("reset_resources", "[" * 5000, "not requests and limits of cpu and memory"),
        ("reset_resources", '{"limits":{"nvidia.com/gpu":"8"}}', "not requests and limits of cpu and memory"),
        ("reset_resources", '{"limits":{"cpu":1}}', "not requests and limits of cpu and memory"),
        ("reset_resources", '{"limits":{"cpu":"$(X)"}}', "not requests and limits of cpu and memory"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_write(field: str, text: str, wanted: str) -> None:
    """The line names the flag and the value, shortened."""
    flag = next(row.flag for row in settings.ROWS if row.field == field)
    with pytest.raises(settings.SettingError) as raised:
        build(**{field: text})
    assert str(raised.value).startswith(f"{flag}={text[:80]!r}: cannot parse: {wanted}")


def test_a_deadline_that_makes_two_leaders_is_refused() -> None:
    """A leader has to stop before another may start."""
    with pytest.raises(settings.SettingError) as raised:
        build(renew_deadline_s="15s")
    assert str(raised.value) == (
        "--renew-deadline: cannot use 15 s: it has to lie between --retry-period, 2 s, and --lease-duration, 15 s;"
        " the defaults are 2s, 10s and 15s"
    )


def test_an_operator_without_an_image_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, and one line."""
    with pytest.raises(SystemExit) as raised:
        settings.from_command_line([], {})
    assert raised.value.code == 2
    assert capsys.readouterr().err == (
        "cleanslate-operator: --image: cannot start: the node program's image is not named;"
        " give --image or set CLEANSLATE_OPERATOR_IMAGE\n"
    )


def test_help_names_every_variable_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be set that is not told."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as raised:
        settings.from_command_line(["--help"], {})
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert [row.flag for row in settings.ROWS if f"[default: {row.default}; {row.variable}]" not in text] == []


def test_flags_may_be_repeated_where_it_says_so() -> None:
    """And the last one counts elsewhere."""
    line = ["--image", "a", "--image", "b", "--image-pull-secret", "one", "--image-pull-secret", "two"]
    made = settings.from_command_line(line, {})
    assert (made.image, made.image_pull_secrets) == ("b", ("one", "two"))
