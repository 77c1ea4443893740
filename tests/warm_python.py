"""Python programs in processes of their own that need not import torch: one has, and forks each."""

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import types
from pathlib import Path

_servers: dict[str, subprocess.Popen[str]] = {}  # by what is loaded before all else
seconds = 0.0  # of processor time; the processes are children of a child


def run(
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: object = None,
    timeout: float = 600,  # so many seconds that a busy machine is no failure
    preload: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python <arguments>` would: "-c" and code, or a file, then its arguments.

    It begins with torch imported, no library of ours loaded and one thread, and ends as a program
    does. What is about imports, options of Python or signals needs a Python of its own.
    `preload` is a library whose functions take the place of all others, as malloc.
    """
    server = _servers.get(preload)
    if server is None or server.poll() is not None:
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        how["env"] = os.environ | ({"LD_PRELOAD": preload} if preload else {})
        server = _servers[preload] = subprocess.Popen([sys.executable, __file__], **how)
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/out", f"{folder}/err"]
        job = {
            "command": command,
            "outputs": outputs,
            "env": dict(os.environ if env is None else env),
            "cwd": os.path.abspath(cwd or os.getcwd()),
        }
        server.stdin.write(json.dumps(job) + "\n")
        child = int(server.stdout.readline())
        late = not select.select([server.stdout], [], [], timeout)[0]
        if late:
            os.kill(child, 9)
        code, took = json.loads(server.stdout.readline())
        global seconds
        seconds += took
        done = subprocess.CompletedProcess(command, code, *(Path(o).read_text() for o in outputs))
    if late:
        raise subprocess.TimeoutExpired(command, timeout, done.stdout, done.stderr)
    return done


def _next_job() -> dict:
    """Fork for each job that is asked for, and return it, in its process."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(child, flush=True)
        _, status, usage = os.wait4(child, 0)
        took = usage.ru_utime + usage.ru_stime
        print(json.dumps([os.waitstatus_to_exitcode(status), took]), flush=True)
    os._exit(0)


def _begin(job: dict) -> types.CodeType:
    """Make this process one that was started for the job; return its program."""
    for to, path in enumerate(("/dev/null", *job["outputs"])):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT if to else os.O_RDONLY, 0o600)
        os.dup2(descriptor, to)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    first, *rest = job["command"]
    if first == "-c":
        text, name, sys.path[0] = rest.pop(0), "<string>", ""
    else:
        text, name, sys.path[0] = Path(first).read_text(), first, str(Path(first).parent)
    ours = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in ours if path not in sys.path]  # the server's may be others
    sys.path.append(str(Path(__file__).parent))  # for what imports this file
    sys.argv = [first, *rest]
    program = types.ModuleType("__main__")
    program.__file__ = name
    sys.modules["__main__"] = program
    return compile(text, name, "exec")


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()  # or the end of each process would go through all of it, and copy it
    program = _begin(_next_job())
    exec(program, sys.modules["__main__"].__dict__)
