"""The check of the project's wording."""

import pytest

from tools.vocabulary import check_python, check_text, fragments, main, retired


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the desks of a hub", ["desks"]),
        ("Somebody's crew", ["somebody's", "crew"]),
        ("a stand-in node", ["stand-in"]),
        ("the last word of a warm process", ["last word", "warm process"]),
        ("Whoever was told", ["whoever", "told"]),
        ("pull-in lanes", ["lanes"]),
        ("nodes stand in a row while keeping their patients' plane", []),
        ("the planes, a seatbelt, a voided cheque's avoidance", ["voided"]),
        ("ctypes.c_void_p", []),
    ],
)
def test_retired_words_are_found_whole_and_in_any_inflection(text, words):
    assert retired(text) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PATIENCE_SECONDS", ["patience"]),
        ("TableWitness", ["witness"]),
        ("StandInNode", ["stand-in"]),
        ("stand_in_node", ["stand-in"]),
        ("keeping", ["keeping"]),
        ("housekeeping", []),
        ("airplane", []),
    ],
)
def test_names_are_split_into_their_words(name, words):
    assert retired(name, name=True) == words


@pytest.mark.parametrize(
    "description",
    ["of this process.", "to change the rates of.", "by name", "asked again and again", "is called once", "in seconds"],
)
def test_a_fragment_is_no_description_of_an_argument(description):
    docstring = f"Do it.\n\nArgs:\n    x: {description}\n\nReturns:\n    y: of nothing"
    assert fragments(docstring) == [(3, f"x: {description}")]


@pytest.mark.parametrize(
    "description",
    [
        "current monotonic time in seconds",
        "whether to wait",
        "shared table of the run",
        "per-node seconds",
        "in-process recovery's limit",
        "used bytes",
        "tokens of a batch",
        "oven temperature",
    ],
)
def test_a_noun_phrase_is_a_description_of_an_argument(description):
    assert fragments(f"Do it.\n\nArgs:\n    x (int): {description}\n        of which the rest goes on here") == []


def test_names_docstrings_comments_and_strings_are_checked():
    source = "\n".join(  # noqa: FLY002
        [
            "def seat_of(rank):",
            '    """Return a desk.',
            "",
            "    Args:",
            "        rank: of the worker",
            '    """',
            "    # a witness",
            "    return f'shelf {rank}'",
        ]
    )
    expected = [(1, "seat"), (2, "desk"), (5, "rank: of the worker"), (7, "witness"), (8, "shelf")]
    assert check_python(source) == expected


def test_the_name_of_another_librarys_parameter_is_allowed_beside_its_class():
    source = "patience = 3\nReduceLROnPlateau(optimizer, patience=patience)\n"
    assert check_python(source) == [(1, "patience")]


def test_pages_are_checked_line_by_line():
    assert check_text("# Nodes\n\nA node's crew.\n") == [(3, "crew")]


def test_findings_name_file_and_line_and_fail(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("plain\n")
    assert main([str(page)]) == 0
    page.write_text("plain\na rescue\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:2: rescue\n"


def test_a_file_named_by_a_retired_word_is_found(tmp_path, capsys):
    (tmp_path / "lobby.py").write_text("")
    assert main([str(tmp_path)]) == 1
    assert "lobby (file name)" in capsys.readouterr().out
