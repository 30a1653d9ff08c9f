"""Rules about the source that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FLOW_LINES = 120
FILE_LINES = 450
FUNCTION_LINES = 80

#: Where the environment may be touched: read by the settings; set for libraries that have no other way to be told.
ENVIRONMENT = ("infra/settings.py", "flows/cli/session.py", "rlhf_core/engines/")

#: Modules that would become a home for everything.
CATCH_ALLS = {"utils", "util", "helpers", "helper", "common", "misc", "base_utils"}

#: Written so that this file passes its own test.
HOSTS = [r"py[p]i\.org", "python[h]osted", r"download\.py[t]orch", r"npm[j]s\.", r"gh[c]r\.io", r"docker[.]io"]
HOMES = ["work", "root", "home/[a-z]", "Users/[A-Za-z]", "opt/py"]
FOREIGN = {
    "a path of one machine": re.compile(rf"(?<![\w.])/({'|'.join(HOMES)})\b"),
    "the host of a package registry": re.compile("|".join(HOSTS)),
}


@pytest.fixture(scope="module")
def trees(modules, root) -> dict[Path, ast.Module]:
    return {file: ast.parse((root / file).read_text(encoding="utf-8")) for file in modules}


def functions(tree: ast.AST):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_flow_fits_on_a_page(modules, root):
    flows = [file for file in modules if file.parent == Path("flows")]
    assert {str(f): lines(root / f) for f in flows if lines(root / f) >= FLOW_LINES} == {}
    assert len(flows) >= 3


def test_files_are_short(project_files, root):
    python = [file for file in project_files if file.suffix == ".py"]
    assert {str(f): lines(root / f) for f in python if lines(root / f) > FILE_LINES} == {}


def test_functions_are_short(trees):
    long = {
        f"{file}:{node.name}": length
        for file, tree in trees.items()
        for node in functions(tree)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_every_public_name_is_described(trees):
    described = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bare = [str(file) for file, tree in trees.items() if not ast.get_docstring(tree)]
    bare += [
        f"{file}:{node.name}"
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, described) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert bare == []


def test_the_environment_is_touched_in_few_places(trees):
    def touches(tree: ast.Module) -> bool:
        names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
        uses = any(
            isinstance(n, ast.Attribute) and n.attr in names and isinstance(n.value, ast.Name) and n.value.id == "os"
            for n in ast.walk(tree)
        )
        imports = any(
            isinstance(n, ast.ImportFrom) and n.module == "os" and names & {a.name for a in n.names}
            for n in ast.walk(tree)
        )
        return uses or imports

    places = [file.as_posix() for file, tree in trees.items() if touches(tree)]
    assert [place for place in places if not place.startswith(ENVIRONMENT)] == []


def test_stored_configurations_have_one_door(trees):
    """Whoever took keys from a record, or parsed it as a preset, would miss the upgrades (rlhf_core/config/stored.py)."""

    def opens(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr == "config"
        return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parse_config")

    places = {file.as_posix() for file, tree in trees.items() if any(opens(node) for node in ast.walk(tree))}
    assert {place for place in places if not place.startswith("rlhf_core/config/")} == set()


def test_no_process_is_forked(project_files, root):
    """A child of a process with threads inherits the locks that they hold just then, for ever: the console's, a store's."""
    forking = {"Process", "Pool", "Manager"}

    def forks(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="fork" | "forkpty"):
                return True
            case ast.Attribute(value=ast.Name(id="multiprocessing"), attr=name) if name in forking:
                return True
            case ast.ImportFrom(module="os" | "multiprocessing", names=names):
                return any(alias.name in forking | {"fork", "forkpty"} for alias in names)
            case ast.Call(func=function, args=args, keywords=keywords):
                words = {keyword.arg for keyword in keywords}
                name = ast.unparse(function).rpartition(".")[2]
                ways = [arg.value for arg in args if isinstance(arg, ast.Constant)]
                return (
                    "preexec_fn" in words
                    or (name == "ProcessPoolExecutor" and "mp_context" not in words)
                    or (name in ("get_context", "set_start_method") and ways != ["spawn"])
                )
        return False

    trees = {f: ast.parse((root / f).read_text(encoding="utf-8")) for f in project_files if f.suffix == ".py"}
    assert [f"{f}:{node.lineno}" for f, tree in trees.items() for node in ast.walk(tree) if forks(node)] == []


def test_no_module_is_a_catch_all(modules):
    assert [str(file) for file in modules if file.stem in CATCH_ALLS] == []


def test_no_exception_is_swallowed(trees):
    silent = [
        f"{file}:{node.lineno}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in node.body)
    ]
    assert silent == []


def test_nothing_is_left_for_later(modules, root):
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")  # fmt: skip
    assert [str(file) for file in modules if marks.search((root / file).read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_names(what, project_files, root):
    found = []
    for file in project_files:
        try:
            text = (root / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{file}: {match.group()}" for match in FOREIGN[what].finditer(text)]
    assert found == []


def test_test_modules_have_names_of_their_own(project_files):
    tests = [file for file in project_files if file.parts[0] == "tests" and file.suffix == ".py"]
    assert [str(file) for file in tests if file.name == "__init__.py"] == [], "pytest would import it as a package"
    stems = [file.stem for file in tests if file.stem != "conftest"]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []
