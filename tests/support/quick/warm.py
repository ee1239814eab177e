"""Interpreters that have imported torch already: forks of one server for each test process.

``python warm.py NUMBER train.py ...`` does what ``python train.py ...`` does, without the seconds that the imports of
torch and of the recorder take: it hands its arguments, folder, environment and three streams to the server and ends as
the fork ends.
Limits, signals and the process's parent are not handed over: how a run attaches, stops and dies is tested with true
processes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import weakref


def address(number):
    """Of Linux, without a file."""
    return f"\0precdoctor-warm-{number}"


def ask(number, arguments):
    """The exit status of a fork that runs ``arguments``; does not return where a signal ended it."""
    here = {"argv": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}  # noqa: PTH109 - pathlib takes longer
    request = json.dumps(here).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address(number))
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        for descriptor in (0, 1, 2):
            os.close(descriptor)  # who reads them waits for the fork alone
        status = os.waitstatus_to_exitcode(int(server.recv(8)))
    if status < 0:
        with contextlib.suppress(OSError):  # no handler is kept of those that have none
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(listening):
    """Answer :func:`ask`; returns in each fork, with its request. Ends with the process that started it."""
    waiting, forks = selectors.DefaultSelector(), {}
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    while True:
        key, _ = waiting.select()[0]  # one at a time: what is done about it may end what else there is
        if key.fileobj == 0:
            os._exit(0)
        elif key.fileobj is listening:
            asker, _ = listening.accept()
            request, streams = received(asker)
            child = os.fork()
            if child == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for open_here in {listening, waiting, asker, *(fork[0] for fork in forks.values())}:
                    open_here.close()
                for open_here in {*streams, *(fork[2] for fork in forks.values())}:
                    os.close(open_here)
                return request
            for stream in streams:
                os.close(stream)
            ended = os.pidfd_open(child)
            forks[ended] = forks[asker.fileno()] = (asker, child, ended)
            waiting.register(ended, selectors.EVENT_READ)
            waiting.register(asker.fileno(), selectors.EVENT_READ)
        else:
            asker, child, ended = forks[key.fd]
            if key.fd != ended:  # killed for its patience
                os.kill(child, signal.SIGKILL)
                waiting.unregister(asker.fileno())
                continue
            _, status = os.waitpid(child, 0)
            waiting.unregister(ended)
            with contextlib.suppress(KeyError):  # as above
                waiting.unregister(asker.fileno())
            with contextlib.suppress(OSError):  # it is gone
                asker.sendall(str(status).encode())
            del forks[ended], forks[asker.fileno()]
            asker.close()
            os.close(ended)


def received(asker):
    """One request, and the three streams it came with."""
    size, streams, _, _ = socket.recv_fds(asker, 4, 3)
    parts, left = [], int.from_bytes(size, "big")
    while left:
        parts.append(asker.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), streams


def become(argv, cwd, env):
    """What an interpreter of this environment does with these arguments."""
    for left in list(weakref.finalize._registry):
        left.detach()  # temporary folders of the server's: torch 2.6 makes one as it is imported
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    from pathlib import Path

    sys.path[:1] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if "PRECDOCTOR_RUN" in env:
        sys.path.append(str(Path(__file__).parents[3]))  # where it is not installed
        from precdoctor import _boot

        sys.path.pop()
        if native := sys.modules.get("precdoctor.recording.kernels.native_cpu"):
            native._forked = False  # the server's threads have never run
        _boot.start()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, cwd)
        runpy._run_module_as_main(argv[1])
        return
    sys.argv = argv
    script = Path(argv[0])
    sys.path.insert(0, str(script.resolve().parent))
    main.__file__ = str(script.absolute())
    exec(compile(script.read_bytes(), main.__file__, "exec"), vars(main))


def end(status):
    """As an interpreter does, but that its two thousand modules are not taken apart, for a fifth of a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    # Most of what a recorded fork and the recorder's command would do. Nothing of it runs before the fork, and no
    # environment is read.
    sys.path[0] = os.path.abspath(f"{__file__}/../../../..")  # noqa: PTH100 - the tree's own, installed or not
    recorder = ("cli.app", "recording.installation", "recording.output.drain", "recording.process.launch")
    for module in ("torch._dynamo", "typer.main", "pyarrow.parquet", *(f"precdoctor.{m}" for m in recorder)):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # newer releases load it, and pydantic with it, with their first command
        importlib.import_module("typer._adapters")

    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[2])))
    try:
        become(**request)
    except SystemExit as asked:
        if isinstance(asked.code, (int, type(None))):
            end(asked.code or 0)
        print(asked.code, file=sys.stderr)
        end(1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)
