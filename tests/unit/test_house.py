"""The house rules that a machine can check: size, imports, switches, addresses and the documentation of flags.

Everything here reads the repository as text or as syntax trees; nothing of the product is run but `--help`.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from cleanslate import settings

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PRODUCT = REPOSITORY / "initcontainer" / "cleanslate"
OPERATOR = REPOSITORY / "operator" / "cleanslate_operator"
MODULES = sorted(PRODUCT.rglob("*.py"))
EVERYTHING = MODULES + sorted(OPERATOR.rglob("*.py"))
OWN_FOLDERS = (".ci", "bench", "demo", "docs", "initcontainer", "operator", "charts", "crds", "examples", "tests")
NOT_OURS = {".venv", ".git", "__pycache__", "results", "node_modules"}
TEXT = {".py", ".md", ".toml", ".txt", ".c", ".h", ".json", ".yaml", ".yml", ".sh", ".ini", ".cfg", ""}

FUNCTION_LINES = 60
FILE_LINES = 400

THIRD_PARTY = {"psutil", "pynvml"}
GUARDED = {"rich"}  # may make the table nicer, is never needed
ONE_MODULE_EACH = ("psutil", "pynvml")
TEST_SWITCH = re.compile(r"(?i)pytest|gpusim|\btesting\b|is_test|in_test|test_mode|unittest")

# Where a reader may be sent. Packages, mirrors and machines are nobody's business.
DOCUMENTATION = (
    "github.com/",
    "kubernetes.io/",
    "kubernetes.default",  # the API server's own name in every cluster
    "www.apache.org/",
    "apache.org/",
    "docs.kernel.org/",
    "www.kernel.org/",
    "man7.org/",
    "docs.nvidia.com/",
    "json-schema.org/",
    "cleanslate.dev/",
    "keepachangelog.com/",
    "semver.org/",
    "127.0.0.1",
    "localhost",
)
ADDRESS = re.compile(r"https?://([^\s\"'`)>\]]*)")
SOMEONES_FOLDER = re.compile(r"(?<![\w.])/(?:home|Users)/(?!user/)[a-z]\w*/")  # "user" is nobody


def files() -> list[pathlib.Path]:
    """Every text file that belongs to the repository, without asking git (a tarball has none)."""
    found = [path for path in REPOSITORY.iterdir() if path.is_file()]
    for folder in OWN_FOLDERS:
        for parent, folders, names in os.walk(REPOSITORY / folder):
            folders[:] = [name for name in folders if name not in NOT_OURS]
            found += [pathlib.Path(parent, name) for name in names]
    return sorted(path for path in found if path.suffix in TEXT and not path.name.startswith(".coverage"))


def tree(path: pathlib.Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: pathlib.Path, line: int) -> str:
    """For messages: path:line."""
    return f"{path.relative_to(REPOSITORY)}:{line}"


def functions(path: pathlib.Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of one file, nested ones too."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imports(path: pathlib.Path) -> list[tuple[str, ast.stmt]]:
    """Top-level names of the packages that one file imports, with the statement."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module.partition(".")[0], node))
    return found


def catches_import_error(node: ast.Try) -> bool:
    """Whether one of the handlers names ImportError."""
    caught = [ast.unparse(handler.type) for handler in node.handlers if handler.type]
    return any("ImportError" in text for text in caught)


def guarded(path: pathlib.Path) -> set[int]:
    """Lines of imports that stand in a `try` which catches ImportError."""
    attempts = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Try) and catches_import_error(node)]
    return {child.lineno for node in attempts for child in node.body if isinstance(child, ast.Import | ast.ImportFrom)}


def test_product_functions_are_at_most_sixty_lines() -> None:
    """A reader can take in every decision at once."""
    long = [
        f"{where(path, node.lineno)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in EVERYTHING
        for node in functions(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert len(EVERYTHING) > len(MODULES) > 0, "the product has no modules"
    assert long == []


def test_files_are_at_most_four_hundred_lines() -> None:
    """A file is one noun; longer ones are two."""
    counted = {
        path.relative_to(REPOSITORY): len(path.read_text(encoding="utf-8").splitlines())
        for path in files()
        if path.suffix in {".py", ".c", ".h", ".sh"}
    }
    assert counted
    assert {path: lines for path, lines in counted.items() if lines > FILE_LINES} == {}


def test_product_has_no_assert_and_no_bare_except() -> None:
    """Checks survive `python -O`, and no error is swallowed unseen."""
    found = [
        where(path, node.lineno)
        for path in EVERYTHING
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.ExceptHandler) and node.type is None)
    ]
    assert found == []


def test_product_suppresses_no_exception_of_every_kind() -> None:
    """`suppress(Exception)` is a bare except by another name."""
    found = [
        where(path, node.lineno)
        for path in EVERYTHING
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("suppress")
        and any(ast.unparse(argument) in {"Exception", "BaseException"} for argument in node.args)
    ]
    assert found == []


def test_product_sleeps_only_between_readings_of_the_gpus() -> None:
    """The program waits on events, never for a guessed time; NVML alone tells nobody when memory is free."""
    sleepers = [
        path.name
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep", "asyncio.sleep"}
    ]
    assert sleepers in ([], ["verify.py"])


def test_product_imports_the_standard_library_psutil_and_pynvml_only() -> None:
    """The program runs as root on every node: nothing else comes along; `rich` only where ImportError is caught."""
    found = []
    for path in MODULES:
        optional = guarded(path)
        for name, node in imports(path):
            lawful = name in sys.stdlib_module_names or name in THIRD_PARTY or name == "cleanslate"
            if not lawful and not (name in GUARDED and node.lineno in optional):
                found.append(f"{where(path, node.lineno)} imports {name}")
    assert found == []


@pytest.mark.parametrize("library", ONE_MODULE_EACH)
def test_each_library_is_imported_in_one_module_only(library: str) -> None:
    """One edge, one module: psutil and NVML can be replaced or blamed in one place."""
    importers = {path.name for path in MODULES if library in {name for name, _ in imports(path)}}
    assert len(importers) <= 1, f"{library} is imported by {sorted(importers)}"


def test_formats_imports_the_standard_library_only() -> None:
    """Report and plan formats are shared with the operator, which must not pull in the node program."""
    formats = PRODUCT / "formats.py"
    assert [name for name, _ in imports(formats) if name not in sys.stdlib_module_names] == []
    relative = [node for node in ast.walk(tree(formats)) if isinstance(node, ast.ImportFrom) and node.level > 0]
    assert relative == []


def test_product_knows_nothing_of_its_tests() -> None:
    """What is tested is what runs: no name, variable or branch for tests."""
    found = [
        where(path, number)
        for path in EVERYTHING
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if TEST_SWITCH.search(line)
    ]
    assert found == []


def gives_away(line: str) -> bool:
    """Whether a line names a foreign address, someone's home, or the folder this checkout happens to be in."""
    named = [target for target in ADDRESS.findall(line) if target and not target.startswith("{")]  # {…}: a variable
    foreign = [target for target in named if not target.startswith(DOCUMENTATION)]
    return bool(foreign) or bool(SOMEONES_FOLDER.search(line)) or f"{REPOSITORY}/" in line


def test_no_file_tells_where_packages_or_machines_are() -> None:
    """Files link to documentation only; registries, mirrors and one machine's folders stay out."""
    found = [
        f"{where(path, number)}: {line.strip()[:100]}"
        for path in files()
        if path != pathlib.Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if gives_away(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("see https://github.com/vllm-project/vllm/issues/55510", False),
        ("index = https://packages.example.org/simple", True),
        ("cd /home/alice/cleanslate", True),
        ("curl http://localhost:8000/health", False),
        ('server = f"https://{host}:{port}"', False),
    ],
)
def test_an_address_is_told_from_a_link(line: str, told: bool) -> None:
    """The rule above finds what it is for."""
    assert gives_away(line) is told


def test_constraints_pin_names_and_versions_only() -> None:
    """The constraints file says what, not from where."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 10
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+-]+", line)] == []


def test_no_package_hides_the_standard_library() -> None:
    """A package named `operator`, or a test folder that is a package, would shadow others."""
    forbidden = [REPOSITORY / "operator", REPOSITORY / "initcontainer"]
    found = [folder / "__init__.py" for folder in forbidden if (folder / "__init__.py").exists()]
    found += list((REPOSITORY / "tests").rglob("__init__.py"))
    assert found == []


def test_nothing_is_left_for_later() -> None:
    """Work that is not done is an issue, not a comment."""
    marker = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X\\b")))
    found = [
        where(path, number)
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marker.search(line)
    ]
    assert found == []


def help_of(*verb: str) -> str:
    """What `cleanslate … --help` prints, without the caller's own settings."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("CLEANSLATE_")}
    return subprocess.run(
        [sys.executable, "-m", "cleanslate", *verb, "--help"],
        env={**plain, "PYTHONPATH": str(PRODUCT.parent), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout


VERBS = ("inspect", "reset", "gate", "idle")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    """`--help` answers at once and tells what the verb does, `idle` too."""
    assert help_of(verb).startswith(f"usage: cleanslate {verb}")


@pytest.mark.parametrize("verb", VERBS[:3])
def test_every_flag_names_its_variable_and_default_and_is_documented(verb: str) -> None:
    """A flag can be set from a pod's environment, its default is known, and docs/cli.md explains it."""
    text = help_of(verb)
    documented = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - {"--help", "--version"})
    assert "--gpu" in flags
    lacking = []
    for flag in flags:
        variable = "CLEANSLATE_" + flag.removeprefix("--").upper().replace("-", "_")
        lacking += [f"{flag}: {variable} is not in --help"] if variable not in text else []
        lacking += [f"{flag}: not in docs/cli.md"] if f"`{flag}" not in documented else []
        lacking += [f"{variable}: not in docs/cli.md"] if variable not in documented else []
    assert lacking == []


def test_documented_defaults_are_the_real_ones() -> None:
    """Each row of docs/cli.md tells the default, the variable and the verbs that the program itself has."""
    documented = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8").splitlines()
    lacking = []
    for row in settings.ROWS:
        verbs = " ".join(verb for verb in VERBS if verb in row.verbs)
        value = f" {row.metavar}" if row.metavar else ""
        start = "| `" + row.flag + value.replace("|", "\\|") + f"` | `{row.variable}` | {row.default} | {verbs} |"
        lacking += [start] if not any(line.startswith(start) for line in documented) else []
    assert lacking == []
