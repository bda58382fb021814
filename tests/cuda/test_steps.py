"""A training step on CUDA without a GPU, in every way to run it.

Each case runs three steps. In the last, no two launches may race, the host may wait for nothing,
and what compiled code starts and waits for must be what was planned.
"""

from pathlib import Path
from typing import Any

import pytest
from rehearsal import Setup, rehearse
from step_trace import read_trace

WAYS = ("compiled", "blocks", "uncompiled")


def with_features(*features: str, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a `Setup` with those features."""
    return {"features": frozenset(features), **kwargs}


APART = {"coalesce": False}
"""A plan counts what travels together once, NCCL's stand-in notes each part."""

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate": with_features("accumulate"),
    "checkpoint": with_features("checkpoint"),
    "checkpoint, accumulate": with_features("checkpoint", "accumulate"),
    "flex": with_features("flex"),
    "cudnn": with_features("cudnn"),
    "cudnn, checkpoint": with_features("cudnn", "checkpoint"),
    "autocast": with_features("autocast", param_dtype=None),
    "float32": {"param_dtype": None},
    "reduce in float32": {"reduce_dtype": "float32"},
    "int8 on the wire": {"wire": "int8"},
    "int8 on the wire, hsdp": with_features("hsdp", wire="int8"),
    "float8 on the wire, float32": {"wire": "float8_e4m3fn", "param_dtype": None},
    "deterministic": with_features("deterministic"),
    "side stream": with_features("side stream"),
    "hsdp": with_features("hsdp"),
    "hsdp, accumulate": with_features("hsdp", "accumulate"),
    "hierarchical": with_features("hierarchical", options=APART),
    "hierarchical, accumulate": with_features("hierarchical", "accumulate", options=APART),
    "hierarchical, offload": with_features("hierarchical", "offload", options=APART),
    "hierarchical, int8 on the wire": with_features("hierarchical", wire="int8"),
    "reshard to 2": {"reshard": 2},
    "no reshard": {"reshard": False},
    "own groups": with_features("own groups"),
    "group memory": with_features("group memory"),
    "group memory, own groups": with_features("group memory", "own groups"),
    "symmetric memory": with_features("symmetric memory"),
    "symmetric memory, own groups": with_features("symmetric memory", "own groups"),
    "symmetric memory, hsdp": with_features("symmetric memory", "hsdp"),
    "tensor parallel": with_features("tp"),
    "clip": with_features("clip"),
    "summon": with_features("summon"),
    "state dicts": with_features("state dicts"),
    "failing backward": with_features("raises"),
    "dynamic": with_features("dynamic"),
    "offload": with_features("offload"),
    "offload, accumulate": with_features("offload", "accumulate"),
    "rows of tables": {"options": {"embedding_rows": True}},
    "whole": with_features("whole"),
    "whole, clip": with_features("whole", "clip"),
    "whole, ahead": with_features("whole", "ahead"),
    "whole, accumulate": with_features("whole", "accumulate"),
    "whole, hsdp": with_features("whole", "hsdp"),
    "whole, symmetric memory": with_features("whole", "symmetric memory"),
    "whole, float16 with scaler": with_features("whole", "scaler", "clip", param_dtype="float16"),
    "float16 with scaler": with_features("scaler", "clip", param_dtype="float16"),
}
BY_MODE: dict[str, dict[str, Any]] = {
    # Templates for matmuls are left out: hundreds of them go through ptxas.
    "max-autotune": {
        "mode": "max-autotune-no-cudagraphs",
        "options": {"inductor": {"max_autotune_gemm_backends": "ATEN"}},
    },
    "fold off": {"options": {"fold": False}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_step(case: str, way: str, tmp_path: Path) -> None:
    _check(Setup(way=way, **CASES[case]), tmp_path)


@pytest.mark.parametrize("case", BY_MODE)
def test_compiled_step(case: str, tmp_path: Path) -> None:
    _check(Setup(**BY_MODE[case]), tmp_path)


def test_cuda_graphs(tmp_path: Path) -> None:
    found = rehearse(Setup(mode="reduce-overhead"), tmp_path)
    assert not found.error, found.error
    trace = read_trace(found.trace)
    assert trace.count("replay") == 2 and not trace.count("gemm")
    assert not trace.races and not trace.syncs


ALSO: dict[str, dict[str, Any]] = {
    "": {},
    "clip": {},
    "hsdp": {},
    "ends": {},
    "ahead": {},
    "accumulate": {},
    "symmetric memory": {},
    "scaler": {"param_dtype": "float16"},
    "checkpoint": {},
}


@pytest.mark.parametrize("also", ALSO)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_one_cuda_graph(way: str, also: str, tmp_path: Path) -> None:
    """A replay launches the graph, the copy of the batch and the copy of the loss, and no more."""
    features = frozenset({"whole", "captured", *filter(None, [also])})
    found = rehearse(Setup(way=way, features=features, **ALSO[also]), tmp_path)
    assert not found.error, found.error
    trace = read_trace(found.trace)
    assert trace.count("replay") == 1, trace.launches
    assert sum(trace.launches.values()) <= 3, trace.launches
    assert not trace.races and not trace.syncs and not trace.sent


def test_a_step_that_no_capture_takes_runs_without_one(tmp_path: Path) -> None:
    """Rows of tables are counted by the host, which a capture refuses."""
    options = {"embedding_rows": True}
    features = frozenset({"whole", "captured", "refused"})
    found = rehearse(Setup(features=features, options=options), tmp_path)
    assert not found.error, found.error
    trace = read_trace(found.trace)
    assert trace.count("gemm") and not trace.count("replay") and not trace.races
    assert "runs without a CUDA graph: the capture failed" in found.log.read_text()


def test_a_learning_rate_that_changes_captures_a_step_again(tmp_path: Path) -> None:
    found = rehearse(Setup(features=frozenset({"whole", "captured", "lr"})), tmp_path)
    assert not found.error, found.error
    assert read_trace(found.trace).count("replay") == 1


@pytest.mark.parametrize("mesh", ["flat", "hsdp"])
def test_groups_end_though_cuda_graphs_hold_them(mesh: str, tmp_path: Path) -> None:
    """NCCL waits for graphs that have captured a communicator before it destroys that."""
    features = frozenset({"ends", mesh})
    found = rehearse(Setup(mode="reduce-overhead", features=features), tmp_path)
    assert not found.error, found.error


def test_cuda_graphs_refuse_gradients_that_wait(tmp_path: Path) -> None:
    """They lie in memory that the next replay writes; torch says so, also of plain models."""
    setup = Setup(mode="reduce-overhead", features=frozenset({"accumulate"}))
    assert "has been overwritten by a subsequent run" in rehearse(setup, tmp_path).error


@pytest.mark.parametrize("memory", ["group memory", "symmetric memory", None])
def test_gathers_write_to_memory_that_nccl_knows(memory: str | None, tmp_path: Path) -> None:
    features = frozenset() if memory is None else frozenset({memory})
    grows = memory is None  # torch 2.15 registers all memory but that which grows in place
    found = rehearse(Setup(features=features, expandable=grows), tmp_path)
    assert not found.error, found.error
    trace = read_trace(found.trace)
    gathers = sum(message.what.startswith("all_gather") for message in trace.sent)
    assert gathers and trace.registered["all_gather"] == (gathers if memory else 0)


def _check(setup: Setup, folder: Path) -> None:
    found = rehearse(setup, folder)
    assert not found.error, found.error
    trace = read_trace(found.trace)
    assert trace.count("gemm") > 0
    assert not trace.races, "\n".join(map(str, trace.races[:10]))
    syncs = [sync for sync in trace.syncs if not _is_inherent(sync, setup)]
    assert not syncs, syncs
    if "embedding_rows" in setup.options and setup.way == "compiled":
        assert len(trace.syncs) == 1, trace.syncs
    if "cudnn" in setup.features:
        assert trace.names["forward", "cudnn"] == setup.blocks
    if "whole" in setup.features and not setup.features & {"clip", "accumulate", "hsdp"}:
        (order,) = (order for phase, order in trace.order if phase == "whole")
        assert order.count("reduce_scatter") and order.count("all_gather")
    if setup.way == "compiled":
        assert found.kernels
        for phase, order in trace.order:
            failed = "raises" in setup.features and not order
            if phase in ("forward", "backward") and not failed:
                orders = [[p, _as_sent(planned, setup)] for p, planned in found.orders]
                assert [phase, order] in orders, "\n".join(map(str, (phase, order, *orders)))


_MESSAGES = {
    "fetch_rows": ["all_to_all", "all_to_all", "wait", "wait", "all_to_all", "wait"],
    "return_rows": ["all_to_all", "wait", "all_to_all", "wait"],
}
_IN_STEPS = {"all_gather": ["all_gather", "wait", "all_gather"]}
_RESULTS = {"fetch_rows": 4, "return_rows": 1}


def _as_sent(planned: list[str], setup: Setup) -> list[str]:
    """A planned order with the messages of rows, which have arrived before they are waited for, and
    with both steps of gathers."""
    messages = _MESSAGES | (_IN_STEPS if "hierarchical" in setup.features else {})
    order, arrived = [], 0
    for kind in planned:
        arrived += _RESULTS.get(kind, 0)
        if kind == "wait" and arrived:
            arrived -= 1
        else:
            order += messages.get(kind, [kind])
    return order


def _is_inherent(sync: str, setup: Setup) -> bool:
    """Whether the host must wait: for offloaded gradients, at the end of the backward, as in FSDP2;
    in the forward, to know how many rows of a table arrive.

    Without a fused kernel, flex_attention of torch waits, too.
    """
    if "embedding_rows" in setup.options and setup.way == "compiled":
        return sync.startswith("forward: stream")
    if "flex" in setup.features and setup.way == "uncompiled":
        return ": stream" in sync
    return "offload" in setup.features and sync.startswith("backward: event")
