"""From a segment to full parameters and back: the tensor functions that graphs are made of.

The pass `insert_unshard` splices `unshard` into a captured graph: cast the segment, one all-gather
of the bucket, one split (padding included: the backward of a split is a single `cat`), views. The
autograd of `unshard` brings the bucket's gradient back: cast, reduce-scatter, for copies of the
model an all-reduce, divide. With `sync` off the whole unreduced gradient goes to a leaf of its own
instead, the sink. The eager runtime (`regather`, `backward_pass`) calls the same functions.

Under Dynamo a parameter reads as the mark op `shardc::unshard_slot`, which is never executed.
"""

from collections.abc import Generator, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.traceback import annotate

from shardc.runtime import compat
from shardc.runtime.comm import (
    collectives,
    comm_buffers,  # noqa: F401 (registers its ops)
    custom_comm,
    gradient_ops,  # noqa: F401 (registers its ops)
    host_copies,  # noqa: F401 (registers its op)
    table_rows,  # noqa: F401 (registers its ops)
)
from shardc.runtime.comm.collectives import Started
from shardc.runtime.comm.extended_gather import start_extended
from shardc.runtime.comm.ops import define_op
from shardc.runtime.comm.quantise import decode, encode
from shardc.runtime.layout.spec import Moved, Reduction, UnshardSpec, object_of, spec_of
from shardc.runtime.layout.wire_format import WireFormat


def unshard(segment: Tensor, moved: Moved, *extras: Tensor) -> tuple[Tensor, ...]:
    """Gather a bucket: `segment: (S,)` -> its full parameters, views of one `(W*S,)` tensor.

    `extras` are the tensors that `UnshardSpec.extras` names. With `UnshardSpec.kept`, the whole
    `(W*S,)` tensor is the last result. The nodes that gather and reduce, in forward and backward,
    have `(moved,)` under `node.meta["custom"]["shardc"]`.
    """
    return _Unshard.apply(segment, moved, *extras)


Steps = Generator[Started, Tensor, Tensor]
"""Collectives in sequence: a generator starts and yields each one, and is sent its result."""


def gather(segment: Tensor, spec: UnshardSpec) -> Tensor:
    """The whole bucket, `(W*S,)`, in the compute dtype.

    With `spec.extension`, the full parameter that the extension makes.
    """
    return start_gather(segment, spec).wait()


def start_gather(segment: Tensor, spec: UnshardSpec, part: Tensor | None = None) -> Started:
    """Start `gather`; with `part`, which `recut` kept, among the ranks of `spec.recut`."""
    if part is not None:
        assert spec.recut is not None
        return collectives.start_all_gather(part, *spec.recut)
    if spec.extension is not None:
        local = segment if spec.device is None else segment.to(spec.device)
        return start_extended(local, spec, lambda sent: _start_gather(sent, spec, sent.dtype))
    if spec.wire is not None:
        return _start_quantised_gather(segment, spec, spec.wire)
    return _start_gather(segment, spec, spec.compute_dtype)


def _start_quantised_gather(segment: Tensor, spec: UnshardSpec, form: WireFormat) -> Started:
    """Start to gather quantised messages; the wait decodes them."""
    local = segment if spec.device is None else segment.to(spec.device)
    message = encode(local.view(1, -1), form).view(-1)
    started = _start_gather(message, spec, message.dtype)

    def finish(raw: Tensor) -> Tensor:
        messages = started.then(raw).view(spec.world_size, -1)
        full = decode(messages, local.numel(), form, spec.compute_dtype)
        # Inductor computes the whole before the split: the pieces have no simple index in rows
        return full.as_strided([full.numel()], [1])

    return Started(started.raw, finish, started.done)


def _start_gather(local: Tensor, spec: UnshardSpec, dtype: torch.dtype) -> Started:
    """Start to gather `local`, of one size on all ranks, as `dtype` on the computing device."""
    if spec.hierarchy is not None:
        device = torch.device(spec.device or local.device)
        return Started(torch.ops.shardc.all_gather_in_steps(local, dtype, device, *spec.hierarchy))
    own = spec.device is not None or spec.memory is not None or spec.world_size == 1
    if spec.gather is None and own:
        device = torch.device(spec.device or local.device)
        sees_to_memory = torch.ops.shardc.all_gather
        ranks, group = spec.world_size, spec.group
        return Started(sees_to_memory(local, dtype, device, ranks, group, spec.memory))
    if spec.device is not None:
        local = local.to(spec.device)
    if local.dtype != dtype:
        local = local.to(dtype)
    if spec.gather is not None:
        full = torch.ops.shardc.custom_all_gather(local, spec.world_size, spec.group, spec.gather)
        return Started(full, done=True)
    return collectives.start_all_gather(local, spec.world_size, spec.group)


def split_full(full: Tensor, spec: UnshardSpec) -> tuple[Tensor, ...]:
    """The parameters, one a slot, as views of the gathered bucket, `(W*S,)`."""
    pieces = torch.split(full, [size for size, _ in spec.pieces])
    views = {
        slot: piece.view(spec.shapes[slot])
        for piece, (_, slot) in zip(pieces, spec.pieces, strict=True)
        if slot is not None
    }
    return tuple(views[slot] for slot in range(len(spec.shapes)))


def full_parameters(full: Tensor, spec: UnshardSpec) -> tuple[Tensor, ...]:
    """The parameters, one a slot, as aliases of the result of `gather`."""
    return split_full(full, spec) if spec.extension is None else (full.detach(),)


def pack_gradients(
    grads: Sequence[Tensor | None], spec: UnshardSpec, pending: Tensor | None
) -> Tensor:
    """The gradients of full parameters as one flat tensor, `(W*S,)`, with `pending` added.

    The gradients are cast to the dtype of the reduction. Without `pending`, gradients that are
    quantised next are in the compute dtype instead.
    """
    parts = [
        None if slot is None or not spec.trainable[slot] else grads[slot] for _, slot in spec.pieces
    ]
    if any(part is not None and part.layout != torch.strided for part in parts):
        raise NotImplementedError(
            "a sharded parameter got a sparse gradient, and shardc reduces dense ones: call "
            "embedding and embedding_bag with sparse=False. Compiled, rows of a large table are "
            "fetched instead of gathering it (option 'embedding_rows')"
        )
    r = spec.reduction
    at_once = r.replicas is None and r.hierarchy is None
    quantised = r.wire is not None and at_once and r.sync and r.predivide == 1
    dtype = spec.compute_dtype if quantised and pending is None else _dtype_of_sum(spec)
    return torch.ops.shardc.pack(parts, [size for size, _ in spec.pieces], dtype, pending)


def _dtype_of_sum(spec: UnshardSpec) -> torch.dtype:
    return spec.reduction.dtype or spec.compute_dtype


def reduce(
    flat: Tensor, spec: UnshardSpec, partial: Tensor | None = None, segment: Tensor | None = None
) -> Tensor:
    """This rank's part of the reduced gradient: `flat: (W*S,)` -> `(S,)`, in the segment's dtype.

    With `all_reduce` off the gradient is reduced over this copy of the model only, and not divided
    by `postdivide`. A `segment` on the host must be given: the result is on its way there.
    """
    return _run(reducing(flat, spec, partial, segment))


def _run(steps: Steps) -> Tensor:
    arrived: Tensor = None  # type: ignore[assignment]
    try:
        while True:
            arrived = steps.send(arrived).wait()
    except StopIteration as done:
        return done.value


def reducing(
    flat: Tensor, spec: UnshardSpec, partial: Tensor | None = None, segment: Tensor | None = None
) -> Steps:
    """The steps of `reduce`."""
    r, world = spec.reduction, spec.world_size
    group = r.group or spec.group
    if r.predivide != 1:
        flat = flat / r.predivide
    if r.function is not None:
        part = object_of(r.function)(flat, r.op, world, group)
        custom_comm.check_result(part, flat.numel() // world, flat, "set_custom_reduce", r.function)
        started = Started(part, done=True)
    elif r.scatter is not None:
        custom = torch.ops.shardc.custom_reduce_scatter
        started = Started(custom(flat, r.op, world, group, r.scatter), done=True)
    elif r.hierarchy is not None:
        return (yield from _reducing_in_steps(flat, spec, partial, segment))
    elif r.wire is not None and r.replicas is None:
        dtype = _dtype_of_sum(spec)
        started = _start_quantised_reduce(flat, r.wire, r.op, world, group, dtype)
    elif r.memory is not None or world == 1:
        started = Started(torch.ops.shardc.reduce_scatter(flat, r.op, world, group, r.memory))
    else:
        started = collectives.start_reduce_scatter(flat, r.op, world, group)
    del flat
    part = yield started
    return (yield from _following(part, spec, partial, segment))


def _following(
    part: Tensor, spec: UnshardSpec, partial: Tensor | None, segment: Tensor | None
) -> Steps:
    """The steps that follow the reduction of `part` over one copy of the model."""
    r = spec.reduction
    if partial is not None:
        part = part + partial.to(part.device, part.dtype)
    if r.all_reduce:
        if r.replicas is not None:
            if r.wire is None:
                part = yield collectives.start_all_reduce(part, r.op, r.replicas)
            else:
                part = yield from _reducing_among_copies(part, r.wire, r)
        if r.hook is not None and not r.hook_sees_mean:
            part = torch.ops.shardc.call_hook(part, r.hook)
        if r.postdivide != 1:
            part = part / r.postdivide
        if r.hook is not None and r.hook_sees_mean:
            part = torch.ops.shardc.call_hook(part, r.hook)
    if spec.device is None:
        return part.to(spec.dtype)
    assert segment is not None
    return torch.ops.shardc.to_host(part, segment)


def _reducing_in_steps(
    flat: Tensor, spec: UnshardSpec, partial: Tensor | None, segment: Tensor | None
) -> Steps:
    """The steps of a reduction inside nodes, in full precision, then across nodes."""
    r, h = spec.reduction, spec.reduction.hierarchy
    assert h is not None
    started = collectives.start_reduce_scatter(flat, r.op, h.local, h.inside)
    del flat
    part = yield started
    if r.wire is None:
        started = collectives.start_reduce_scatter(part, r.op, h.nodes, h.across)
    else:
        started = _start_quantised_reduce(part, r.wire, r.op, h.nodes, h.across, part.dtype)
    del part
    return (yield from _following((yield started), spec, partial, segment))


def _start_quantised_reduce(
    flat: Tensor, form: WireFormat, op: str, ranks: int, group: str, dtype: torch.dtype
) -> Started:
    """Start to send every rank its part; the wait adds up the received parts in float32."""
    size = flat.numel() // ranks
    message = encode(flat.view(ranks, size), form).view(-1)
    started = collectives.start_all_to_all(message, ranks, group)

    def finish(raw: Tensor) -> Tensor:
        part = decode(raw.view(ranks, -1), size, form).sum(0)
        return (part / ranks if op == "avg" else part).to(dtype)

    return Started(started.raw, finish, started.done)


def _reducing_among_copies(part: Tensor, form: WireFormat, r: Reduction) -> Steps:
    """The steps of an all-reduce: every copy sums up its share, and sends the sum to all others."""
    assert r.replicas is not None
    size, row = part.numel(), form.row_of(part.numel(), r.copies)
    rows = torch.nn.functional.pad(part, (0, r.copies * row - size))
    share = yield _start_quantised_reduce(rows, form, r.op, r.copies, r.replicas, rows.dtype)
    message = encode(share.view(1, row), form).repeat(r.copies, 1).view(-1)
    started = collectives.start_all_to_all(message, r.copies, r.replicas)

    def finish(raw: Tensor) -> Tensor:
        return decode(raw.view(r.copies, -1), row, form, part.dtype).view(-1)[:size]

    return (yield Started(started.raw, finish, started.done))


class _Unshard(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward; their nodes carry the bucket as a fact."""

    @staticmethod
    def forward(
        ctx: compat.FunctionContext, segment: Tensor, moved: Moved, *extras: Tensor
    ) -> tuple[Tensor, ...]:
        spec = moved.spec
        given = dict(zip(spec.extras, extras, strict=True))
        ctx.moved = moved
        if spec.device is not None:
            given["segment"] = segment
        ctx.saved = [name for name in ("pending", "partial", "segment") if name in given]
        ctx.save_for_backward(*(given[name] for name in ctx.saved))
        ctx.set_materialize_grads(False)
        with annotate({"shardc": (moved,)}):
            full = given["full"] if spec.held else gather(segment, spec)
        ordered = full_parameters(full, spec)
        ctx.mark_non_differentiable(
            *(view for view, flag in zip(ordered, spec.trainable, strict=True) if not flag),
            *([full] if spec.kept else []),
        )
        return (*ordered, full) if spec.kept else ordered

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        spec = ctx.moved.spec
        added = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        with annotate({"shardc": (ctx.moved,)}):
            flat = pack_gradients(grads, spec, added.get("pending"))
            if not spec.reduction.sync:
                return None, None, *(flat if name == "sink" else None for name in spec.extras)
            part = reduce(flat, spec, added.get("partial"), added.get("segment"))
            return part, None, *(None for _ in spec.extras)


def look_up(segment: Tensor, ids: Tensor, moved: Moved, slot: int, padding: int) -> Tensor:
    """The rows `ids` of a parameter, as `embedding` gives them, without a gather of the bucket.

    No gradient flows to row `padding`; -1 for no such row.
    """
    return _LookUp.apply(segment, ids, moved, slot, padding)


class _LookUp(torch.autograd.Function):
    """Fetch rows in the forward, and send their gradients back in the backward."""

    @staticmethod
    def forward(
        ctx: compat.FunctionContext,
        segment: Tensor,
        ids: Tensor,
        moved: Moved,
        slot: int,
        padding: int,
    ) -> Tensor:
        spec = moved.spec
        ctx.moved, ctx.slot, ctx.padding = moved, slot, padding
        device = None if spec.device is None else torch.device(spec.device)
        table = spec.table(slot)
        with annotate({"shardc": (moved,)}):
            fetched = torch.ops.shardc.fetch_rows(
                segment, ids, spec.compute_dtype, device, spec.world_size, spec.group, *table
            )
            values, *found = map(collectives.ops.wait_tensor, fetched)
        given = [ids] if padding >= 0 else []
        ctx.save_for_backward(*found, *given, *([] if spec.device is None else [segment]))
        if not spec.trainable[slot]:
            ctx.mark_non_differentiable(values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        moved, slot, padding = ctx.moved, ctx.slot, ctx.padding
        spec, r = moved.spec, moved.spec.reduction
        places, asked, counts, *given = ctx.saved_tensors
        if padding >= 0:
            grad = grad.masked_fill((given[0] == padding).unsqueeze(-1), 0)
        segment = None if spec.device is None else given[-1]
        if r.predivide != 1:
            grad = grad / r.predivide
        with annotate({"shardc": (moved,)}):
            group, size = r.group or spec.group, spec.numel // spec.world_size
            part = collectives.ops.wait_tensor(
                torch.ops.shardc.return_rows(
                    grad.reshape(-1, grad.shape[-1]),
                    places,
                    asked,
                    counts,
                    _dtype_of_sum(spec),
                    spec.world_size,
                    group,
                    size,
                    *spec.table(slot),
                )
            )
            if r.op == "avg":
                part = part / spec.world_size
            part = _run(_following(part, spec, None, segment))
        return part, None, None, None, None


def recut(full: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's part of a gathered bucket among the `ranks` of `group`, as a copy."""
    size = full.numel() // ranks
    return full.narrow(0, compat.resolve_group(group).rank() * size, size).clone()


define_op(
    "recut(Tensor full, int ranks, str group) -> Tensor",
    recut,
    lambda full, ranks, _: full.new_empty(full.numel() // ranks),
)


_BY_ANOTHER_BACKEND = (
    "a sharded module is compiled by a backend that does not gather parameters, such as 'inductor' "
    "or 'eager': give module.compile() or torch.compile() backend='shardc', which lowers graphs by "
    "Inductor too, or leave the module uncompiled. A codebase may have the backend among its "
    "settings"
)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(_BY_ANOTHER_BACKEND)


def _no_backward(ctx: compat.FunctionContext, grad: Tensor) -> NoReturn:
    # AOT autograd, which asks for this backward, would have autograd print stacks beside the error.
    torch.autograd.set_detect_anomaly(False)
    raise RuntimeError(_BY_ANOTHER_BACKEND)


def _as_read(segment: Tensor, signature: str, slot: int, _: object) -> Tensor:
    """A full parameter without data."""
    spec = spec_of(signature)
    device = spec.device or segment.device
    full = segment.new_empty(spec.shapes[slot], dtype=spec.compute_dtype, device=device)
    return compat.as_parameter(full)


# Marks in a Dynamo graph: the read of one parameter of a bucket, for `insert_unshard`, and of the
# parameter at `marker`, for `take_gathered`. Slot `like` of the bucket has the parameter's shape.
for _schema in (
    "unshard_slot(Tensor segment, str signature, SymInt slot, Tensor[] extras) -> Tensor",
    "unshard_place(Tensor segment, str signature, SymInt like, Tensor marker) -> Tensor",
):
    define_op(_schema, _refuse, _as_read, _no_backward, (torch.Tag.pt2_compliant_tag,))


@compat.allow_in_graph
def unshard_extended(
    segment: Tensor, signature: str, slot: int, extras: Sequence[Tensor]
) -> Tensor:
    """Mark the read of a parameter with an extension: the mark runs the gather.

    The subclass of the full parameter is known only once the extension has run. While Dynamo
    traces, it runs on tensors without data.
    """
    spec = spec_of(signature)
    with torch.no_grad():
        return gather(segment.detach(), spec)
