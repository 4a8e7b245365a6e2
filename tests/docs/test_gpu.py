"""docs/gpu.md lists every function of the package with code for GPUs only, and names what executes it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpu.md"
ON_GPU = re.compile(r"cuda|nccl|flex|is_available|pin_memory|BlockMask|block_mask|(?:^|_)ipc|^Ipc|_ON_GPU$")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PARTS = (*FUNCTIONS, ast.ClassDef)


def marked_lines(source: str) -> set[int]:
    """The lines within functions that have a word of GPU code, or a comparison with ``"cpu"``, whose other branch is a GPU's.

    Docstrings, comments, imports and signatures do not count.
    """
    inside, skipped = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, FUNCTIONS):
            inside |= set(range(node.body[0].lineno, node.end_lineno + 1))
            skipped |= set(range(node.lineno, node.body[0].lineno))
    in_f_string = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # before Python 3.12, an f-string is one token
    words = (tokenize.NAME, tokenize.STRING, in_f_string)
    lines, before = set(), ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_marked = token.type in words and ON_GPU.search(token.string.strip("\"'"))
        is_other_branch = token.string == '"cpu"' and before in ("==", "!=")
        if (is_marked or is_other_branch) and token.start[0] not in skipped:
            lines.add(token.start[0])
        before = token.string
    return lines & inside


def functions_of(source: str) -> Iterator[str]:
    """The function, by qualified name, of each marked line."""
    spans: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            own = f"{name}.{child.name}".lstrip(".") if isinstance(child, PARTS) else name
            if isinstance(child, PARTS):
                spans.append((child.lineno, child.end_lineno, own))
            visit(child, own)

    visit(ast.parse(source), "")
    for line in sorted(marked_lines(source)):
        around = [span for span in spans if span[0] <= line <= span[1]]
        yield min(around, key=lambda span: span[1] - span[0])[2]


def found() -> set[tuple[str, str]]:
    """File, relative to ``vlmrl/``, and function."""
    package = ROOT / "vlmrl"
    return {
        (str(path.relative_to(package)), name)
        for path in sorted(package.rglob("*.py"))
        for name in functions_of(path.read_text())
    }


def listed() -> dict[tuple[str, str], str]:
    """What executes each function, from the page's table."""
    table = PAGE.read_text().partition("| file | function |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {(file.strip("`"), name.strip("`")): run_by for file, name, _, run_by in cells}


def test_words_of_gpu_code_are_found():
    source = '''"""About cuda."""
import torch.cuda

LIMIT_ON_GPU = 3  # on cuda

def plan(nccl: torch.cuda.Stream = None):
    return 1

class Engine:
    """Of nccl."""

    field: int = 0
    """On cuda."""

    def pick(self):
        """Of cuda."""
        return "cuda" if torch.cuda.is_available() else "recipe"

    def size(self, tensor):
        return 2 if tensor.device.type == "cpu" else 3

    def name(self):
        return torch.device("cpu"), "the recipe"
'''
    assert list(functions_of(source)) == ["Engine.pick", "Engine.size"]


def test_every_function_with_code_for_gpus_is_listed():
    missing = found() - listed().keys()
    assert not missing, "add a line for each to the table of docs/gpu.md, with the test that executes it"


def test_every_listed_function_has_code_for_gpus():
    assert not listed().keys() - found(), "these lines of the table of docs/gpu.md name nothing"


def test_each_line_names_its_test_or_a_reason():
    wrong = {
        name: run_by
        for name, run_by in listed().items()
        if not re.search(r"`tests/[\w/]+\.py`", run_by) and not run_by.startswith("not executed: ")
    }
    assert not wrong
