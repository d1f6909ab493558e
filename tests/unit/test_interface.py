"""The pages of the interface name all that scripts may import, and nothing else."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import azureml_elastic
from azureml_elastic import config, errors
from azureml_elastic.train import Session
from tests.support.paths import ROOT

SOURCE = Path(azureml_elastic.__file__).parent
PAGE = (ROOT / "docs" / "reference" / "interface.md").read_text(encoding="utf-8")


def exported(module):
    """Return the names of a package's ``__all__``, without importing what it needs."""
    tree = ast.parse(SOURCE.joinpath(*module.split(".")[1:], "__init__.py").read_text(encoding="utf-8"))
    (value,) = (
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    )
    return sorted(ast.literal_eval(value))


def in_table(heading):
    """Return the names in the second column of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return sorted(name for row in section.splitlines() for name in re.findall(r"`(\w+)`", "|".join(row.split("|")[2:])))


@pytest.mark.parametrize("module", ["azureml_elastic", "azureml_elastic.train"])
def test_a_package_has_the_names_of_its_table(module):
    assert in_table(f"`{module}`") == exported(module)


def test_the_other_modules_have_the_names_of_their_rows():
    rows = re.findall(r"^\| `(azureml_elastic\.[\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 3
    for module, names in rows:
        assert sorted(re.findall(r"`(\w+)`", names)) == exported(module), module


def test_a_session_shows_what_the_page_says_and_about_a_dozen_verbs():
    shown = {name for name in dir(Session) if not name.startswith("_")}
    assert in_table("A session, `run = train.start()`") == sorted(shown)
    assert sum(callable(getattr(Session, name)) for name in shown) <= 13


def test_of_the_configuration_fields_alone_are_promised():
    shown = re.findall(r"^::: azureml_elastic\.config\.(\w+)\n(    options: \{members: false\})?", PAGE, re.MULTILINE)
    assert len(shown) > 10
    for name, hidden in shown:
        methods = {
            key
            for key, value in vars(getattr(config, name)).items()
            if key[0] != "_" and (isinstance(value, property) or inspect.isfunction(value))
        }
        assert hidden or not methods - {"model_post_init"}, name
    assert "::: azureml_elastic.train.ElasticLoader\n    options: {members: [name, steps_per_epoch, __len__]}\n" in PAGE


def test_getting_started_installs_once_and_runs_what_it_has_installed():
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:python -m (?:pip|nox)|azureml-elastic demo).*", page, re.MULTILINE)
    assert [command.partition("  #")[0] for command in commands] == [
        "python -m pip install torch --index-url https://download.pytorch.org/whl/cpu",
        "python -m pip install '.[submit,node,demo]'",
        "azureml-elastic demo",
    ]


def test_vulnerabilities_are_reported_in_private_on_the_site_that_hosts_the_repository():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "*Report a vulnerability*" in page
    assert "pyproject" not in page  # it names no address


def test_code_of_the_pages_has_at_most_100_columns():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        blocks = page.read_text(encoding="utf-8").split("\n```")[1::2]
        assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == [], page


def test_the_page_of_errors_names_each_class():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    tree = page.partition("\n## Errors\n")[2].partition("```text\n")[2].partition("```")[0]
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert set(re.findall(r"\b[A-Z]\w+\b", tree)) & classes == classes


def test_the_states_of_a_step_are_drawn_as_they_are():
    """Else run ``python docs/draw_states.py step``."""
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "docs" / "draw_states.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert drawing.step_diagram() in drawing.STEP_PAGE.read_text(encoding="utf-8")


def test_what_ci_runs_is_what_the_readme_and_contributing_say():
    *_, command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "nox" in command
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"```bash\n{command}\n```" in (ROOT / page).read_text(encoding="utf-8"), page
