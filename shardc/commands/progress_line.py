"""A line on the terminal that says what a command is at, and for how long."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def showing_progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line that counts the seconds; gives what sets its text."""
    done = threading.Event()
    bar = tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None)

    def tick() -> None:
        while not done.wait(0.5):
            bar.refresh()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield lambda stage: bar.set_description_str(f"{title}: {stage}")
    finally:
        done.set()
        ticker.join()
        bar.close()
