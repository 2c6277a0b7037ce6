import os
import time
from dataclasses import dataclass

from raysim.algorithms.gradma import GradMAClient


@dataclass(frozen=True)
class Sleepy(GradMAClient):
    seconds: float = 0.0
    alarm: str = "/nowhere"
    book: str = "/dev/null"

    def init(self, shared, client_state, data, task):
        with open(self.book, "a") as book:
            book.write(f"{int(task.t)}\n")
        time.sleep(self.seconds)
        while task.t > 0 and os.path.exists(self.alarm) and os.path.getsize(self.book) > 120:
            time.sleep(0.05)
        return super().init(shared, client_state, data, task)
