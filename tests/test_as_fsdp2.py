"""shardc under FSDP2's names: which names change, and that they change back."""

import os
import subprocess
import sys
import types

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed.checkpoint import state_dict as states

import shardc
from shardc.integrations.as_fsdp2 import VARIABLE

NAMES = {
    fsdp: ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
    states: (
        "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict",
        "set_model_state_dict", "set_optimizer_state_dict", "set_state_dict",
    ),
}  # fmt: skip


def _bound():
    return {name: getattr(home, name) for home, names in NAMES.items() for name in names}


def test_all_names_change_and_change_back():
    theirs = _bound()
    with shardc.as_fsdp2():
        assert all(hasattr(function, VARIABLE) for function in _bound().values())
        assert fsdp.fully_shard.state is theirs["fully_shard"].state
    assert _bound() == theirs


def test_a_module_that_was_loaded_before_has_the_names_too(monkeypatch):
    client = types.ModuleType("client_of_fsdp2")
    client.shard = theirs = fsdp.fully_shard
    monkeypatch.setitem(sys.modules, client.__name__, client)
    undo = shardc.as_fsdp2()
    assert client.shard is fsdp.fully_shard is not theirs
    undo.close()
    assert client.shard is theirs


def test_a_name_that_was_bound_anew_inside_stays(monkeypatch):
    client = types.ModuleType("client_of_fsdp2")
    client.shard = fsdp.fully_shard
    monkeypatch.setitem(sys.modules, client.__name__, client)
    with shardc.as_fsdp2():
        client.shard = own = lambda module: module
    assert client.shard is own


def test_a_second_call_changes_nothing():
    with shardc.as_fsdp2():
        once = _bound()
        with shardc.as_fsdp2():
            assert _bound() == once
        assert _bound() == once


def _with_variable(value, code):
    env = os.environ | {VARIABLE: value}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("first", ["import torch", "from shardc import fully_shard"])
def test_the_variable_changes_the_names_in_a_new_process(first):
    """Also where a module of shardc, half loaded, is the first to import torch."""
    then = f"from torch.distributed.fsdp import fully_shard as f; print(hasattr(f, {VARIABLE!r}))"
    code = f"{first}; {then}"
    assert [_with_variable(value, code).stdout.strip() for value in "10"] == ["True", "False"]


def test_another_value_of_the_variable_is_refused():
    done = _with_variable("yes", "import torch")
    assert done.returncode and "SHARDC_AS_FSDP2 is 'yes': set it to 1, or to 0" in done.stderr
