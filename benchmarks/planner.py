"""The layout planner on large models: milliseconds for a whole model's plan, and its padding.

    python benchmarks/planner.py

Every block is a unit, and embedding, last norm and head are the root's, as `fully_shard` with
`units="auto"` makes them; buckets are split as for the links of `--profile`. Shapes are those of
the models' published configurations, in float32. "whole rows" is the share of the elements that lie
in parameters which no rank boundary cuts inside a row. A plan is made in one call of `plan_buckets`
a unit, without a process group or real tensors; nothing is reused from one block to the next.
"""

import argparse
import time
from dataclasses import dataclass

from kept import add_keep_option, show
from tqdm import tqdm

from shardc.passes.estimate.cost import bucket_grain
from shardc.passes.estimate.hardware import PROFILES, Profile
from shardc.runtime.layout.layout import BucketLayout, Param, plan_buckets

WORLDS = (8, 64, 1024, 16384)


@dataclass(frozen=True)
class Config:
    """A decoder's sizes, named as in its published config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 8
    num_local_experts: int = 0
    head_dim: int = 0


CONFIGS = (
    Config("Llama-3 8B", 4096, 14336, 32, 32, 128256),
    Config("Llama-3 70B", 8192, 28672, 80, 64, 128256),
    Config("Llama-3.1 405B", 16384, 53248, 126, 128, 128256),
    Config("Mixtral 8x7B", 4096, 14336, 32, 32, 32000, num_local_experts=8),
    Config("Llama-2 7B", 4096, 11008, 32, 32, 32000, num_key_value_heads=32),
    Config("Mistral 7B", 4096, 14336, 32, 32, 32000),
    Config("Qwen2.5 72B", 8192, 29568, 80, 64, 152064),
    Config("Qwen3 8B", 4096, 12288, 36, 32, 151936),
    Config("Qwen3 32B", 5120, 25600, 64, 64, 151936, head_dim=128),
    Config("OLMo-2 13B", 5120, 13824, 40, 40, 100352, num_key_value_heads=40),
    Config("Phi-4", 5120, 17920, 40, 40, 100352, num_key_value_heads=10),
    Config("Yi 34B", 7168, 20480, 60, 56, 64000),
)


def main() -> None:
    """Plan every model for every world size and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", choices=sorted(PROFILES), default="h100-nvlink",
                        help="links that buckets are split for (default h100-nvlink)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="the best of (default 3)")
    add_keep_option(parser)
    args = parser.parse_args()
    runs = [(config, world) for config in CONFIGS for world in WORLDS]
    rows = [
        _row(config, world, PROFILES[args.profile], args.repeats)
        for config, world in tqdm(runs, unit="plan", leave=False)
    ]
    headers = [
        "model", "parameters", "W", "ms", "worst padding %", "whole padding %", "whole rows %",
        "buckets",
    ]  # fmt: skip
    show(headers, rows, args.keep)


def _row(config: Config, world: int, profile: Profile, repeats: int) -> list[str | int]:
    units = [block(config)] * config.num_hidden_layers + [root(config)]
    grain = bucket_grain(world, profile)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        layouts = [layout for unit in units for layout in plan_buckets(unit, world, grain)]
        times.append(time.perf_counter() - start)
    worst = max(layout.padding_fraction for layout in layouts)
    return [
        config.name,
        f"{sum(layout.used for layout in layouts) / 1e9:.1f} B",
        world,
        f"{1e3 * min(times):.1f}",
        f"{100 * worst:.3f}",
        f"{100 * _padding_fraction(layouts):.3f}",
        f"{100 * _in_whole_rows(layouts):.1f}",
        len(layouts),
    ]


def _padding_fraction(layouts: list[BucketLayout]) -> float:
    return sum(layout.padding for layout in layouts) / sum(layout.numel for layout in layouts)


def _in_whole_rows(layouts: list[BucketLayout]) -> float:
    cut = sum(
        slot.numel
        for layout in layouts
        for slot in layout.slots
        if slot.name in layout.cut_inside_rows
    )
    return 1 - cut / sum(layout.used for layout in layouts)


def block(config: Config) -> list[Param]:
    """A block's parameters, in the order in which its module registers them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = config.head_dim or hidden // config.num_attention_heads
    query, key_value = head * config.num_attention_heads, head * config.num_key_value_heads
    expert = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "attention.q": (query, hidden),
        "attention.k": (key_value, hidden),
        "attention.v": (key_value, hidden),
        "attention.o": (hidden, query),
    }
    if config.num_local_experts:
        shapes["router"] = (config.num_local_experts, hidden)
        for number in range(config.num_local_experts):
            shapes |= {f"experts.{number}.{name}": shape for name, shape in expert.items()}
    else:
        shapes |= {f"mlp.{name}": shape for name, shape in expert.items()}
    shapes |= {"norm1": (hidden,), "norm2": (hidden,)}
    return [Param(name, shape) for name, shape in shapes.items()]


def root(config: Config) -> list[Param]:
    """What is outside of the blocks; embedding and head are not tied."""
    table = (config.vocab_size, config.hidden_size)
    return [
        Param("embedding", table),
        Param("norm", (config.hidden_size,)),
        Param("head", table),
    ]


if __name__ == "__main__":
    main()
