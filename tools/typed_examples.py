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
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/**/*.md")
UNTYPED = ("datasets", "deepspeed", "distributed", "evaluate", "horovod", "plotly", "ray", "sklearn", "torch_ort")
UNTYPED += ("transformers",)
"""Packages without types, or that are not installed for this."""

UNKNOWN = "# pyright: " + ", ".join(f"reportUnknown{kind}Type=false" for kind in ("Argument", "Parameter", "Variable"))
"""Of a module that imports one of these packages, or azure-ai-ml, of which mappings and some methods have no types."""

PYRIGHT = {
    "typeCheckingMode": "strict",
    "useLibraryCodeForTypes": False,
    "reportMissingImports": False,  # mypy reports them
    "reportMissingModuleSource": False,
    "reportMissingTypeStubs": False,
    # Of torch's and azure-ai-ml's own annotations, those of the most used members say nothing of a parameter, such as
    # manual_seed(seed), step(closure=None) and create_or_update(tags: dict).
    "reportUnknownMemberType": False,
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


def with_unknowns(text: str) -> str:
    """Return a module that may have values of unknown types where they come from another package."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    found = {name.partition(".")[0] for name in names} & {*UNTYPED, "azure", "ml_client"}
    return f"{text}\n{UNKNOWN}\n" if found else text


def write_modules(folder: Path) -> list[Path]:
    """Write a module for each page that has blocks, and one for each sample, and return them."""
    (folder / "example_names.pyi").write_text((ROOT / "tools" / "example_names.pyi").read_text())
    modules = []
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        if text := module_of(path.read_text()):
            name = "_".join(path.relative_to(ROOT).with_suffix("").parts).replace("-", "_").lower()
            modules.append(folder / f"{name}.py")
            modules[-1].write_text(with_unknowns(text))
    samples = sorted((ROOT / "samples").glob("**/*.py"))
    stems = Counter(sample.stem for sample in samples)
    for sample in samples:
        parts = sample.relative_to(ROOT / "samples").with_suffix("").parts
        # Under its own name, others import it; scripts of one name are imported by none.
        modules.append(folder / f"{sample.stem if stems[sample.stem] == 1 else '_'.join(parts)}.py")
        modules[-1].write_text(with_unknowns(sample.read_text()))
    return modules


def main() -> int:
    """Run both checkers, and return whether one of them has found an error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules = write_modules(folder)
        ignored = ",".join(f"{package}.*" for package in UNTYPED)
        settings = folder / "mypy.ini"
        settings.write_text(
            f"[mypy]\nstrict = true\nuntyped_calls_exclude = torch\n"  # its backward() has no types
            f"mypy_path = {folder}\ncache_dir = {ROOT / '.mypy_cache' / 'examples'}\n"
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
