"""`raysim ...` in this process, with a disk that is full for certain files: `python full_disk.py
WHAT FROM ARGUMENTS`.

WHAT is `checkpoints` (from the FROM-th on none can be synced), `size` (likewise, but no file of
theirs can be longer than a page, by the system's own limit) or `spool` (from the FROM-th record
on).
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from typing import Any

from raysim import cli
from raysim.engine.state import checkpoint
from raysim.tracking import spool

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main() -> None:
    what, first = sys.argv[1], int(sys.argv[2])
    sys.argv = ["raysim", *sys.argv[3:]]
    count = [0]
    if what == "spool":
        put = spool.Spool._put

        def putting(self: Any, line: bytes) -> None:
            count[0] += 1
            if count[0] >= first:
                raise FULL
            put(self, line)

        spool.Spool._put = putting  # type: ignore[method-assign]
    else:
        sync, write = checkpoint.sync_to_disk, checkpoint.write_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)

        def writing(*arguments: Any) -> Any:
            count[0] += 1
            if what == "size" and count[0] >= first:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
            try:
                return write(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, usual)

        def syncing(path: Any) -> None:
            if what == "checkpoints" and count[0] >= first:
                raise FULL
            sync(path)

        checkpoint.sync_to_disk, checkpoint.write_checkpoint = syncing, writing
    cli.main()


if __name__ == "__main__":
    main()
