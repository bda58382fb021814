"""Operations around a step: each row of `operations` is equal to plain torch, or refused."""

import pytest
from operations import PAGE, SERIES, page, try_series
from ranks import on_ranks

CASES = [
    *((way, name) for way in ("uncompiled", "blocks", "eager") for name in SERIES),
    *(("inductor", name) for name in ("Copies", "Other values", "In the forward")),
    ("inductor", "Hooks, flags, optimizers"),
]


@pytest.mark.parametrize(("way", "name"), CASES, ids=lambda text: text)
@on_ranks(2)
def test_operations(mesh, way, name):
    try_series(mesh, way, name)


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "run: PYTHONPATH=tests python -m operations --write"
