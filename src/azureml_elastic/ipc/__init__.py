r"""Messages between processes: JSON objects, one a line, over stream sockets.

A message is a JSON object in one line of at most :data:`MAX_LINE` bytes, ended by ``\n``. The connection of
a peer that sends anything else is closed. A request carries an ``"id"``, its reply the same number as ``"re"``.

:class:`MessageServer` serves any number of connections and :class:`MessageClient` one, each from a single daemon
thread that never blocks on a peer: what a peer does not take at once waits in a bounded buffer, and a peer
that lets the buffer fill is cut off. All callbacks run on that thread. An exception in a callback ends its
connection, never the thread.

Where both ends have an :class:`Authenticator`, a connection begins with a handshake, and each line begins with a tag
that authenticates it; see :mod:`~azureml_elastic.ipc.authentication`.
"""

from azureml_elastic.ipc.authentication import KEY_BYTES, Authenticator, Peer
from azureml_elastic.ipc.connection import MAX_LINE, Connection, LineReader, encode
from azureml_elastic.ipc.endpoints import Address, MessageClient, MessageServer, listen

__all__ = [
    "KEY_BYTES",
    "MAX_LINE",
    "Address",
    "Authenticator",
    "Connection",
    "LineReader",
    "MessageClient",
    "MessageServer",
    "Peer",
    "encode",
    "listen",
]
