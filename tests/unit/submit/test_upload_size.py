"""A code folder that has more than the program is named with its largest parts."""

import os

import pytest

from azureml_elastic import ElasticCommandJob, ElasticResources


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("pass")
    for name, nbytes in (("downloaded/a/step-1", 80_000_000), ("runs/model.bin", 30_000_000), ("notes.txt", 1_000)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(nbytes)  # it takes no space
    return tmp_path


def warned(folder, caplog):
    """Compile a job with this code; return what was said."""
    job = ElasticCommandJob(
        code=folder, command="python train.py", environment="e@latest", compute="c",
        resources=ElasticResources(max_instance_count=2),
    )  # fmt: skip
    job.compile()
    return caplog.text


def test_the_largest_parts_of_a_large_folder_are_named(folder, caplog):
    text = warned(folder, caplog)
    assert "uploads 110 MB in 4 files" in text
    assert "downloaded/ (80 MB, 1 file), runs/ (30 MB, 1 file), notes.txt (1 kB, 1 file)" in text
    assert str(folder / ".amlignore") in text


def test_what_is_ignored_does_not_count(folder, caplog):
    (folder / ".amlignore").write_text("downloaded/\n")
    assert warned(folder, caplog) == ""


def test_many_small_files_are_named_by_their_number(folder, caplog):
    (folder / ".amlignore").write_text("downloaded/\nruns/\n")
    (folder / "images").mkdir()
    for number in range(2000):
        os.link(folder / "notes.txt", folder / "images" / str(number))
    text = warned(folder, caplog)
    assert "uploads 2 MB in 2,003 files" in text
    assert "The largest parts are images/ (2 MB, 2,000 files)" in text


def test_links_count_as_what_they_lead_to_and_ignored_ones_to_nothing_do_not(folder, caplog, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with (elsewhere / "data").open("wb") as file:
        file.truncate(500_000_000)
    (folder / "linked").symlink_to(elsewhere)
    (folder / ".amlignore").write_text("downloaded/\nruns/\nnowhere\n")
    (folder / "nowhere").symlink_to("gone")
    assert "linked/ (500 MB, 1 file)" in warned(folder, caplog)
