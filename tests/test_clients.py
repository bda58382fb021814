"""Codebases written for FSDP2 train by shardc, unchanged (`tests/clients`)."""

import pytest
from clients import CLIENTS, faults, run

INSTALLED = [name for name, client in CLIENTS.items() if client.is_there]


@pytest.mark.parametrize("name", INSTALLED)
def test_trains_resumes_and_exports_as_by_fsdp2(name):
    client = CLIENTS[name]
    wanted = run(client, by_shardc=False)
    ways = [[], ["compiled"]] if client.compiles else [[]]
    found = {tuple(way): faults(client, run(client, *way, by_shardc=True), wanted) for way in ways}
    assert not any(text for way in found.values() for text in way.values()), found
