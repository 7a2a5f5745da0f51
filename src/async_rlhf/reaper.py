"""What must not outlive this process: processes that bear a mark in their environment, and a folder. A shell sees to it.

The shell, in a session of its own, waits on a pipe whose other end this process alone holds. When the pipe closes, because its owner is
done or because the process is gone, by SIGKILL too, the shell kills every process with the mark, a stopped one too, and deletes the folder.
A mark finds what a list of process ids would miss: an engine that is just starting, and what it starts in its turn.
"""

import atexit
import os
import subprocess
from pathlib import Path

MARK = "ASYNC_RLHF_ENGINE"  # an environment variable
PATIENCE_SECONDS = 15.0

SCRIPT = """
trap '' HUP INT TERM USR1
read -r _
tries=0
while [ -n "$1" ] && [ $tries -lt 50 ]; do
    pids=
    for file in $(grep -lsF "$1" /proc/[0-9]*/environ); do
        file=${file%/environ}
        pids="$pids ${file#/proc/}"
    done
    [ -n "$pids" ] || break
    kill -9 $pids 2>/dev/null
    tries=$((tries + 1))
    sleep 0.1
done
[ -z "$2" ] || rm -rf "$2"
"""


class Reaper:
    """Ends the processes with `MARK=mark` in their environment, and deletes `folder`, at `close` or when this process ends."""

    def __init__(self, mark: str = "", folder: str | Path = ""):
        self._command = ["/bin/sh", "-c", SCRIPT, "reaper", mark and f"{MARK}={mark}"]
        self._folder, self._owner = str(folder), os.getpid()
        self._environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._shell = subprocess.Popen(
            [*self._command, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment,
        )
        atexit.register(self.close)  # before multiprocessing's own, which would wait for a child that hangs

    def kill(self) -> None:
        """End the processes now, and go on watching."""
        self._act("")

    def close(self) -> None:
        """End the processes, delete the folder, and watch no more."""
        atexit.unregister(self.close)
        if self._shell.stdin.closed or os.getpid() != self._owner:  # a forked child's exit ends nothing
            return
        try:
            self._shell.communicate(b"\n", timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()
        if self._shell.returncode:  # something ended the shell before its work was done
            self._act(self._folder)

    def _act(self, folder: str) -> None:
        subprocess.run(
            [*self._command, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            timeout=PATIENCE_SECONDS,
        )


def marked(mark: str, variable: str = MARK) -> list[int]:
    """The ids of the processes of this user with `variable=mark` in their environment."""
    wanted, found = f"{variable}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # another user's, or gone
            continue
    return found
