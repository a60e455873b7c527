"""Work of several threads that begins at once, for what must be safe to share."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_together(work: Callable[[int], None], num_threads: int = 4) -> None:
    """Run `work` of 0, 1, ... each on a thread; fails where one has not ended in a minute."""
    start = threading.Barrier(num_threads)

    def run(number: int) -> None:
        start.wait(10)
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
