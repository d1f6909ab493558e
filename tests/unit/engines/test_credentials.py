"""Credentials that all nodes of a run derive from its key."""

import itertools
import socket
import ssl
import stat
from threading import Thread

import pytest
from cryptography import x509

from azureml_elastic.engines.dask import derive_credentials, tls_context, write_credentials
from azureml_elastic.errors import EngineError

KEY = bytes(range(32))


@pytest.fixture
def write(tmp_path):
    return lambda key, purpose="dask": write_credentials(derive_credentials(key, purpose), str(tmp_path), purpose)


def server_context(path, flags=0):
    """Return the context of a server that accepts these credentials alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= flags
    return context


def exchange(server, client):
    """Return what a client receives from a server, each with its own context."""
    here, there = socket.socketpair()
    here.settimeout(10)
    there.settimeout(10)
    failures = []

    def serve():
        try:
            with server.wrap_socket(there, server_side=True) as secured:
                secured.sendall(b"hello")
        except OSError as error:
            failures.append(error)
        finally:
            there.close()

    serving = Thread(target=serve)
    serving.start()
    try:
        with here, client.wrap_socket(here) as secured:
            return secured.recv(5)
    finally:
        serving.join()


def test_all_nodes_derive_the_same_and_every_other_key_or_purpose_something_else():
    made = [derive_credentials(key, purpose) for key in (KEY, KEY[::-1]) for purpose in ("dask", "ray")]
    assert made[0] == derive_credentials(KEY, "dask")
    assert len(set(made)) == 4
    certificate = x509.load_pem_x509_certificate(made[0])
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (2000, 2100)
    assert KEY.hex().encode() not in made[0]


def test_without_a_key_nothing_is_derived():
    with pytest.raises(EngineError, match=r"no key of the run \(0 bytes\), so the connections of dask cannot"):
        derive_credentials(b"", "dask")


def test_only_the_user_can_read_the_file_and_another_key_has_another_one(write):
    paths = [write(KEY), write(KEY[::-1]), write(KEY)]
    assert paths[0] == paths[2] != paths[1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert sorted(paths[0].parent.iterdir()) == sorted(paths[:2])


def test_both_ends_prove_that_they_have_them_under_strict_rules(write):
    path = write(KEY)
    strict = server_context(path, ssl.VERIFY_X509_STRICT)
    client = tls_context(path)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert exchange(strict, client) == b"hello"


def test_credentials_of_another_run_or_purpose_are_refused_by_both_ends(write):
    own = write(KEY)
    for other in (write(KEY[::-1]), write(KEY, "ray")):
        for one, another in itertools.permutations((own, other)):
            with pytest.raises(ssl.SSLCertVerificationError):
                exchange(server_context(one), tls_context(another))
            credulous = tls_context(another)
            credulous.verify_mode = ssl.CERT_NONE
            with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca|decrypt.error|certificate"):
                exchange(server_context(one), credulous)


def test_a_client_without_a_certificate_is_refused(write):
    path = write(KEY)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(path)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
        exchange(server_context(path), client)
