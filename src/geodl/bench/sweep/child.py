"""``python -m geodl.bench.sweep.child run ...``: a geodl command that the kernel kills when its parent process dies.

An orphaned run would keep its directory locked against the run started in its place. The signal is set here and not between
fork and exec (``preexec_fn``), where a process with threads, such as Ray's, may hang.
"""

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ray's workers may block or ignore the signals that stop a run, and child processes inherit that.
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("geodl", run_name="__main__", alter_sys=True)
