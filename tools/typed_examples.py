"""Check the types of what is shown: the Python blocks of README and docs, and samples, by mypy and by pyright.

``python tools/typed_examples.py``

Both are strict, and without a plugin. Of packages that have no types nothing is expected: pyright does
not guess them, and what is unknown of them is no error of an example.

The blocks of a page become one module, on the same lines, in which later blocks know what earlier ones define. What
fragments leave out is in ``tools/example_names.pyi``.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/**/*.md")
SAMPLES = ("samples/sweep/sweep.py", "samples/digits.py")
UNTYPED = ("deepspeed", "distributed", "evaluate", "horovod", "plotly", "ray", "sklearn", "torch_ort", "transformers")
"""Packages without types, or that are not installed for this."""

PYRIGHT = {
    "typeCheckingMode": "strict",
    "useLibraryCodeForTypes": False,
    "reportMissingImports": False,  # mypy reports them
    "reportMissingModuleSource": False,
    "reportMissingTypeStubs": False,
    "reportUnknownArgumentType": False,
    "reportUnknownMemberType": False,
    "reportUnknownParameterType": False,
    "reportUnknownVariableType": False,
    "reportUntypedFunctionDecorator": False,
    "reportWildcardImportFromLibrary": False,
}


def module_of(page: str) -> str:
    """Return the Python blocks of a page as a module, with each line where the page has it; empty without any block."""
    lines, fence, found = [], None, False
    for line in page.splitlines():
        if fence is None:
            opened = re.fullmatch(r"( *)```python", line)
            fence = opened[1] if opened else None
            found = found or opened is not None
            lines.append("")
        elif line.strip() == "```":
            fence = None
            lines.append("")
        else:
            lines.append(line.removeprefix(fence))
    text = "\n".join(lines)
    names = missing_names(ast.parse(text))
    # Nothing is defined on a page's title.
    given = f"from example_names import {', '.join(names)}" if names else ""
    return "\n".join([given, *lines[1:], ""]) if found else ""


def missing_names(module: ast.Module) -> list[str]:
    """Return the names that a module reads at a statement before any has defined them."""
    defined, missing = set(dir(builtins)), set()
    for statement in module.body:
        nodes = list(ast.walk(statement))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
        # An assignment reads before it defines.
        missing |= read - defined - (set() if isinstance(statement, ast.Assign) else own)
        defined |= own
    return sorted(missing)


def write_modules(folder: Path) -> list[Path]:
    """Write a module for each page that has blocks, and one for each sample, and return them."""
    (folder / "example_names.pyi").write_text((ROOT / "tools" / "example_names.pyi").read_text())
    modules = []
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        if text := module_of(path.read_text()):
            name = "_".join(path.relative_to(ROOT).with_suffix("").parts).replace("-", "_").lower()
            modules.append(folder / f"{name}.py")
            modules[-1].write_text(text)
    for sample in SAMPLES:
        modules.append(folder / Path(sample).name)
        modules[-1].write_text((ROOT / sample).read_text())
    return modules


def main() -> int:
    """Run both checkers, and return whether one of them has found an error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules = write_modules(folder)
        ignored = ",".join(f"{package}.*" for package in UNTYPED)
        settings = folder / "mypy.ini"
        settings.write_text(
            f"[mypy]\nstrict = true\nmypy_path = {folder}\ncache_dir = {ROOT / '.mypy_cache' / 'examples'}\n"
            f"disable_error_code = untyped-decorator\n[mypy-{ignored}]\nignore_missing_imports = true\n"
            "follow_imports = skip\n[mypy-azureml_elastic.*]\nignore_errors = true\n"
        )
        config = folder / "pyrightconfig.json"
        config.write_text(json.dumps({**PYRIGHT, "include": ["."], "extraPaths": [name, str(ROOT / "src")]}))
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(settings)]
        commands = [
            [*mypy, *map(str, modules)],
            [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", name],
        ]
        return max(subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
