"""Step time at equal memory: shardc's memory_budget beside what people set by hand.

    python benchmarks/memory_budget.py --model llama --blocks 8 --bandwidth 0.5

Every side is one rank of an emulated wire (`wire.py`) in a process of its own; rounds are
interleaved. The peers are FSDP2 (blocks compiled) with no, selective and full activation
checkpointing, resharded, and torch's `activation_memory_budget` with shardc's gathers. They are
measured for the memory that they need; then shardc plans for as much as each, and, beside FSDP2
with full checkpointing, for the least that it can. Memory is what a step allocates beside segments,
gradients counted; no optimizer.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
import wire
from kept import show
from processes import add_round_options, interleave, median_ratio
from step_time import allocated_peak
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

PEERS: dict[str, tuple[str, Any]] = {
    **{f"fsdp2, {name}": ("fsdp2", name) for name in ("none", "selective", "full")},
    **{f"torch's {share}": ("torch", share) for share in (0.0, 0.2, 0.4, 0.6, 0.8)},
}
LEAST, LEANEST = "shardc, least", "fsdp2, full"
"""What shardc can do with least, and the peer beside which it stands."""


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--world", type=int, default=8, help="emulated ranks (default 8)")
    add("--latency", type=float, default=0.5, help="ms a message (default 0.5)")
    add("--bandwidth", type=float, default=0.5, help="GB/s (default 0.5)")
    add("--model", choices=MODELS, default="gpt", help="the model (default gpt)")
    add("--blocks", type=int, default=8, help="blocks of the model (default 8)")
    add("--dim", type=int, default=512, help="model width (default 512)")
    add("--batch", type=int, default=4, help="sequences of 128 tokens (default 4)")
    add("--peers", choices=PEERS, nargs="+", default=[*PEERS], metavar="PEER",
        help=f"of {'; '.join(PEERS)} (default all; each takes two processes)")  # fmt: skip
    add_round_options(parser)
    given = vars(parser.parse_args())
    rivals = {name: [functools.partial(prepare, *PEERS[name], given)] for name in given["peers"]}
    sides = dict(rivals)
    for name, rounds in interleave(rivals, 1).items():
        peak = rounds[0][0]["peak"]
        sides[f"shardc, as {name}"] = [functools.partial(prepare, "shardc", peak, given)]
    if LEANEST in rivals:
        sides[LEAST] = [functools.partial(prepare, "shardc", None, given)]
    results = {
        name: [figures for (figures,) in rounds]
        for name, rounds in interleave(sides, given["rounds"]).items()
    }
    setting = (
        f"W={given['world']}, {given['latency']} ms + {given['bandwidth']} GB/s, "
        f"{given['blocks']} blocks ({given['model']}) of {given['dim']}, batch {given['batch']}; "
        f"medians of {given['rounds']} rounds (min to max)"
    )
    rows = [_row(name, rounds, results) for name, rounds in results.items()]
    headers = ["", "step ms", "peak MB", "planned / peak", "peak / budget", "step / peer's"]
    show(headers, rows, given["keep"], setting)


def _row(name: str, rounds: list[dict[str, Any]], results: dict[str, Any]) -> list[str]:
    last, steps = rounds[-1], [figures["step"] for figures in rounds]
    peer = LEANEST if name == LEAST else name.removeprefix("shardc, as ")
    others = [figures["step"] for figures in results[peer]]
    return [
        name,
        f"{1e3 * statistics.median(steps):.0f}",
        f"{last['peak'] / 1e6:.1f}",
        f"{last['planned'] / last['peak']:.3f}" if last["planned"] else "-",
        f"{last['peak'] / last['budget']:.3f}" if last["budget"] else "-",
        median_ratio(steps, others) if peer != name else "-",
    ]


def prepare(side: str, setting: Any, given: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Build and warm one side in this process; what runs one round of it.

    Args:
        side: "fsdp2", "shardc" or "torch".
        setting: of checkpointing; the bytes a step may allocate, None for the least; or torch's
            activation_memory_budget.
        given: the command's arguments.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    _, mesh = wire.join(given["world"], 1e-3 * given["latency"], 1e9 * given["bandwidth"])
    shape = peers.Shape(blocks=given["blocks"], dim=given["dim"], batch=given["batch"])
    model = MODELS[given["model"]](shape)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length))
    build = {"fsdp2": _fsdp2, "shardc": _shardc, "torch": _torch}[side]
    forward, budget = build(model, mesh, setting, tokens)

    def step() -> None:
        forward(tokens).backward()

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        for _ in range(given["steps"]):
            step()
            model.zero_grad()
        return {"step": (time.perf_counter() - start) / given["steps"], **measured}

    measured: dict[str, Any] = {}
    for _ in range(2):
        run()
    measured = {"peak": allocated_peak(step), "planned": _planned(side), "budget": budget}
    model.zero_grad()
    return run


class Llama(nn.Module):
    """A Llama of `transformers`; the forward gives the loss of the next token, as `peers.Model`."""

    def __init__(self, shape: peers.Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.dim,
            intermediate_size=shape.dim * 7 // 2,
            num_hidden_layers=shape.blocks,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads // 4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens: (batch, length)` -> loss `()`."""
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


MODELS: dict[str, Callable[[peers.Shape], nn.Module]] = {"gpt": peers.Model, "llama": Llama}


def _fsdp2(model: nn.Module, mesh: Any, setting: str, tokens: Any) -> tuple[Any, int]:
    if setting != "none":
        for block in peers.blocks_of(model):
            _checkpoint(block, selective=setting == "selective")
    return peers.fsdp2_blocks(model, mesh), 0


def _checkpoint(block: nn.Module, selective: bool) -> None:
    """Have a block computed again in its backward; selectively: all but attention and every other
    matmul, as torchtitan's per-op policy."""
    whole = type(block).forward

    def contexts() -> Any:
        matmuls = 0

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal matmuls
            if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                matmuls += 1
                saved = matmuls % 2 == 1
            else:
                saved = "attention" in str(op)
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    extra = {"context_fn": contexts} if selective else {}
    block.forward = functools.partial(checkpoint, whole, block, use_reentrant=False, **extra)


def _shardc(model: nn.Module, mesh: Any, budget: int | None, tokens: Any) -> tuple[Any, int]:
    import shardc

    shardc.calibrate(mesh, refresh=True)
    shardc.fully_shard(model, mesh=mesh, units="auto")
    segments = sum(parameter.to_local().nbytes for parameter in model.parameters())
    segments = -(-segments // 16) * 16 + 64 * 64  # padding
    options = {"optimizer_states": 0}
    if budget is None:
        try:
            _compiled(model, {**options, "memory_budget": 1})(tokens)
        except RuntimeError as error:
            least = int(str(error).split("at least ")[1].split()[0].replace(",", ""))
        budget = least - segments
    return _compiled(model, {**options, "memory_budget": budget + segments}), budget


def _compiled(model: nn.Module, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="shardc", fullgraph=True, options=options)


def _torch(model: nn.Module, mesh: Any, share: float, tokens: Any) -> tuple[Any, int]:
    torch._functorch.config.activation_memory_budget = share
    return peers.shardc(model, mesh), 0


def _planned(side: str) -> int:
    if side == "fsdp2":
        return 0
    from shardc.backend.graph_plan import graph_plans

    return max(plan.liveness.peak for plan in list(graph_plans)[-2:])


if __name__ == "__main__":
    main()
