"""Who computes next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from meshnet.errors import MeshError
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet_node.scheduler import Scheduler

BOUND_S = 10.0


class Queue:
    """Threads that queue up at a scheduler while something computes; `order` is theirs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.order: list[str] = []
        self.end = threading.Event()
        self._threads: list[threading.Thread] = []
        self.start("first", hold=True)

    def start(self, name: str, *, urgent: bool = False, hold: bool = False) -> None:
        """Start a thread, and wait until it computes or waits."""
        before = self._waiting()
        begun = threading.Event()

        def work() -> None:
            begun.set()
            self.order.append(name)
            if hold:
                assert self.end.wait(BOUND_S)

        thread = threading.Thread(
            target=lambda: self.scheduler.run(work, Caller(), urgent=urgent), daemon=True
        )
        self._threads.append(thread)
        thread.start()
        if hold:
            assert begun.wait(BOUND_S)
        else:
            self._until(lambda: self._waiting() > before)

    def finish(self) -> list[str]:
        """Let all of them compute; gives the order in which they did."""
        self.end.set()
        for thread in self._threads:
            thread.join(BOUND_S)
            assert not thread.is_alive()
        return self.order

    def _waiting(self) -> int:
        return len(self.scheduler._decodes) + len(self.scheduler._prefills)

    def _until(self, true: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(2000):
            if true():
                return
            pause.wait(BOUND_S / 2000)
        raise AssertionError("did not come about in time")


@pytest.fixture(params=[False, True], ids=["in-place", "one-thread"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    made = Scheduler(one_thread=request.param)
    yield made
    made.close()


def test_decode_steps_pass_ahead_of_prefill_chunks_that_wait(scheduler: Scheduler) -> None:
    queue = Queue(scheduler)
    queue.start("prefill 1")
    queue.start("prefill 2")
    queue.start("decode 1", urgent=True)
    queue.start("decode 2", urgent=True)
    assert queue.finish() == ["first", "decode 1", "decode 2", "prefill 1", "prefill 2"]


def test_a_prefill_chunk_is_not_passed_for_ever(scheduler: Scheduler) -> None:
    queue = Queue(scheduler)
    queue.start("prefill")
    for index in range(12):
        queue.start(str(index), urgent=True)
    assert queue.finish().index("prefill") == 9  # after the first and eight decode steps


def test_one_at_a_time_and_what_is_raised_is_raised_here(scheduler: Scheduler) -> None:
    running = 0
    most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.002)
        running -= 1

    threads = [
        threading.Thread(target=lambda: scheduler.run(work, Caller(), urgent=False))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert most == 1
    with pytest.raises(ZeroDivisionError):
        scheduler.run(lambda: 1 / 0, Caller(), urgent=False)
    assert scheduler.run(lambda: 7, Caller(), urgent=False) == 7


def test_one_thread_computes_where_that_is_asked() -> None:
    scheduler = Scheduler(one_thread=True)
    seen = {scheduler.run(threading.get_ident, Caller(), urgent=False) for _ in range(3)}
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    scheduler.close()
    in_place = Scheduler()
    assert in_place.run(threading.get_ident, Caller(), urgent=False) == threading.get_ident()


def test_whoever_leaves_waits_no_longer_and_the_others_go_on() -> None:
    scheduler, caller = Scheduler(), Caller()
    queue = Queue(scheduler)
    gone = threading.Event()

    def leave() -> None:
        with pytest.raises(CallerGoneError):
            scheduler.run(lambda: queue.order.append("left"), caller, urgent=True)
        gone.set()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    queue._until(lambda: len(scheduler._decodes) == 1)
    queue.start("other")
    caller.leave()
    assert gone.wait(BOUND_S)
    assert queue.finish() == ["first", "other"]


def test_waiting_is_bounded_in_number_and_time() -> None:
    scheduler = Scheduler(max_waiting=1, max_wait_s=0.05)
    queue = Queue(scheduler)
    with pytest.raises(MeshError, match=r"no turn to compute within 0\.05 s") as late:
        scheduler.run(lambda: None, Caller(), urgent=False)
    assert late.value.retry_after_s
    queue.finish()

    scheduler = Scheduler(max_waiting=1)
    queue = Queue(scheduler)
    queue.start("second")
    with pytest.raises(MeshError, match="1 chunks wait") as full:
        scheduler.run(lambda: None, Caller(), urgent=True)
    assert full.value.code.http_status == 503
    assert queue.finish() == ["first", "second"]
