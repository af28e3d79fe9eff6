"""Processes that talk to each other, for tests of what runs on many."""

import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

PATIENCE = 300.0  # seconds; only a process that hangs takes them


def start(f, size, directory, *arguments, answers=None):
    """What f(group, *arguments) returns on every rank, by rank; the first ``answers`` that come.

    The test fails if it raises on one of them, and is skipped where processes cannot reach each other.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.fsdp", "sparsetopk.torch", "pytest"]
    )
    queue, store = context.Queue(), f"file://{directory}/store"
    workers = [
        context.Process(target=_work, args=(rank, size, store, queue, f, arguments), daemon=True)
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    found = {}
    try:
        for _ in range(answers or size):
            rank, kind, found[rank] = queue.get(timeout=PATIENCE)
            if kind == "apart":
                pytest.skip(f"processes cannot talk to each other here: {found[rank]}")
            assert kind == "result", f"on rank {rank}:\n{found[rank]}"
    finally:
        for worker in workers:
            worker.kill()
    return found


def _work(rank, size, store, queue, f, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the machine need not be known
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=120)}
    try:
        dist.init_process_group("gloo", init_method=store, **options)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        queue.put((rank, "apart", str(error)))
        return
    try:
        queue.put((rank, "result", f(dist.group.WORLD, *arguments)))
    except BaseException:
        queue.put((rank, "error", traceback.format_exc()))
    # Not before all have what they wait for: the first to leave would be lost to the others.
    queue.close()
    queue.join_thread()
    dist.barrier()
