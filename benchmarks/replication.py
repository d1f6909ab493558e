"""Time in which a snapshot shard reaches another process: over TLS between agents, beside torch's gloo in clear.

``python benchmarks/replication.py [MiB]`` starts two processes on this machine, sends shards from one to the other in
both ways in turn, and prints the medians and their ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xxhash

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.ipc import KEY_BYTES, Authenticator, Connection, MessageServer, Peer, listen
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ipc.worker_messages import Accepted, ReplicateShard
from azureml_elastic.node.agent.shard_transfer import ShardReceiver, ShardSender
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.round import Member

TIMES = 7
PIECE_BYTES = 1 << 26
HOST = "127.0.0.1"


def authenticator(name: str) -> Authenticator:
    """Return a process's part in the handshake, with the key of no run."""
    return Authenticator(Peer(name, name), "hub", bytes(KEY_BYTES))


def send_over_tls(sender: ShardSender, shard: ShardDescription) -> None:
    """Send a shard and wait until the other process holds it."""
    arrived, replies = threading.Event(), []
    sender.submit(ReplicateShard(shard.folder, shard.file, 0), lambda reply: replies.append(reply) or arrived.set())
    arrived.wait()
    assert replies == [Accepted()], replies


def exchange_by_gloo(rank: int, content: torch.Tensor) -> None:
    """Send the content from rank 1 to rank 0, which checks it, and wait for its answer."""
    for begin in range(0, len(content), PIECE_BYTES):
        piece = content[begin : begin + PIECE_BYTES]
        transfer = dist.isend(piece, dst=0) if rank == 1 else dist.irecv(piece, src=1)
        assert transfer is not None
        transfer.wait()
    if rank == 0:
        xxhash.xxh3_128_hexdigest(memoryview(content.numpy()))
    dist.barrier()


def serve(port: mp.SimpleQueue, size: int) -> None:
    """Receive as rank 0."""
    receiver = ShardReceiver(AgentMemory())

    def on_message(connection: Connection, fields: dict) -> None:
        message = messages.CODEC.decode(fields)
        assert isinstance(message, messages.ShardOffer)
        receiver.receive(connection, message.shard)

    server = MessageServer(listen((HOST, 0)), on_message, authenticator=authenticator("receiver"))
    port.put(server.address[1])
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    dist.init_process_group("gloo", rank=0, world_size=2)
    for turn in range(TIMES + 1):
        exchange_by_gloo(0, buffers[turn % 2])
        dist.barrier()
    server.close()
    receiver.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 512) << 20
    os.environ.setdefault("MASTER_ADDR", HOST)
    with listen((HOST, 0)) as free:
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    context = mp.get_context("spawn")
    port = context.SimpleQueue()
    process = context.Process(target=serve, args=(port, size))
    process.start()
    member = Member("receiver", "receiver", host=HOST, hub_port=port.get())
    dist.init_process_group("gloo", rank=1, world_size=2)
    memory = AgentMemory()
    sender = ShardSender(memory, authenticator("sender"))
    sender.begin((member,))
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    descriptor = os.memfd_create("shard")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(memoryview(content.numpy()))
    checksum = xxhash.xxh3_128_hexdigest(memoryview(content.numpy()))
    shard = ShardDescription("step-1", "rank-00000.safetensors", 1, 1, 0, size, 0, checksum)
    memory.hold(descriptor, shard)
    taken: dict[str, list[float]] = {"gloo, in clear": [], "agents, TLS 1.3": []}
    for turn in range(TIMES + 1):
        for name, way in zip(
            taken, (lambda: exchange_by_gloo(1, content), lambda: send_over_tls(sender, shard)), strict=True
        ):
            began = time.perf_counter()
            way()
            if turn:  # the first time makes the connections and the certificate
                taken[name].append(time.perf_counter() - began)
        dist.barrier()
    sender.close()
    dist.destroy_process_group()
    process.join()
    for name, seconds in taken.items():
        print(f"{name}: {size / 2**30 / statistics.median(seconds):.2f} GiB/s (median of {TIMES}, {size >> 20} MiB)")
    clear, encrypted = (statistics.median(seconds) for seconds in taken.values())
    print(f"ratio: {encrypted / clear:.2f}")


if __name__ == "__main__":
    main()
