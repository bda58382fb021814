"""Weights of real ranks: streams, plans that run, loads from a generator, handovers."""

import copy
import itertools
import os
import pickle
import random
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Live, Stack, full, on_meta, seeded
from peft import LoraConfig, get_peft_model
from ranks import mesh_of, on_ranks
from test_state_dict import Everything, everything
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM
from weight_cases import expected, random_layout

import shardc
import shardc.weights.stream as stream
from shardc import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardc.weights import (
    Destination,
    Layout,
    LayoutBuilder,
    Piece,
    broadcast,
    full_tensors,
    inference_layout,
    load,
    plan,
    share,
)


def tensors_of(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def check_same(found, want) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert type(found[name]) is torch.Tensor and found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def streamed(model, **options):
    return {name: value.clone() for name, value in full_tensors(model, **options)}


def tensor_parallel(mesh, dp: int = 2) -> nn.Module:
    model = seeded(Stack)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"], units="auto")


# -- streams -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_stream_is_the_unsharded_state(mesh):
    want = tensors_of(seeded(Everything).state_dict())
    check_same(streamed(everything(mesh, 0)), want)
    found = streamed(everything(mesh, 0), dtype=torch.bfloat16)
    check_same(found, {n: v.bfloat16() if v.is_floating_point() else v for n, v in want.items()})


@on_ranks(4)
def test_streams_of_copies_of_tensor_parallel_and_of_offloaded_models(mesh):
    want = tensors_of(seeded(Stack).state_dict())
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_same(streamed(fully_shard(seeded(Stack), mesh=grid, units="auto")), want)
    check_same(streamed(tensor_parallel(mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp")))), want)
    policy, offload = MixedPrecisionPolicy(param_dtype=torch.bfloat16), CPUOffloadPolicy()
    model = seeded(Stack).requires_grad_(False)
    model.head.requires_grad_(True)
    fully_shard(model, mesh=mesh, units="auto", mp_policy=policy, offload_policy=offload)
    check_same(streamed(model), want)
    check_same(streamed(seeded(Stack)), want)  # not sharded


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Stack(blocks=6)


def bytes_of_buckets(model) -> list[int]:
    units = {module._shardc_unit for module in shardc.units_of(model).values()}
    return [bucket.layout.numel * 4 for unit in units for bucket in unit.buckets]


@on_ranks(2)
def test_a_stream_holds_two_buckets_and_gathers_ahead(mesh):
    model = fully_shard(deep(), mesh=mesh, units="auto")
    sizes, starts, start = bytes_of_buckets(model), [], stream.start_all_gather_into
    own = sum(sizes) // 2  # the mode counts the segments, too
    try:
        stream.start_all_gather_into = lambda *a: starts.append(len(seen)) or start(*a)
        seen = []
        with Live(2 * max(sizes) + own) as live:
            for name, _ in full_tensors(model):
                seen.append(name)
    finally:
        stream.start_all_gather_into = start
    buckets = itertools.groupby(model.get_parameter(name)._slot.bucket for name in seen)
    counts = [len(list(group)) for _, group in buckets]
    assert len(counts) == 7  # each gather but the first starts while the bucket before is used
    firsts = itertools.accumulate(counts[:-2], initial=0)
    assert starts == [0, *(first + 1 for first in firsts)]
    assert live.peak == 2 * max(sizes) + own


@on_ranks(2)
def test_tensors_that_a_consumer_keeps_stay_as_they_are(mesh):
    """Writers of buffers hold many tensors before they copy them, as vLLM's `pack_tensors`."""
    model = fully_shard(deep(), mesh=mesh, units="auto")
    check_same(dict(full_tensors(model)), tensors_of(deep().state_dict()))


@on_ranks(2)
def test_a_consumer_that_stops_early_leaves_nothing_under_way(mesh):
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    for _ in range(3):
        for _ in itertools.islice(iterator := full_tensors(model), 2):
            pass
        iterator.close()
    check_same(streamed(model), tensors_of(seeded(Stack).state_dict()))


@on_ranks(2)
def test_streams_refuse_before_anything_is_sent(mesh):
    meta = fully_shard(on_meta(), mesh=mesh, units="auto")
    with pytest.raises(ValueError, match=r"is on the meta device.*materialize"):
        full_tensors(meta)
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    with pytest.raises(RuntimeError, match="tensors of a stream"):
        full_tensors(model, dtype=torch.bfloat16 if dist.get_rank() else None)


# -- plans -------------------------------------------------------------------------------------


def sources_of(plain):
    state = tensors_of(plain.state_dict())
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def layouts_of(draw, plain, ranks):
    from shardc.weights import Source

    known = {
        n: Source(n, s, d, ()) for n, (s, d) in sources_of(plain).items() if d.is_floating_point
    }
    return {rank: random_layout(draw, known) for rank in ranks}


@on_ranks(2, 3, 4)
def test_plans_fill_random_layouts_on_real_ranks(mesh):
    world, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(12):
        draw = random.Random(seed)
        plain = seeded(Stack, seed)
        values = tensors_of(plain.state_dict())
        layouts = layouts_of(draw, plain, draw.sample(range(world), draw.randint(1, world)))
        model = fully_shard(seeded(Stack, seed), mesh=mesh, units="auto")
        layout = layouts.get(rank)
        made = plan(model, layout, buffer_bytes=draw.choice([None, 2048]))
        tensors = layout.empty() if layout else {}
        made.run(tensors)
        if layout:
            check_same(tensors, expected(layout, values))


def whole_layout(values, dtype=None) -> Layout:
    tensors = {}
    for name, value in values.items():
        shape, zero = tuple(value.shape), (0,) * value.dim()
        tensors[name] = Destination(shape, dtype or value.dtype, (Piece(name, zero, shape, zero),))
    return Layout(tensors)


@on_ranks(2, 4)
def test_a_run_holds_two_buffers(mesh):
    """The boxes that a rank copies need no buffer, in any dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        values = tensors_of(deep().state_dict())
        model, layout = fully_shard(deep(), mesh=mesh, units="auto"), whole_layout(values, dtype)
        made, tensors = plan(model, layout, buffer_bytes=512), layout.empty()
        assert max(chunk.bytes for chunk in made.own.copies) > 512
        with Live(2 * 512) as live:
            made.run(tensors)
        assert 512 < live.peak <= 2 * 512
        check_same(tensors, expected(layout, values))


@on_ranks(4)
def test_trainers_send_to_receivers_without_a_model_after_each_step(mesh):
    """Ranks 0 and 1 train two copies; ranks 2 and 3 are tensor-parallel receivers."""
    rank, plain = dist.get_rank(), llama()
    pair = mesh_of("cpu", (2, 2), mesh_dim_names=("side", "inside"))["inside"]
    model = fully_shard(llama(), mesh=pair, units="auto") if rank < 2 else None
    layout = None
    if rank >= 2:
        builder = LayoutBuilder(sources_of(plain), tp=2, tp_rank=rank - 2, dtype=torch.bfloat16)
        layout = inference_layout(builder, heads=4, kv_heads=2)
        assert "model.layers.0.self_attn.qkv_proj.weight" in layout.tensors
    made = plan(model, layout)
    for step in range(2):
        with torch.no_grad():
            for param in (*plain.parameters(), *(model.parameters() if model else ())):
                param.mul_(0.5 + step)
        if layout is None:
            made.send()
            assert made.bytes_received == 0 < made.bytes_sent
            continue
        tensors = layout.empty()
        made.receive(tensors)
        check_same(tensors, expected(layout, tensors_of(plain.state_dict())))
    assert made.seconds("h100-ib") > 0


@on_ranks(4)
def test_plans_of_copies_share_the_load_and_tensor_parallel_ones_are_whole(mesh):
    rank, values = dist.get_rank(), tensors_of(seeded(Stack).state_dict())
    layout = whole_layout(values)
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(seeded(Stack), mesh=grid, units="auto")
    own = layout if rank == 0 else None
    made = plan(model, own)
    tensors = layout.empty()
    made.run(tensors)
    told = [None] * 4
    dist.all_gather_object(told, made.bytes_sent)
    assert told[0] == told[2] == 0 and abs(told[1] - told[3]) < 0.1 * told[1]
    model = tensor_parallel(mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    plan(model, layout).run(everywhere := layout.empty())
    check_same(everywhere, values)
    if own:
        check_same(tensors, values)


@on_ranks(2)
def test_plans_refuse_on_all_ranks_before_anything_is_sent(mesh):
    rank = dist.get_rank()
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    wrong = Layout({"x": Destination((4,), torch.float32, (Piece("nothing", (0,), (4,), (0,)),))})
    match = "which no trainer has" if rank else "nothing was sent.*rank 1"
    with pytest.raises((ValueError, RuntimeError), match=match):
        plan(model, wrong if rank else None)
    right = Layout(
        {"x": Destination((4,), torch.float32, (Piece("head.weight", (0, 0), (1, 4), (0,)),))}
    )
    made = plan(model, right)
    with pytest.raises(ValueError, match=r"fills 'x'.*got \(5,\)"):
        made.run({"x": torch.zeros(5)})


# -- adapters ----------------------------------------------------------------------------------


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def adapted(**options) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(
        r=3, target_modules=["q_proj", "down_proj", "embed_tokens"], init_lora_weights=False,
        modules_to_save=["lm_head"], **options,
    )  # fmt: skip
    return get_peft_model(llama(), config)


@on_ranks(2)
def test_adapters_are_merged_into_the_rows_that_are_sent(mesh):
    for options in ({}, {"use_rslora": True}):
        plain = adapted(**options)
        before = copy.deepcopy(plain.state_dict())
        model = fully_shard(adapted(**options), mesh=mesh, units="auto")
        want = tensors_of(plain.merge_and_unload().state_dict())
        found = streamed(model, merge_adapters=True)
        assert found.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(found[name], value)
        layout = whole_layout({n: value for n, value in want.items() if value.dim() == 2})
        plan(model, layout, merge_adapters=True).run(tensors := layout.empty())
        for name, value in tensors.items():
            torch.testing.assert_close(value, want[name])
        for name, value in model.state_dict().items():  # the model is as it was
            assert torch.equal(full(value), before[name]), name


@on_ranks(2)
def test_adapters_that_are_no_sum_are_refused_by_name(mesh):
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=["q_proj"], use_dora=True)
    model = fully_shard(get_peft_model(llama(), config), mesh=mesh, units="auto")
    with pytest.raises(ValueError, match=r"q_proj.*Dora.*merge_adapter"):
        full_tensors(model, merge_adapters=True)


# -- loads -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_generator_of_rank_0_or_of_all_fills_the_shards(mesh):
    want = tensors_of(seeded(Everything, 5).state_dict())
    for everyone in (False, True):
        model = everything(mesh, 0)
        given = iter(want.items()) if everyone or dist.get_rank() == 0 else None
        keys = load(model, given, strict=True)
        assert keys == ([], [])
        check_same(streamed(model), want)


@on_ranks(2)
def test_a_load_holds_two_whole_tensors_at_most(mesh):
    alive, most = set(), [0]

    def tensors():
        for number in range(6):
            yield f"{number}.weight", watched(torch.full((64, 64), float(number)))

    def watched(tensor):
        key = id(tensor)
        alive.add(key)
        weakref.finalize(tensor, alive.discard, key)
        most[0] = max(most[0], len(alive))
        return tensor

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    fully_shard(model, mesh=mesh, units="auto")
    real = torch.empty
    try:
        torch.empty = lambda *a, **k: (
            watched(real(*a, **k)) if a[:1] == ((64, 64),) else real(*a, **k)
        )
        load(model, tensors() if dist.get_rank() == 0 else None)
    finally:
        torch.empty = real
    assert 1 <= most[0] <= 2
    assert [float(p[0, 0]) for p in streamed(model).values()] == [0, 1, 2, 3, 4, 5]


@on_ranks(2)
def test_a_load_names_what_is_wrong_on_all_ranks(mesh):
    first = dist.get_rank() == 0
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    good = tensors_of(seeded(Stack, 3).state_dict())
    wrong = {**good, "head.weight": torch.zeros(2, 2)}
    for given, match in ((wrong, "size mismatch"), ({"x": torch.zeros(1)}, "unexpected: 'x'")):
        with pytest.raises(RuntimeError, match=match):
            load(model, given.items() if first else None)
    with pytest.raises(RuntimeError, match="missing"):
        load(model, list(good.items())[:2] if first else None)
    keys = load(model, [*list(good.items())[:2], ("x", good["head.weight"])], strict=False)
    assert "head.weight" in keys.missing_keys and keys.unexpected_keys == ["x"]

    def broken():
        yield from list(good.items())[:1]
        raise OSError("no such file")

    with pytest.raises(RuntimeError, match="OSError: no such file"):
        load(model, broken() if first else None)


# -- engines -----------------------------------------------------------------------------------


ENGINE = """
import pickle, sys
from shardc.weights import opened
found, answers = {}, sys.stdout.buffer
while (shared := pickle.load(sys.stdin.buffer)) is not None:
    found |= {name: value.float().sum().item() for name, value in opened(shared)}
    pickle.dump("done", answers)
    answers.flush()
pickle.dump(found, answers)
"""


@on_ranks(2)
def test_a_process_without_a_group_opens_shared_tensors(mesh):
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    count = 0
    with subprocess.Popen([sys.executable, "-c", ENGINE], **pipes) as engine:
        for shared in share(full_tensors(model, dtype=torch.bfloat16), buffer_bytes=4096):
            pickle.dump(shared, engine.stdin)
            engine.stdin.flush()
            assert pickle.load(engine.stdout) == "done"
            count += 1
        pickle.dump(None, engine.stdin)
        engine.stdin.flush()
        sums = pickle.load(engine.stdout)
    want = tensors_of(seeded(Stack).bfloat16().state_dict())
    assert count > 1 and sums == {n: v.float().sum().item() for n, v in want.items()}
    assert not os.path.exists(shared.file[0])


@on_ranks(2)
def test_broadcasts_are_announced_as_sglang_and_vllm_expect(mesh):
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    told = []
    first = dist.get_rank() == 0
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    announce = (lambda *args: told.append(args)) if first else None
    broadcast(full_tensors(model, dtype=torch.bfloat16), announce, alone, buffer_bytes=2048)
    if first:
        names = [name for batch, _, _ in told for name in batch]
        assert sorted(names) == sorted(model.state_dict()) and len(told) > 1
        assert told[0][1][0] == "bfloat16" and told[0][2][0] == [31, 18]
    dist.destroy_process_group(alone)


@on_ranks(2)
def test_the_loops_of_trl_and_verl_take_sharded_models(mesh):
    want = dict(seeded(Stack).named_parameters())
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    for named in (model.named_parameters(), model.state_dict().items()):
        for name, param in named:
            value = param.full_tensor() if isinstance(param, DTensor) else param
            assert type(value.detach()) is torch.Tensor and torch.equal(value, want[name])
