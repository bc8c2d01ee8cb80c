"""Helm as a user has it, with no cache, configuration or data but a folder of its own."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import places

CHART = places.CHECKOUT / "charts" / "cleanslate"


class HelmError(Exception):
    """Helm ended with an error, or not in time."""


@dataclass(frozen=True, kw_only=True)
class Helm:
    """A Helm, a folder for what it keeps, and a kubeconfig; without one it can lint and render."""

    program: Path
    folder: Path
    kubeconfig: Path | None = None

    def __call__(self, *arguments: str, values: Mapping[str, Any] = {}, timeout_s: float = 60.0) -> str:
        """Runs Helm with these values, and returns what it printed. Raises HelmError."""
        cluster = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        given = ["--values=-"] if values else []
        command = [os.fspath(self.program), *arguments, *cluster, *given]
        kept = {f"HELM_{kind}_HOME": os.fspath(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        try:
            done = subprocess.run(
                command,
                input=json.dumps(values),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=os.environ | kept | {"KUBECONFIG": os.devnull},
            )
        except subprocess.TimeoutExpired as error:
            raise HelmError(f"helm {' '.join(arguments)}: no end in {timeout_s:.0f} s") from error
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stdout.strip()} {done.stderr.strip()}")
        return done.stdout

    def lint(self, values: Mapping[str, Any] = {}) -> str:
        """`helm lint --strict` of the chart: what it said. Raises HelmError."""
        return self("lint", "--strict", os.fspath(CHART), values=values)

    def render(self, *arguments: str, values: Mapping[str, Any] = {}) -> list[dict[str, Any]]:
        """The objects of `helm template`. Raises HelmError."""
        text = self("template", "cleanslate", os.fspath(CHART), *arguments, values=values)
        return [document for document in yaml.safe_load_all(text) if document]
