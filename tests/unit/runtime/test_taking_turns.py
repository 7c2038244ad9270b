"""Sessions in several threads: they take turns, and leave nothing of their settings behind."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.families import draw, session
from vivace.machinery.technique import Effect

pytestmark = pytest.mark.usefixtures("small_images")


def together(*work: Callable[[], Any]) -> list[Any]:
    """Run functions in threads that start at once, and return what they return."""
    start, results = threading.Barrier(len(work)), [None] * len(work)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001  raised again where the threads were started
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("recipe", ["baseline", "deepcache(2)+cfg_cutoff(0.5)"])
@pytest.mark.quick("deepcache*")
def test_four_threads_on_one_session_draw_what_one_does(recipe: str) -> None:
    made = session("sd", recipe)
    alone = [draw(made, seed=seed) for seed in range(4)]
    drawn = together(*(lambda seed=seed: draw(made, seed=seed) for seed in range(4)))
    assert [np.array_equal(a, b) for a, b in zip(alone, drawn, strict=True)] == [True] * 4


class _Setting:
    """A setting of the process, and a session that changes it around its calls."""

    value = "own"

    def session_of(self, name: str) -> Any:
        made = session("sd")

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            before, self.value = self.value, name
            try:
                yield
            finally:
                self.value = before

        made._applied.append((name, Effect(around=around)))
        return made


def test_a_session_in_another_thread_waits() -> None:
    setting, events = _Setting(), []
    first, second = (setting.session_of(name) for name in ("first", "second"))
    entered = threading.Event()

    def later() -> None:
        entered.wait()
        with second.surroundings():
            events.append(setting.value)

    def sooner() -> None:
        with first.surroundings():
            entered.set()
            threading.Event().wait(0.1)
            events.append(setting.value)

    together(later, sooner)
    assert events == ["first", "second"]
    assert setting.value == "own"


def test_a_callback_may_call_another_session() -> None:
    outer, inner = session("sd"), session("sd")
    alone, drawn = draw(inner), []

    def look(*_: Any) -> dict[str, Any]:
        drawn.append(draw(inner))
        return {}

    draw(outer, callback_on_step_end=look)
    assert len(drawn) == 3
    assert np.array_equal(drawn[0], alone)


def test_a_call_that_fails_ends_its_turn() -> None:
    made = session("sd")
    with pytest.raises(ValueError, match="divisible by 8"):
        draw(made, height=63)
    assert together(lambda: draw(made).shape) == [(1, 64, 64, 3)]
