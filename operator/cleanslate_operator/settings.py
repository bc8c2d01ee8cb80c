"""Every setting of the operator in one table: its flag, its environment variable, its default and its help.

Built once, in `__main__.py`. A flag wins over its variable. A setting that may be given several times has one value a line
in its variable, or values with commas between them.
"""

import argparse
import importlib.metadata
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PREFIX = "CLEANSLATE_OPERATOR_"
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,1023}")
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s|m|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "": 1.0}
_LONGEST_S = 3600.0
_QUANTITY = re.compile(r"\d{1,12}(?:\.\d{1,9})?(?:m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")  # a quantity of cpu or memory
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_LEVELS = ("debug", "info", "warning", "error")
_RESOURCES = '{"requests":{"cpu":"100m","memory":"64Mi"},"limits":{"cpu":"2","memory":"512Mi"}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one operator works. Times in seconds; see ROWS for each."""

    image: str
    identity: str = "cleanslate-operator"
    operator_namespace: str = "cleanslate-system"
    resets_namespace: str = "cleanslate-resets"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    reset_service_account: str = "cleanslate-reset"
    reset_resources: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: resources(_RESOURCES))
    priority_class: str = "system-node-critical"
    nvml_library: str | None = None
    port: int = 8080
    bind: str = "*"
    lease_duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_period_s: float = 2.0
    workers: int = 4
    log_level: str = "info"
    kubeconfig: str | None = None


class SettingError(ValueError):
    """A setting that cannot be used; the text names it, its value and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting. `parse` turns one text into one value and raises ValueError with what it wants instead."""

    flag: str
    parse: Callable[[str], Any]
    default: str
    metavar: str
    help: str
    name: str = ""
    many: bool = False

    @property
    def field(self) -> str:
        """The field of Settings."""
        return self.name or self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable: CLEANSLATE_OPERATOR_ and the flag's words."""
        return _PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def described(self) -> str:
        """The help, with the default and the variable."""
        return f"{self.help} [default: {self.default}; {self.variable}]"


def resources(text: str) -> dict[str, dict[str, str]]:
    """The requests and limits of cpu and memory in a JSON object. Raises ValueError."""
    wanted = 'not requests and limits of cpu and memory; write for example \'{"limits":{"cpu":"2","memory":"512Mi"}}\''
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(wanted) from error
    if not _are_resources(document):
        raise ValueError(wanted)
    return {kind: dict(amounts) for kind, amounts in document.items()}


def _are_resources(document: Any) -> bool:
    if not isinstance(document, dict) or not document.keys() <= {"requests", "limits"}:
        return False
    return all(_are_amounts(amounts) for amounts in document.values())


def _are_amounts(amounts: Any) -> bool:
    if not isinstance(amounts, dict) or not amounts.keys() <= {"cpu", "memory"}:
        return False
    return all(isinstance(value, str) and _QUANTITY.fullmatch(value) for value in amounts.values())


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    value = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if not 0 < value <= _LONGEST_S:
        raise ValueError("not a duration of at most 60 minutes; write for example 15s or 1m")
    return value


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not low <= int(text) <= high:
            raise ValueError(f"not a number from {low} to {high}")
        return int(text)

    return parse


def _matching(pattern: re.Pattern[str], wanted: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(wanted)
        return text

    return parse


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return text

    return parse


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise ValueError("not an absolute path")
    return text


def _address(text: str) -> str:
    if text == "*":
        return text
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise ValueError("not an IP address; write * for every address of the pod") from error


_namespace = _matching(_LABEL, "not a namespace's name")
_name = _matching(_SUBDOMAIN, "not an object's name")


def _row(flag: str, parse: Callable[[str], Any], default: str, metavar: str, text: str, **more: Any) -> Row:
    return Row(flag=flag, parse=parse, default=default, metavar=metavar, help=text, **more)


# fmt: off
ROWS: tuple[Row, ...] = (
    _row("--image", _matching(_IMAGE, "not an image's name"), "none, required", "IMAGE",
         "the node program's image, for the reset pods"),
    _row("--image-pull-policy", _one_of(_PULL_POLICIES), "IfNotPresent", "POLICY",
         "when a node pulls that image"),
    _row("--image-pull-secret", _name, "none", "NAME",
         "a secret in the resets' namespace to pull that image with; several times", name="image_pull_secrets", many=True),
    _row("--operator-namespace", _namespace, "cleanslate-system", "NAME",
         "the namespace of the operator's own Lease"),
    _row("--resets-namespace", _namespace, "cleanslate-resets", "NAME",
         "the namespace of the reset pods and all that belongs to a reset"),
    _row("--reset-service-account", _name, "cleanslate-reset", "NAME",
         "the reset pods' service account; it needs no rights"),
    _row("--reset-resources", resources, _RESOURCES, "JSON",
         "requests and limits of cpu and memory of a reset pod"),
    _row("--priority-class", _name, "system-node-critical", "NAME",
         "the reset pods' priority class"),
    _row("--nvml-library", _path, "searched for", "PATH",
         "the driver's libnvidia-ml.so.1, as the node program sees it"),
    _row("--identity", _name, "POD_NAME, else the host's name", "NAME",
         "who this replica is in the Lease; unique, and the same after a restart in place"),
    _row("--lease-duration", _duration, "15s", "DURATION",
         "how long a silent leader keeps the others waiting", name="lease_duration_s"),
    _row("--renew-deadline", _duration, "10s", "DURATION",
         "how long a leader goes on without a renewal; less than the lease's duration", name="renew_deadline_s"),
    _row("--retry-period", _duration, "2s", "DURATION",
         "how often the Lease is renewed or looked at", name="retry_period_s"),
    _row("--workers", _number(1, 64), "4", "N",
         "how many resets are worked on at a time"),
    _row("--port", _number(0, 65535), "8080", "PORT",
         "where /livez, /readyz and /metrics are served; 0 is any free one, told in the log"),
    _row("--bind", _address, "*", "ADDRESS",
         "the address to serve them on; * is every address, IPv4 and IPv6"),
    _row("--log-level", _one_of(_LEVELS), "info", "LEVEL",
         "debug, info, warning or error"),
    _row("--kubeconfig", _path, "in a cluster the service account, else KUBECONFIG", "FILE",
         "how to reach the API server"),
)
# fmt: on


def build(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Settings:
    """The settings of one run. `flags`: the texts given on the command line, by field. Raises SettingError."""
    values: dict[str, Any] = {"identity": _identity(environ)}
    for row in ROWS:
        texts, source = flags.get(row.field), row.flag
        if texts is None and row.variable in environ:
            texts, source = _split(environ[row.variable], many=row.many), row.variable
        if texts is not None:
            parsed = [_parse(row, text, source) for text in texts]
            values[row.field] = tuple(parsed) if row.many else parsed[-1]
    if "image" not in values:
        raise SettingError(
            "--image: cannot start: the node program's image is not named; give --image or set " + _IMAGE_VARIABLE
        )
    return _checked(Settings(**values))


def from_command_line(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of one run, from its command line. Exits with 2 and one line on stderr if there is none that can be used."""
    parser = _parser()
    given = {field: texts for field, texts in vars(parser.parse_args(arguments)).items() if texts is not None}
    try:
        return build(given, environ)
    except SettingError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


_IMAGE_VARIABLE = ROWS[0].variable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cleanslate-operator",
        description="Runs what GPUNodeReset objects ask for: resets of GPU nodes, through one short-lived DaemonSet each.",
        epilog="Every flag has an environment variable; the flag wins. SIGTERM hands over to another replica and ends with 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version('cleanslate')}")
    for row in ROWS:
        parser.add_argument(
            row.flag, dest=row.field, metavar=row.metavar, action="append", help=row.described.replace("%", "%%")
        )
    return parser


def _identity(environ: Mapping[str, str]) -> str:
    return (environ.get("POD_NAME") or socket.gethostname() or "cleanslate-operator")[:253]


def _split(text: str, *, many: bool) -> list[str]:
    if not many:
        return [text]
    return [part.strip() for part in (text.split("\n") if "\n" in text else text.split(",")) if part.strip()]


def _parse(row: Row, text: str, source: str) -> Any:
    try:
        return row.parse(text)
    except ValueError as error:
        raise SettingError(f"{source}={text[:80]!r}: cannot parse: {error}") from error


def _checked(settings: Settings) -> Settings:
    if not settings.retry_period_s < settings.renew_deadline_s < settings.lease_duration_s:
        raise SettingError(
            f"--renew-deadline: cannot use {settings.renew_deadline_s:g} s: it has to lie between --retry-period,"
            f" {settings.retry_period_s:g} s, and --lease-duration, {settings.lease_duration_s:g} s;"
            " the defaults are 2s, 10s and 15s"
        )
    return settings
