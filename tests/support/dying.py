"""`raysim ...` in a process that kills itself: `python dying.py MOMENT ARGUMENTS`.

It kills its process group with SIGKILL while it writes its second checkpoint. MOMENT says when:
between the `files`, before the `rename`, once it is `renamed`, or while it may `remove` an older
one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from raysim import cli
from raysim.engine.state import checkpoint


def die() -> None:
    os.killpg(0, signal.SIGKILL)


def prepare_to_die(moment: str) -> None:
    save, rename, rmtree, count = checkpoint.save_file, Path.rename, checkpoint.shutil.rmtree, [0]

    def saves(*arguments: Any) -> None:
        count[0] += 1
        if moment == "files" and count[0] == 5:
            die()
        save(*arguments)

    def renames(path: Path, target: Path) -> Path:
        ours = path.name.startswith(".round-") and count[0] >= 6
        if moment == "rename" and ours:
            die()
        done = rename(path, target)
        if moment == "renamed" and ours:
            die()
        return done

    def removes(path: Path, *arguments: Any, **options: Any) -> None:
        if (
            moment == "remove"
            and count[0] >= 6
            and path.name.startswith("round-")
            and path.exists()
        ):
            next(path.glob("server*")).unlink()
            die()
        rmtree(path, *arguments, **options)

    checkpoint.save_file, Path.rename, checkpoint.shutil.rmtree = saves, renames, removes  # type: ignore[assignment]


if __name__ == "__main__":
    prepare_to_die(sys.argv.pop(1))
    cli.main()
