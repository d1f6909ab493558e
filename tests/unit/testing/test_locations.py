"""Addresses of data, and their blobs as files."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.storage import BLOBS, Location, Mirror, StorageAccount, locate

WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
PLACE = Location(BLOBS, "a/b")


@pytest.mark.parametrize(
    "address",
    [
        "azureml://datastores/workspaceblobstore/paths/a/b/",
        "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/workspaceblobstore/paths/a/b",
        f"https://{StorageAccount.blob_host}/{BLOBS}/a/b",
        f"azureml:{WORKSPACE}/data/digits/versions/1",
        f"{WORKSPACE}/data/digits/versions/1",
    ],
)
def test_an_address_is_a_location_in_a_container(address):
    assets = {f"{WORKSPACE}/data/digits/versions/1": "azureml://datastores/workspaceblobstore/paths/a/b"}
    assert locate(address, assets.get) == PLACE


@pytest.mark.parametrize(
    "address", ["azureml://datastores/other/paths/a", "https://example.com/a", f"{WORKSPACE}/data/none/versions/1", "a"]
)
def test_an_address_elsewhere_is_refused(address):
    with pytest.raises(UsageError, match="local workspace"):
        locate(address, {}.get)


@pytest.fixture(scope="module")
def storage():
    with StorageAccount() as storage:
        yield storage


@pytest.fixture
def mirror(storage, tmp_path):
    return Mirror(storage, tmp_path / "mirror")


def blobs(storage):
    with storage.container(BLOBS) as client:
        return {str(blob.name): client.download_blob(blob.name).readall() for blob in client.list_blobs()}


def test_what_a_node_writes_goes_to_the_blobs_and_what_it_deletes_goes_from_them(storage, mirror, tmp_path):
    folder = mirror.bring(PLACE)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "one.txt").write_text("1")
    (folder / "two.txt").write_text("2")
    mirror.store(PLACE)
    assert blobs(storage) == {"a/b/deep/one.txt": b"1", "a/b/two.txt": b"2"}
    (folder / "two.txt").unlink()
    (folder / "deep" / "one.txt").write_text("changed")
    mirror.bring(PLACE)
    assert (folder / "deep" / "one.txt").read_text() == "changed"
    mirror.store(PLACE)
    assert blobs(storage) == {"a/b/deep/one.txt": b"changed"}
    assert (Mirror(storage, tmp_path / "another").bring(PLACE) / "deep" / "one.txt").read_text() == "changed"


def test_a_folder_is_not_one_whose_name_begins_alike(storage, mirror, tmp_path):
    with storage.container(BLOBS) as client:
        client.upload_blob("x/y/1.txt", b"1")
        client.upload_blob("x/yz/2.txt", b"2")
        client.upload_blob("x/file.txt", b"3")
    mirror.copy(Location(BLOBS, "x/y"), tmp_path / "copy")
    mirror.copy(Location(BLOBS, "x/file.txt"), tmp_path / "file.txt")
    mirror.copy(Location(BLOBS, "x/none"), tmp_path / "empty")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["1.txt"]
    assert (tmp_path / "file.txt").read_text() == "3"
    assert list((tmp_path / "empty").iterdir()) == []
