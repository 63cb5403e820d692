"""Figures of size and shape of the repository, read from its source."""

import ast
import collections
import functools
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ("jflex", "pallas_kernels", "flax_layers")
PARTICLES = frozenset(
    ["found", "own", "made", "held", "left", "given", "said", "place", "of", "wanted", "asked", "rest", "lacking"]
)
BEGINNINGS = re.compile(r"(Those|That|Of|As|What|Which|Whether|Where|How|Who|Likewise|The same) ")
Function = ast.FunctionDef


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def files(suffix: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", f"*.{suffix}"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:  # a copy without its history
        hidden = lambda path: any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        return sorted(str(x.relative_to(ROOT)) for x in ROOT.rglob(f"*.{suffix}") if not hidden(x))
    return sorted(path for path in listed.stdout.split() if (ROOT / path).is_file())


def library() -> list[str]:
    return [path for path in files("py") if path.startswith(LIBRARY)]


def lines_under(*folders: str) -> int:
    return sum(text(path).count("\n") for path in files("py") if path.startswith(folders))


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    return ((path, node) for path in library() for node in ast.walk(tree(path)) if isinstance(node, kind))


def is_overload(function: Function) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in function.decorator_list)


@functools.cache
def functions() -> list[tuple[str, Function]]:
    return list(nodes(ast.FunctionDef))


def code_lines(path: str, function: Function) -> int:
    """Counts lines without docstrings, comments and empty lines."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inner = [x for x in ast.walk(function) if isinstance(x, documented) and ast.get_docstring(x)]
    docs = {line for x in inner for line in range(x.body[0].lineno, x.body[0].end_lineno + 1)}
    span = enumerate(text(path).splitlines()[function.lineno - 1 : function.end_lineno], function.lineno)
    return sum(number not in docs and line.strip()[:1] not in ("", "#") for number, line in span)


def parameter_count(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def plain_functions(test: Callable[[str, Function], bool]) -> int:
    return sum(test(path, function) for path, function in functions() if not is_overload(function))


def overload_lines() -> int:
    return sum(x.end_lineno - x.lineno + 2 for _, x in functions() if is_overload(x))


def fields(class_node: ast.ClassDef) -> list[str]:
    return [getattr(x.target, "id", "") for x in class_node.body if isinstance(x, ast.AnnAssign)]


def classes() -> list[ast.ClassDef]:
    return [node for _, node in nodes(ast.ClassDef)]


def occurrences(pattern: str) -> int:
    return sum(len(re.findall(pattern, text(path))) for path in library())


def folder_sizes() -> collections.Counter[str]:
    modules = (path for path in files("py") if not path.endswith(("__init__.py", "__main__.py")))
    return collections.Counter(str(pathlib.PurePath(path).parent) for path in modules)


def folder_circles() -> list[tuple[str, str]]:
    """Lists the pairs of rooms, a folder or module of a package, that import each other."""
    modules = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in library()}
    room = lambda path: "/".join(path.split("/")[:2])
    edges = set()
    for path, node in nodes(ast.ImportFrom):
        for alias in node.names:
            target = modules.get(f"{node.module}.{alias.name}") or modules.get(node.module or "")
            if target and room(target) != room(path):
                edges.add((room(path), room(target)))
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def particle_names() -> int:
    names = collections.Counter()
    for path in library():
        for node in ast.walk(tree(path)):
            stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            named = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else getattr(node, "arg", stored)
            names[named] += 1
    return sum(names[word] for word in PARTICLES)


@functools.cache
def docstrings() -> list[str]:
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    return [doc for _, node in nodes(kinds) if (doc := ast.get_docstring(node))]


def short_entries() -> int:
    entry = re.compile(r"^\s{2,}\w+: (.+?)(?=\n\s{2,}\w+: |\n\n|\Z)", re.M | re.S)
    return sum(len(found.split()) <= 3 for doc in docstrings() for found in entry.findall(doc))


def repeated_class_names() -> int:
    return sum(count > 2 for count in collections.Counter(x.name for x in classes()).values())


def name_patterns() -> int:
    """Counts the patterns of `tests/tiers.py` that choose tests by their names."""
    tiers = next((tree(path) for path in files("py") if path.endswith("/tiers.py")), ast.Module([], []))
    tables = [node.value for node in tiers.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    return sum(len(table.keys) for table in tables)


def pages() -> list[str]:
    return [path for path in files("md") if "results" not in path]


def prose(path: str) -> list[str]:
    return re.sub(r"```.*?```", "", text(path), flags=re.S).split("\n\n")


def long_paragraphs() -> int:
    starts = ("#", "|", "<!--", "*", "-", "1.")
    blocks = (block for path in pages() for block in prose(path) if not block.strip().startswith(starts))
    return sum(len(block.split()) > 100 for block in blocks)


def long_bullets() -> int:
    bullet = re.compile(r"^\* (.+?)(?=^\* |\Z)", re.M | re.S)
    found = (x for path in pages() for block in prose(path) for x in bullet.findall(block))
    return sum(len(x.split()) > 60 for x in found)


FIGURES: dict[str, Callable[[], int]] = {
    "library lines": lambda: lines_under(*LIBRARY),
    "test lines": lambda: lines_under("tests/"),
    "benchmark lines": lambda: lines_under("benchmarks/"),
    "library files over 400 lines": lambda: sum(text(path).count("\n") > 400 for path in library()),
    "functions over 50 code lines": lambda: plain_functions(lambda path, x: code_lines(path, x) > 50),
    "functions with more than 8 parameters": lambda: plain_functions(lambda _, x: parameter_count(x) > 8),
    "lines of overloads": overload_lines,
    "uses of Any": lambda: occurrences(r"\bAny\b"),
    "fields of AttentionSpec": lambda: sum(len(fields(x)) for x in classes() if x.name == "AttentionSpec"),
    "classes with score_operands": lambda: sum("score_operands" in fields(x) for x in classes()),
    "triton_here and .own": lambda: occurrences(r"triton_here|\.own\("),
    "spec.route": lambda: occurrences(r"spec\.route"),
    "library folders over 14 modules": lambda: sum(
        count > 14 for folder, count in folder_sizes().items() if folder.startswith(LIBRARY)
    ),
    "largest tests folder": lambda: max(n for folder, n in folder_sizes().items() if folder.startswith("tests")),
    "folders that import each other": lambda: len(folder_circles()),
    "particles as names": particle_names,
    "docstrings that begin with a fragment": lambda: sum(bool(BEGINNINGS.match(doc)) for doc in docstrings()),
    "Args entries of at most 3 words": short_entries,
    "class names used three times": repeated_class_names,
    "patterns that choose tests by name": name_patterns,
    "lines of README.md": lambda: text("README.md").count("\n"),
    "lines of the longest page": lambda: max(text(path).count("\n") for path in pages()),
    "paragraphs over 100 words": long_paragraphs,
    "bullets over 60 words": long_bullets,
}
