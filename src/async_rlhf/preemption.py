"""Asked to stop, a run ends at its next update with a checkpoint. SIGTERM or SIGUSR1 to any of its processes asks, and so does `train.sh`
by a file, when Slurm tells it of preemption or of the time limit."""

import os
import signal
import threading
from pathlib import Path

from async_rlhf import distributed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 85  # "stopped, to be continued"
STOP_VARIABLE = "ASYNC_RLHF_STOP"  # the file
MARKER_VARIABLE = "ASYNC_RLHF_PREEMPTED"  # a file that train.sh looks at: launchers make a code of their own of a process's


class StopSignals:
    """While it is open the signals are noted, no more: `asked` tells at the end of an update. A second one ends the process at once.

    Only the main thread can take signals; anywhere else nothing is ever noted.
    """

    def __enter__(self) -> "StopSignals":
        self._noted, self._before = False, {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        self._noted = True
        self.__exit__()

    def asked(self) -> bool:
        """Whether any rank was asked to stop. All ranks call it together: where one is dead this fails, and no checkpoint is begun."""
        stop = os.environ.get(STOP_VARIABLE)
        return any(distributed.all_gather(self._noted or bool(stop and Path(stop).exists())))


def leave(output: Path, updates: int) -> None:
    """End the process with `EXIT_CODE`, and leave word for `train.sh`."""
    if distributed.is_main_by_environment():
        print(f"asked to stop after update {updates}: --resume_from_checkpoint latest goes on from {output}/checkpoint-{updates}")
        if marker := os.environ.get(MARKER_VARIABLE):
            Path(marker).write_text(f"{output}\n", encoding="utf-8")
    raise SystemExit(EXIT_CODE)
