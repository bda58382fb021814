"""Findings: problems of a step in words, each with advice.

Each check is a function of the record (and of the record's profile) that yields findings. The
constants below are the thresholds of the checks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shardc.passes.estimate.cost import collective_seconds
from shardc.passes.estimate.hardware import Profile
from shardc.reports.if_hierarchical import if_hierarchical
from shardc.reports.if_quantised import FORM, if_quantised
from shardc.reports.record import BucketRow, CollectiveRow, Finding, Record
from shardc.runtime.checks.words import format_bytes, format_seconds, listed, plural, some

EXPOSED_SHARE = 0.03
"""Communication that adds less than this share to a step is not reported."""
PADDING_SHARE = 0.01
"""A bucket with more padding than this share is named."""
PADDING_OF_ALL = 1e-4
"""Padding of a bucket is not reported below this share of the bytes of all buckets."""
LESS_SHARE = 0.95
"""A cheaper way to communicate is reported if it leaves at most this share of the step."""
FIXED_SHARE = 0.5
"""A unit is small if more than this share of the time of its gather is fixed latency."""
LARGE_SHARE = 0.5
"""A unit is large if it has more than this share of all parameters, and is not the only unit."""


def find(record: Record, profile: Profile) -> tuple[Finding, ...]:
    """All findings, the costliest kinds first."""
    checks = [_memory(record, profile)]
    step = record.step_seconds
    if step and record.exposed_seconds >= EXPOSED_SHARE * step:
        checks += [_exposed(record), _wire_format(record, profile), _nodes(record, profile)]
    checks += [_units(record, profile), _padding(record)]
    return tuple(finding for check in checks for finding in check)


def find_breaks(reasons: Iterable[str]) -> Iterator[Finding]:
    """Findings about graph breaks, given Dynamo's reason for each break."""
    for reason, times in Counter(reasons).items():
        text = " ".join(reason.split())
        yield Finding(
            "graph break",
            f"the graph breaks {plural(times, 'time')}: {text[:400]}",
            "each piece is compiled and predicted by itself, and the runtime gathers its "
            "parameters, which this report does not count; torch.compile(..., fullgraph=True) "
            "shows where it happens, and so does TORCH_LOGS=graph_breaks",
        )


def find_recompiles(compiles: int) -> Iterator[Finding]:
    """A finding about a model that was compiled several times."""
    if compiles > 1:
        yield Finding(
            "recompiles",
            f"the model was compiled {plural(compiles, 'time')}; this is the last one",
            "TORCH_LOGS=recompiles says why; inputs of other shapes: torch.compile(dynamic=True) "
            "or padding; flags that are set between steps compile once a combination",
        )


def find_unused(names: Iterable[str]) -> Iterator[Finding]:
    """A finding about parameters that no graph reads."""
    names = list(names)
    if names:
        yield Finding(
            "unused parameters",
            f"{plural(len(names), 'parameter')} never used: {some(names, 5)}",
            "they are kept, and gathered with their unit, for nothing: remove them, freeze them, "
            "or give them to fully_shard(ignored_params=...)",
        )


def find_gathered(counts: Mapping[str, int]) -> Iterator[Finding]:
    """A finding about ops that gathered sharded parameters; `counts` says how often each op did."""
    if counts:
        times = {1: "once", 2: "twice"}
        each = [
            f"{name} {times.get(n, plural(n, 'time'))}" for name, n in Counter(counts).most_common()
        ]
        yield Finding(
            "gathered for an op",
            f"outside of forwards and backwards, ops gathered whole parameters: {some(each, 3)}",
            "TORCH_LOGS=+shardc says where, shardc.strict(True) refuses such ops; for an optimizer "
            "take shardc.WholeTensorOptimizer",
        )


def _memory(record: Record, profile: Profile) -> Iterator[Finding]:
    if not record.memory:
        return
    peak = record.peak
    if peak.total > profile.memory:
        yield Finding(
            "memory",
            f"the step needs {format_bytes(peak.total)} on each rank, and a device of "
            f"{profile.name} has {format_bytes(profile.memory)}",
            "more ranks, a smaller batch, activation checkpointing, param_dtype=bfloat16, "
            "CPU offload, or smaller units (see what the peak is made of)",
        )


def _exposed(record: Record) -> Iterator[Finding]:
    step, exposed = record.step_seconds, record.exposed_seconds
    worst = max(record.collectives, key=lambda c: c.exposed)
    gathers = [c for c in record.collectives if c.phase == worst.phase and c.brings_parameters]
    reductions = [c for c in record.collectives if not c.brings_parameters]
    what = (
        f"communication adds {format_seconds(exposed)} to the step ({exposed / step:.0%}); "
        f"the largest part of it, {format_seconds(worst.exposed)} ({worst.exposed / exposed:.0%}), "
        f"is {_words(worst)}"
    )
    if record.wire_seconds > record.compute_seconds:
        advice = (
            f"the wire ({format_seconds(record.wire_seconds)}) needs longer than compute "
            f"({format_seconds(record.compute_seconds)}): {', '.join(_less_wire(record))}"
        )
    elif worst in gathers[:2]:
        advice = (
            "nothing can be computed before the first gather of a phase: make it smaller, with a "
            "unit of its own for the modules that run first"
        )
    elif worst in reductions[-2:]:
        advice = (
            "nothing is left to compute behind the last reduction: make it smaller, with a unit "
            "of its own for the first modules of the model"
        )
    else:
        advice = (
            "it starts too late or too much is queued before it: more memory for gathers ahead "
            "(options={'prefetch': n}), or smaller units"
        )
    yield Finding("exposed communication", what, advice)


def _wire_format(record: Record, profile: Profile) -> Iterator[Finding]:
    """A finding where messages of one byte an element would shorten the step."""
    step = record.step_seconds
    ways = {
        ("parameters and gradients", _BOTH): if_quantised(record, profile),
        ("parameters", _GATHERS): if_quantised(record, profile, reduced=False),
    }
    times = {way: told.step_seconds for way, told in ways.items() if told is not None}
    if not times or min(times.values()) > LESS_SHARE * step:
        return
    what, fields = min(times, key=times.__getitem__)
    quantised = ways[what, fields]
    assert quantised is not None
    yield Finding(
        "wire format",
        f"in int8, {what} would send {format_bytes(quantised.sent_bytes)} "
        f"instead of {format_bytes(record.sent_bytes)}, and the step would take about "
        f"{format_seconds(quantised.step_seconds)} instead of {format_seconds(step)}",
        f"MixedPrecisionPolicy({fields}): a value arrives off by at most {FORM.error:.2%} of "
        f"the largest value of its block of {FORM.block}, so compare the loss of a run",
    )


def _nodes(record: Record, profile: Profile) -> Iterator[Finding]:
    """A finding where collectives in two steps would make the step shorter."""
    step = record.step_seconds
    hierarchical = if_hierarchical(record, profile)
    if hierarchical is not None and hierarchical <= LESS_SHARE * step:
        yield Finding(
            "many ranks",
            f"rings over {plural(record.world_size, 'rank')} pay for each of them; across nodes "
            "first, then inside of each, the step would take about "
            f"{format_seconds(hierarchical)} instead of {format_seconds(step)}",
            "fully_shard(mesh=shardc.hierarchical_mesh())",
        )


_GATHERS = "gather_wire_dtype=torch.int8"
_BOTH = f"{_GATHERS}, reduce_wire_dtype=torch.int8"


def _less_wire(record: Record) -> Iterator[str]:
    """Changes that make the wire's share of the step smaller and are not made yet."""
    yield "more tokens a rank"
    if any(bucket.gathered_dtype == "float32" for bucket in record.buckets):
        yield "param_dtype=bfloat16"
    if any(bucket.reshard for bucket in record.buckets):
        yield "reshard_after_forward=False where memory allows"
    if record.copies == 1:
        yield "HSDP (a mesh of two dims), which keeps gathers inside a node"


def _words(collective: CollectiveRow) -> str:
    kind = collective.kind.replace("_", "-")
    return f"the {kind} of {listed(collective.buckets)} in the {collective.phase}"


def _units(record: Record, profile: Profile) -> Iterator[Finding]:
    units: dict[str, list[BucketRow]] = {}
    for bucket in record.buckets:
        units.setdefault(bucket.unit, []).append(bucket)
    sizes = {name: sum(b.nbytes for b in buckets) for name, buckets in units.items()}
    total, world = sum(sizes.values()), record.world_size
    if world == 1 or not total:
        return
    fixed = collective_seconds(0, world, profile)
    small = [
        name
        for name, size in sizes.items()
        if size and fixed > FIXED_SHARE * collective_seconds(size, world, profile)
    ]
    if len(small) > 1:
        yield Finding(
            "small units",
            f"{plural(len(small), 'unit')} so small that a gather is mostly latency "
            f"({format_seconds(fixed)} of it is fixed latency): {some(small, 3)}",
            "put several blocks into one unit: fully_shard([a, b]), or units= of a larger class",
        )
    large = [name for name, size in sizes.items() if size > LARGE_SHARE * total]
    if large and len(sizes) > 1:
        yield Finding(
            "large unit",
            f"{large[0]} has {sizes[large[0]] / total:.0%} of all parameters "
            f"({format_bytes(sizes[large[0]])} gathered at once)",
            "make units of the modules in it: fully_shard(inner), or units= of a smaller class",
        )
    elif len(sizes) == 1 and record.buckets and record.buckets[0].tensors > 8:
        yield Finding(
            "large unit",
            f"the whole model is one unit: {format_bytes(total)} are gathered at once",
            'make units of its blocks: units="auto", or units= of their class',
        )


def _padding(record: Record) -> Iterator[Finding]:
    least = PADDING_OF_ALL * sum(bucket.nbytes for bucket in record.buckets)
    padded = [
        bucket
        for bucket in record.buckets
        if bucket.padding > PADDING_SHARE and bucket.padding * bucket.nbytes > least
    ]
    if padded:
        worst = max(padded, key=lambda bucket: bucket.padding)
        yield Finding(
            "padding",
            f"{plural(len(padded), 'bucket')} with more than {PADDING_SHARE:.0%} padding, the "
            f"worst {worst.name} with {worst.padding:.1%}: {some([b.name for b in padded], 3)}",
            "small parameters over many ranks: put them into a larger unit, shard over fewer "
            "ranks (HSDP), or leave them alone (ignored_params=)",
        )
