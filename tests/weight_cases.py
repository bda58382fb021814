"""Random trainers and layouts for plans of weights, and a run of a plan without ranks."""

import dataclasses
import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardc.runtime.layout.layout import Param, plan_buckets
from shardc.weights.layouts import Destination, Layout, LayoutBuilder, Piece, inference_layout
from shardc.weights.rank_plan import (
    Chunk,
    Part,
    RankPlan,
    Source,
    fitted,
    plan_rank,
    wire_dtype,
)
from shardc.weights.transfer import rounds_of, slice_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Case(NamedTuple):
    """Trainers, receivers, and the values of the trainers."""

    world: int
    sources: dict[str, Source]
    layouts: dict[int, Layout]
    values: dict[str, Tensor]


def held(source: Source, rank: int) -> Tensor:
    """A mask of the elements that a trainer holds."""
    mask = torch.zeros(source.shape, dtype=torch.bool)
    for part in source.parts:
        box = torch.zeros(math.prod(part.shape), dtype=torch.bool)
        for place, ranks in enumerate(part.holders):
            if rank in ranks:
                first = max(place * part.segment - part.start, 0)
                box[first : max((place + 1) * part.segment - part.start, 0)] = True
        at = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.shape, strict=True))
        mask[at] |= box.view(part.shape)
    return mask


def sharded(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shards: int, copies: int, tp: int = 1
) -> dict[str, Source]:
    """One bucket a dtype over `copies` times `shards` ranks; with `tp`, dim 0 is cut before."""
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    for coordinate in range(tp):
        local, offsets = {}, {}
        for name, (shape, _) in shapes.items():
            cut = tp > 1 and len(shape) > 1 and shape[0] >= tp
            size = -(-shape[0] // tp) if cut else 0
            start = min(coordinate * size, shape[0]) if cut else 0
            offsets[name] = (start, *(0 for _ in shape[1:])) if shape else ()
            local[name] = (min(size, shape[0] - start), *shape[1:]) if cut else shape
        params = [Param(name, local[name], dtype) for name, (_, dtype) in shapes.items()]
        ranks = tuple(
            tuple((copy * shards + shard) * tp + coordinate for copy in range(copies))
            for shard in range(shards)
        )
        for layout in plan_buckets(params, shards):
            for slot in layout.slots:
                same = [p for p in parts[slot.name] if p.offsets == offsets[slot.name]]
                if same and same[0].shape == slot.shape:  # replicated over tp
                    both = zip(same[0].holders, ranks, strict=True)
                    joined = tuple(a + b for a, b in both)
                    parts[slot.name] = [dataclasses.replace(same[0], holders=joined)]
                elif 0 not in slot.shape:
                    parts[slot.name].append(
                        Part(offsets[slot.name], slot.shape, slot.start, layout.segment, ranks)
                    )
    return {
        name: Source(name, shape, dtype, tuple(parts[name]))
        for name, (shape, dtype) in shapes.items()
    }


def random_layout(draw: random.Random, sources: Mapping[str, Source]) -> Layout:
    """Random rectangles, some of them twice, in tensors with more or as many dims."""
    tensors = {}
    for number in range(draw.randint(1, 6)):
        source = draw.choice(list(sources.values()))
        slices = [sorted(draw.sample(range(size + 1), 2)) for size in source.shape]
        start, stop = tuple(a for a, _ in slices), tuple(b for _, b in slices)
        sizes = tuple(b - a for a, b in slices)
        lead = (1,) * draw.randint(0, 1)
        at = tuple(draw.randint(0, 2) for _ in (*lead, *sizes))
        room = tuple(a + s + draw.randint(0, 2) for a, s in zip(at, (*lead, *sizes), strict=True))
        tensors[f"d{number}"] = Destination(
            room, draw.choice(DTYPES), (Piece(source.name, start, stop, at),)
        )
    return Layout(tensors)


def decoder(draw: random.Random) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], int, int]:
    """Names and shapes of a small decoder with experts; its heads and k/v heads."""
    heads, kv_heads = draw.choice([(8, 8), (8, 4), (8, 2), (4, 1)])
    wide, head, inner = draw.choice([12, 20, 36]), draw.choice([2, 3]), draw.choice([16, 24])
    shapes = {"model.embed_tokens.weight": (draw.randint(40, 150), wide)}
    for layer in range(draw.randint(1, 2)):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * head, wide),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head, wide),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head, wide),
            f"{at}.self_attn.q_proj.bias": (heads * head,),
            f"{at}.self_attn.k_proj.bias": (kv_heads * head,),
            f"{at}.self_attn.v_proj.bias": (kv_heads * head,),
            f"{at}.self_attn.o_proj.weight": (wide, heads * head * 1),
            f"{at}.mlp.gate_proj.weight": (inner, wide),
            f"{at}.mlp.up_proj.weight": (inner, wide),
            f"{at}.mlp.down_proj.weight": (wide, inner),
            f"{at}.norm.weight": (wide,),
        }
        for expert in range(draw.randint(2, 5)):
            for kind, shape in (("gate", (8, wide)), ("up", (8, wide)), ("down", (wide, 8))):
                shapes[f"{at}.moe.experts.{expert}.{kind}_proj.weight"] = shape
    dtype = draw.choice(DTYPES)
    return {name: (shape, dtype) for name, shape in shapes.items()}, heads, kv_heads


def random_case(seed: int) -> Case:
    """Trainers (HSDP, tensor parallelism) and receivers (a TP x EP grid, or random rectangles)."""
    draw = random.Random(seed)
    shards, copies, tp = draw.choice([(2, 1, 1), (3, 1, 1), (5, 1, 1), (7, 1, 1), (16, 1, 1),
                                      (2, 2, 1), (4, 2, 1), (3, 3, 1), (2, 1, 2), (2, 2, 2),
                                      (4, 1, 2), (1, 3, 1)])  # fmt: skip
    grid = draw.random() < 0.5
    if grid:
        shapes, heads, kv_heads = decoder(draw)
    else:
        shapes = {
            f"s{n}": (
                tuple(draw.randint(1, 17) for _ in range(draw.randint(0, 3))),
                draw.choice(DTYPES),
            )
            for n in range(draw.randint(1, 6))
        }
    sources = sharded(shapes, shards, copies, tp)
    world = trainers = shards * copies * tp
    layouts = {}
    if grid:
        into, experts = draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        dtype = draw.choice([None, *DTYPES])
        for one in range(max(into, experts)):
            ranks = into, one % into, experts, one % experts
            builder = LayoutBuilder(shapes, *ranks, 1, 0, dtype)
            layouts[trainers + one] = inference_layout(builder, heads, kv_heads)
        world += len(layouts)
    else:
        world += draw.randint(1, 3)
        receivers = draw.sample(range(world), draw.randint(1, world))  # some are trainers too
        layouts = {rank: random_layout(draw, sources) for rank in receivers}
    torch.manual_seed(seed)
    values = {
        name: torch.randn(source.shape, dtype=torch.float64).to(source.dtype)
        for name, source in sources.items()
    }
    return Case(world, sources, layouts, values)


def expected(layout: Layout, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a receiver, straight from whole values."""
    tensors = layout.empty()
    for name, wanted in layout.tensors.items():
        for piece in wanted.pieces:
            at = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            value = values[piece.source][at]
            sizes = fitted(tuple(value.shape), len(wanted.shape))
            place = tuple(slice(a, a + n) for a, n in zip(piece.at, sizes, strict=True))
            tensors[name][place] = value.reshape(sizes).to(wanted.dtype)
    return tensors


def least(case: Case) -> int:
    """The bytes that must travel: all elements that a receiver wants and does not hold."""
    total = 0
    for rank, layout in case.layouts.items():
        wants: dict[tuple[str, torch.dtype], Tensor] = {}
        for wanted in layout.tensors.values():
            for piece in wanted.pieces:
                source = case.sources[piece.source]
                key = source.name, wire_dtype(source.dtype, wanted.dtype)
                mask = wants.setdefault(key, torch.zeros(source.shape, dtype=torch.bool))
                mask[tuple(map(slice, piece.start, piece.stop))] = True
        for (name, wire), mask in wants.items():
            missing = mask & ~held(case.sources[name], rank)
            total += int(missing.sum()) * wire.itemsize
    return total


def run_alone(case: Case, plans: list[RankPlan], most: int) -> dict[int, dict[str, Tensor]]:
    """Run the plans of all ranks in one process, round by round."""
    tensors = {rank: layout.empty() for rank, layout in case.layouts.items()}
    masks = {(n, r): held(s, r) for n, s in case.sources.items() for r in range(case.world)}

    def read(rank: int, chunk: Chunk) -> Tensor:
        at = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.sizes, strict=True))
        assert masks[chunk.source, rank][at].all(), (rank, chunk)
        return case.values[chunk.source][at].to(chunk.wire)

    def places(rank: int, chunk: Chunk) -> list[Tensor]:
        assert chunk.targets
        found = []
        for target in chunk.targets:
            sizes = fitted(chunk.sizes, len(target.at))
            at = tuple(slice(a, a + n) for a, n in zip(target.at, sizes, strict=True))
            found.append(tensors[rank][target.name][at])
        return found

    def write(rank: int, chunk: Chunk, value: Tensor) -> None:
        for place in places(rank, chunk):
            place.copy_(value.reshape(place.shape))

    for plan in plans:
        for chunk in plan.copies:
            write(plan.rank, chunk, read(plan.rank, chunk))
    traffic = [plan.traffic() for plan in plans]
    for phase in range(2):
        rounds = rounds_of(traffic, phase, most)
        for number in range(rounds):
            wires = {}
            for plan in plans:
                size = 0
                for peer, chunks in plan.sends[phase].items():
                    sent = slice_of(chunks, number, rounds)
                    wires[plan.rank, peer] = [
                        read(plan.rank, c) if phase == 0 else
                        places(plan.rank, c)[0].to(c.wire).reshape(c.sizes)
                        for c in sent
                    ]  # fmt: skip
                    size += sum(value.nbytes for value in wires[plan.rank, peer])
                assert size <= most, (size, most)
            for plan in plans:
                size = 0
                for peer, chunks in plan.receives[phase].items():
                    got = slice_of(chunks, number, rounds)
                    values = wires.pop((peer, plan.rank))
                    assert [(c.sizes, c.wire) for c in got] == [
                        (tuple(v.shape), v.dtype) for v in values
                    ]
                    for chunk, value in zip(got, values, strict=True):
                        write(plan.rank, chunk, value)
                        size += value.nbytes
                assert size <= most, (size, most)
            assert not wires
    return tensors


def planned(case: Case) -> list[RankPlan]:
    return [plan_rank(rank, case.sources, case.layouts) for rank in range(case.world)]


# -- DeepSeek-V3 ---------------------------------------------------------------------------------


def deepseek_v3() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes by unit, from the public config (without the extra head)."""
    units = {"embed": {"model.embed_tokens.weight": (129280, 7168)}}
    for layer in range(61):
        at = f"model.layers.{layer}"
        shapes = {
            f"{at}.self_attn.q_a_proj.weight": (1536, 7168),
            f"{at}.self_attn.q_a_layernorm.weight": (1536,),
            f"{at}.self_attn.q_b_proj.weight": (24576, 1536),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
            f"{at}.self_attn.kv_a_layernorm.weight": (512,),
            f"{at}.self_attn.kv_b_proj.weight": (32768, 512),
            f"{at}.self_attn.o_proj.weight": (7168, 16384),
        }
        mlps = {"mlp": 18432}
        if layer >= 3:
            mlps = {f"mlp.experts.{expert}": 2048 for expert in range(256)}
            mlps["mlp.shared_experts"] = 2048
            shapes[f"{at}.mlp.gate.weight"] = (256, 7168)
            shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (256,)
        for name, inner in mlps.items():
            for kind, shape in (
                ("gate", (inner, 7168)), ("up", (inner, 7168)), ("down", (7168, inner)),
            ):  # fmt: skip
                shapes[f"{at}.{name}.{kind}_proj.weight"] = shape
        shapes[f"{at}.input_layernorm.weight"] = (7168,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (7168,)
        units[at] = shapes
    units["head"] = {"model.norm.weight": (7168,), "lm_head.weight": (129280, 7168)}
    return units


def deepseek_case(trainers: int, receivers: int) -> tuple[dict[str, Source], dict[int, Layout]]:
    """Trainers that shard blocks, and receivers with attention on 8 ranks and one expert group."""
    sources, shapes = {}, {}
    for unit in deepseek_v3().values():
        typed = {name: (shape, torch.bfloat16) for name, shape in unit.items()}
        sources |= sharded(typed, trainers, 1)
        shapes |= typed
    layouts = {}
    for one in range(receivers):
        builder = LayoutBuilder(shapes, tp=8, tp_rank=one % 8, ep=receivers, ep_rank=one)
        layouts[trainers + one] = inference_layout(builder, 128, 128)
    return sources, layouts
