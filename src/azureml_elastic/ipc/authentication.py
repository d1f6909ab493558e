"""Mutual authentication of the two ends of a connection, and of each message, with a key that both hold.

The handshake is the three-pass mutual authentication of ISO/IEC 9798-4 with HMAC-SHA-256 (RFC 2104). Each end proves
that it holds the key by a MAC over both nonces, both names and the purpose of the connection::

    client → server   version, purpose, nonce, client, incarnation of the server
    server → client   nonce, server, MAC
    client → server   MAC

Each of the three is a frame: two bytes with its length, and fields with two bytes of length each. The keys of the two
directions are derived from the shared key and the whole handshake with HKDF (RFC 5869). Each message then carries
HMAC-SHA-256-128 (RFC 4868) over its sequence number and its bytes, so that none can be forged, changed, repeated,
reordered or left out. Messages are not encrypted.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 32
_NONCE_BYTES = 32
_TAG_BYTES = 16
_TAG_CHARACTERS = 2 * _TAG_BYTES
_LENGTH_BYTES = 2
# All that a client can make this end hold before it is authenticated.
_MAX_FRAME = 2048
_VERSION = b"azureml-elastic 1"


class AuthenticationError(ConnectionError):
    """The other end has not proved that it holds the key, or a message was not sent by it."""


@dataclass(frozen=True)
class Peer:
    """One end of a connection.

    Args:
        incarnation: random identifier of the node's process; ``""`` accepts any.
    """

    name: str
    incarnation: str


ANY = Peer("", "")
"""Any process that holds the key."""


class Session:
    """Authentication of the messages of one connection. Not thread-safe.

    Args:
        peer: the other end, as it has proved to be.
        sending: key of the messages that are sent.
        receiving: key of the messages that are received.
        secret: key that both ends have for what else they agree on.
    """

    def __init__(self, peer: Peer, sending: bytes, receiving: bytes, secret: bytes) -> None:
        self.peer = peer
        self.secret = secret
        self._sending = sending
        self._receiving = receiving
        self._sent = self._received = 0

    def seal(self, line: bytes) -> bytes:
        """Return an encoded message, which ends with a newline, with the tag of the next message before it."""
        tag = _tag(self._sending, self._sent, line[:-1])
        self._sent += 1
        return tag + line

    def open(self, line: bytes) -> bytes:
        """Return a received line without its tag; its newline is removed before.

        Raises:
            AuthenticationError: this is not the next message of the other end.
        """
        tag, line = line[:_TAG_CHARACTERS], line[_TAG_CHARACTERS:]
        if not hmac.compare_digest(tag, _tag(self._receiving, self._received, line)):
            raise AuthenticationError(f"message {self._received} is not authentic")
        self._received += 1
        return line


class Authenticator:
    """One process's part in the handshakes of its connections.

    Args:
        purpose: what the connections are for; both ends must agree.
        key: the shared key of :data:`KEY_BYTES` bytes; without one every handshake fails.

    Attributes:
        refusals: number of accepted connections whose clients have not accepted this end's proof: they may hold another
            key.
    """

    def __init__(self, me: Peer, purpose: str, key: bytes | None = None) -> None:
        self.me = me
        self.key = key
        self.refusals = 0
        self._purpose = purpose.encode()

    def accept(self) -> Handshake:
        """Return the handshake of a connection that this process has accepted."""
        return ServerHandshake(self.me, self._purpose, self.key)

    def open(self, to: Peer) -> Handshake:
        """Return the handshake of a connection that this process has opened."""
        return ClientHandshake(self.me, self._purpose, self.key, to)


class Handshake(abc.ABC):
    """One end's side of a handshake, without I/O.

    Args:
        purpose: what the connection is for.

    Attributes:
        opening: what to send first.
        session: the session once the peer has proved that it holds the key.
        refusal: why the connection must be closed although the peer may hold the key.
        has_proved: whether this end has proved to hold the key, but the peer has not yet.
    """

    def __init__(self, me: Peer, purpose: bytes, key: bytes | None) -> None:
        self.opening = b""
        self.session: Session | None = None
        self.refusal: str | None = None
        self.has_proved = False
        self._me = me
        self._purpose = purpose
        self._key = key
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take what the peer has sent, and return what to send to it.

        Raises:
            AuthenticationError: the peer does not follow the protocol, or does not hold the key.
        """
        self._received += data
        frame = _take_frame(self._received)
        if frame is None:
            return b""
        if self._key is None:
            raise AuthenticationError("this node does not know the run's key yet")
        return self._answer(self._key, frame)

    def take_rest(self) -> bytes:
        """Return what was received after the handshake."""
        rest = bytes(self._received)
        self._received.clear()
        return rest

    @abc.abstractmethod
    def _answer(self, key: bytes, frame: bytes) -> bytes:
        """Return the answer to the body of a frame."""


class ClientHandshake(Handshake):
    """The side of the end that has opened the connection."""

    def __init__(self, me: Peer, purpose: bytes, key: bytes | None, to: Peer) -> None:
        super().__init__(me, purpose, key)
        self._to = to
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.opening = _frame(_VERSION, purpose, nonce, *_names(me), to.incarnation.encode())

    def _answer(self, key: bytes, frame: bytes) -> bytes:
        nonce, name, incarnation, proof = _fields(frame, 4)
        transcript = self.opening + _frame(nonce, name, incarnation)
        if not hmac.compare_digest(proof, _proof(key, b"server", transcript)):
            raise AuthenticationError("the server does not hold the run's key")
        server = Peer(_text(name), _text(incarnation))
        if self._to.incarnation not in ("", server.incarnation):
            # After the proof: only who holds the key can say whose port it is.
            self.refusal = f"another process, {server.name}'s, has this port now"
            return b""
        self.session = Session(server, *_session_keys(key, transcript))
        return _frame(_proof(key, b"client", transcript))


class ServerHandshake(Handshake):
    """The side of the end that has accepted the connection."""

    _transcript = b""
    _client = Peer("", "")

    def _answer(self, key: bytes, frame: bytes) -> bytes:
        if self._transcript:
            (proof,) = _fields(frame, 1)
            if not hmac.compare_digest(proof, _proof(key, b"client", self._transcript)):
                raise AuthenticationError("the client does not hold the run's key")
            theirs, ours, secret = _session_keys(key, self._transcript)
            self.session = Session(self._client, ours, theirs, secret)
            return b""
        version, purpose, nonce, name, incarnation, to = _fields(frame, 6)
        if version != _VERSION or purpose != self._purpose or len(nonce) != _NONCE_BYTES:
            raise AuthenticationError("the client speaks another protocol, or another version of this one")
        self._client = Peer(_text(name), _text(incarnation))
        self.has_proved = True
        fields = (secrets.token_bytes(_NONCE_BYTES), *_names(self._me))
        self._transcript = _encode_length(frame) + frame + _frame(*fields)
        if to not in (b"", self._me.incarnation.encode()):
            # The proof is sent all the same: from it the client learns that the process it means is gone.
            self.refusal = "the client means another process, which had this port before"
        return _frame(*fields, _proof(key, b"server", self._transcript))


def _proof(key: bytes, end: bytes, transcript: bytes) -> bytes:
    # With the end's name, so that a peer cannot send this end's own proof back as its own.
    return hmac.digest(key, b"handshake of the " + end + b":" + transcript, "sha256")


def _session_keys(key: bytes, transcript: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the keys of the client's messages, of the server's and of what else there is.

    HKDF with the transcript's hash as its salt.
    """
    pseudorandom = hmac.digest(hashlib.sha256(transcript).digest(), key, "sha256")
    # The last byte of each is the counter of HKDF's first block: 32 bytes need no second one.
    labels = (b"messages of the client\x01", b"messages of the server\x01", b"secret of both\x01")
    client, server, secret = (hmac.digest(pseudorandom, label, "sha256") for label in labels)
    return client, server, secret


def _tag(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256")[:_TAG_BYTES].hex().encode()


def _encode_length(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big")


def _frame(*fields: bytes) -> bytes:
    """Return the fields as a frame.

    Raises:
        AuthenticationError: the names are too long.
    """
    body = b"".join(_encode_length(field) + field for field in fields)
    if len(body) > _MAX_FRAME:
        raise AuthenticationError(f"a handshake of {len(body)} bytes exceeds the limit of {_MAX_FRAME}; shorten names")
    return _encode_length(body) + body


def _fields(frame: bytes, count: int) -> Sequence[bytes]:
    """Return the fields of a frame's body.

    Raises:
        AuthenticationError: these are not so many fields.
    """
    fields = []
    position = 0
    while position < len(frame):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(frame[position:start], "big")
        fields.append(frame[start:position])
    if len(fields) != count or position != len(frame):
        raise AuthenticationError("the handshake is malformed")
    return fields


def _names(peer: Peer) -> tuple[bytes, bytes]:
    return peer.name.encode("utf-8", "surrogatepass"), peer.incarnation.encode()


def _text(field: bytes) -> str:
    try:
        return field.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise AuthenticationError("a name in the handshake is not UTF-8") from error


def _take_frame(received: bytearray) -> bytes | None:
    """Remove the first frame from the received bytes and return its body; ``None`` while it is incomplete.

    Raises:
        AuthenticationError: the frame is too long.
    """
    if len(received) < _LENGTH_BYTES:
        return None
    end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "big")
    if end > _LENGTH_BYTES + _MAX_FRAME:
        raise AuthenticationError(f"a frame of the handshake exceeds the limit of {_MAX_FRAME} bytes")
    if len(received) < end:
        return None
    frame = bytes(received[_LENGTH_BYTES:end])
    del received[:end]
    return frame
