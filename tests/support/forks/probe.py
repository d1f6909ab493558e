"""A script with many probes of its process: the variable RANK selects one, which reports to standard output."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

# It takes seconds; a worker that is started plainly imports it only where it is needed.
if os.environ.get("RANK") in {"look", "draw", "processes"} and __name__ == "__main__":
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

TAG: str = "main"


class Numbers:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index * index


class Point:
    def __init__(self, x):
        self.x = x


def square(x):
    return x * x, multiprocessing.current_process().name.split("-")[0], __name__


def fill(index, tensor):
    tensor[index] = index + 1


def look():
    main = sys.modules["__main__"]
    streams = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        streams[name] = [
            repr(stream),
            stream is getattr(sys, f"__{name}__"),
            stream.encoding,
            stream.errors,
            stream.line_buffering,
            stream.write_through,
            stream.seekable(),
            stream.isatty(),
            stream.name,
            # A forked worker's drops what a full disk does not take.
            next(kind.__name__ for kind in type(stream.buffer).__mro__ if kind.__module__ == "_io"),
            stream.newlines,
        ]
    frames = inspect.stack()
    with os.popen("echo $RANK") as shell:
        said_by_shell = shell.read().strip()
    blas = float((np.ones((256, 256)) @ np.ones((256, 256))).sum())
    return {
        "main": {
            name: type(value).__name__ if name.startswith("__") and name != "__file__" else "set"
            for name, value in vars(main).items()
        },
        "file": main.__file__,
        "doc": main.__doc__,
        "spec": str(main.__spec__).split(" at ")[0],
        "loader": [main.__loader__.name, main.__loader__.path] if hasattr(main.__loader__, "path") else None,
        "package": main.__package__,
        "cached": main.__cached__,
        "annotations": str(main.__annotations__),
        "order": [name for name in vars(main) if name.startswith("__")],
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.base_prefix],
        "folder": str(Path.cwd()),
        "environ": dict(os.environ),
        "order of environ": list(os.environ),
        "streams": streams,
        "position": os.lseek(1, 0, os.SEEK_CUR) if sys.stdout.seekable() else None,
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgrp() == os.getpid(),
        "threads": [threading.active_count(), len(list(Path("/proc/self/task").iterdir()))],
        "main thread": [
            threading.main_thread().name,
            threading.main_thread() is threading.current_thread(),
            threading.main_thread().ident == threading.get_ident(),
            threading.main_thread().native_id == os.getpid(),
        ],
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process() is None],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
        "signals": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if _named(number)},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "pending": sorted(signal.sigpending()),
        "wakeup": signal.set_wakeup_fd(-1),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "descriptors": _descriptors(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "faulthandler": faulthandler.is_enabled(),
        "logging": [str(logging.root.handlers), logging.root.level, logging.getLogger("x").isEnabledFor(20)],
        "filters": [str(entry) for entry in warnings.filters],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "umask": os.umask(os.umask(0)),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "nice": os.nice(0),
        "processors": sorted(os.sched_getaffinity(0)),
        "comm": Path("/proc/self/comm").read_text(),
        "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), sys.flags.utf8_mode],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            sys.gettrace(),
            sys.getprofile(),
        ],
        "meta path": [str(finder).split(" at ")[0] for finder in sys.meta_path],
        "torch": [torch.get_num_threads(), torch.is_grad_enabled()],
        "source": inspect.getsource(square),
        "innermost": frames[0].filename,
        "outermost": frames[-1].filename,
        "pickled": pickle.dumps(Point(3)).hex(),
        "blas": blas,
        "same environ": os.getenv("RANK") == said_by_shell,
    }


def _named(number):
    return isinstance(number, signal.Signals)


def _descriptors():
    """Return the open descriptors and their targets without the listed folder; files are named by kind only."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        number = int(descriptor.name)
        found[number] = "file" if number in {1, 2} and target.startswith("/") else target.split(":", maxsplit=1)[0]
    return {name: target for name, target in sorted(found.items()) if not target.startswith("/proc/")}


def fail():
    raise KeyError("the user's own")


def interrupt():
    signal.raise_signal(signal.SIGINT)
    time.sleep(5)


def chain():
    try:
        fail()
    except KeyError as error:
        raise RuntimeError("because of it") from error


def custom_hook():
    def hook(kind, error, tb):
        print("hook", kind.__name__, len(traceback.extract_tb(tb)), sys.last_type is kind, __file__ == sys.argv[0])
        print(*traceback.format_exception(kind, error, tb), sep="")

    sys.excepthook = hook
    fail()


def broken_hook():
    sys.excepthook = lambda *details: sys.exit(9)
    fail()


def failing_hook():
    def hook(*details):
        raise ValueError("in the hook")

    sys.excepthook = hook
    fail()


def exits():
    atexit.register(lambda: print("first", "__file__" in globals(), sys.stdout.closed))
    atexit.register(lambda: print("second", getattr(sys, "last_type", None)))
    threading.Timer(0.1, lambda: print("a thread at the end", "__file__" in globals())).start()


def exits_badly():
    atexit.register(lambda: print("first", "__file__" in globals(), str(getattr(sys, "last_type", None))))
    fail()


def thread_fails():
    thread = threading.Thread(target=fail, name="worker")
    thread.start()
    thread.join()


def warn():
    warnings.warn("once upon a time", stacklevel=1)
    warnings.warn("once upon a time", stacklevel=1)
    warnings.warn("two levels up", UserWarning, stacklevel=2)
    print("é", "\N{SNOWMAN}")
    os.write(1, b"raw\n")
    print("to error", file=sys.stderr)
    print(end="no newline")


def processes():
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(square, range(3))
    tensor = torch.zeros(1).share_memory_()
    torch.multiprocessing.start_processes(fill, (tensor,), nprocs=1, start_method="fork")  # a spawned one takes seconds
    found["filled"] = tensor.tolist()
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        found[f"loader {method}"] = [batch.tolist() for batch in loader]
    return found


def fork_and_exit():
    child = os.fork()
    if child == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def draw():
    numbers = [random.random(), float(np.random.rand()), torch.rand(1).item(), torch.initial_seed()]  # noqa: NPY002
    print(json.dumps([*numbers, multiprocessing.current_process().authkey.hex()]))


def recurse(depth=0):
    try:
        return recurse(depth + 1)
    except RecursionError:
        return depth


def wait():
    if "SAVE" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(17))
    print("waiting", flush=True)
    time.sleep(600)


PROBES = {
    "look": lambda: print(json.dumps(look())),
    "processes": lambda: print(json.dumps(processes())),
    "exit with a number": lambda: sys.exit(3),
    "exit with a text": lambda: sys.exit("text for the user"),
    "exit with nothing": lambda: sys.exit(None),
    "exit at once": lambda: os._exit(7),
    "an error": fail,
    "an error because of another": chain,
    "an interrupt": interrupt,
    "a signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "a hook": custom_hook,
    "a hook that exits": broken_hook,
    "a hook that fails": failing_hook,
    "the end": exits,
    "the end after an error": exits_badly,
    "an error in a thread": thread_fails,
    "output": warn,
    "a fork": fork_and_exit,
    "draw": draw,
    "recurse": lambda: print(recurse()),
    "wait": wait,
}

if __name__ == "__main__":
    PROBES[os.environ["RANK"]]()
