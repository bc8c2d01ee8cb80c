"""Copies crds/ into the chart, since Helm reads nothing outside of it: `python charts/crds.py` after a change of crds/."""

import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "crds"
COPY = REPOSITORY / "charts" / "cleanslate" / "files" / "crds"


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """The manifests of a folder by file name; none if there is no folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.yaml"))}


def copy() -> None:
    """Makes the chart's copy the same as the source, and removes what the source has no more."""
    COPY.mkdir(parents=True, exist_ok=True)
    wanted = contents(SOURCE)
    for name in contents(COPY).keys() - wanted.keys():
        (COPY / name).unlink()
    for name, content in wanted.items():
        (COPY / name).write_bytes(content)


if __name__ == "__main__":
    copy()
