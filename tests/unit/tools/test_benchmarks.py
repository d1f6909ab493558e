"""What no check runs, benchmarks and the scripts of the documentation: names that it imports, or fills in, exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "tests/gpu") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.filterwarnings("ignore")  # of packages that Azure's import
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "azureml_elastic":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_each_page_of_results_gets_the_values_that_it_names():
    pages = set()
    for script in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "substitute":
                (page,) = re.findall(r"'(\w*page\.md)'", ast.unparse(node.func))
                wanted = set(re.findall(r"\$(\w+)", (ROOT / "benchmarks" / page).read_text()))
                given = {each.arg for each in node.keywords}
                assert given == wanted if not node.args else given < wanted, page  # other values come by a mapping
                pages.add(page)
    assert pages == {path.name for path in (ROOT / "benchmarks").glob("*page.md")}
