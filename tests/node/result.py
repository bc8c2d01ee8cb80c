"""What one run of the program said: exit code, output, and the report, checked against its JSON Schema."""

import functools
import json
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jsonschema

SCHEMA = Path(__file__).resolve().parents[2] / "initcontainer" / "cleanslate" / "report.schema.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One ended run. `report` raises ValueError where the output is no valid report."""

    code: int
    stdout: str
    stderr: str

    @classmethod
    def of(cls, done: "subprocess.CompletedProcess[str]") -> Self:
        """From a completed process; a report, if there is one, is checked at once."""
        result = cls(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
        if result.stdout.startswith("{"):
            validator().validate(result.report)
        return result

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report."""
        try:
            return json.loads(self.stdout)
        except json.JSONDecodeError as error:
            raise ValueError(f"no report: exit code {self.code}, {self.stdout!r}, {self.stderr!r}") from error

    @property
    def processes(self) -> dict[int, dict[str, Any]]:
        """The report's processes by pid."""
        return {one["pid"]: one for one in self.report["processes"]}

    def verdicts(self, *pids: int) -> list[str | None]:
        """The verdict on each pid, None where the report does not name it."""
        return [self.processes.get(pid, {}).get("verdict") for pid in pids]

    def outcomes(self, *pids: int) -> list[str | None]:
        """The outcome of each pid, None where the report does not name it."""
        return [self.processes.get(pid, {}).get("outcome") for pid in pids]

    @property
    def removed_names(self) -> set[str]:
        """The base names of the shared memory that was removed."""
        return {record["path"].rpartition("/")[2] for record in self.report["sharedMemory"]["removed"]}


@functools.cache
def validator() -> jsonschema.protocols.Validator:
    """The validator of the report's schema."""
    schema = json.loads(SCHEMA.read_text())
    return jsonschema.validators.validator_for(schema)(schema)
