"""Options of `torch.compile(..., backend="shardc", options={...})`, checked."""

import difflib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from shardc.passes.estimate.hardware import (
    Amount,
    Profile,
    as_profile,
    budget_bytes,
    current_profile,
    host_bytes,
)
from shardc.runtime import compat
from shardc.runtime.checks.arguments import Must, NotNegative, check_value, hints_of

Seconds = Annotated[float, Must("a positive number of seconds", lambda s: 0 < s < math.inf)]
InductorSettings = Annotated[dict[str, Any], Must("a dict of settings of torch._inductor.config")]
Units = Annotated[int, Must("a count of units", lambda count: count >= 0)]


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(..., backend="shardc", options={...})`.

    Attributes:
        executor: `"inductor"` compiles the graphs; `"eager"` runs them op by op.
        fallback: whether a graph that Inductor cannot compile runs op by op, with a warning.
        fold: whether AOT autograd traces repeated blocks once (in `explain` Dynamo too), and
            Inductor compiles the repeated parts of their graphs once. Graphs with symbolic sizes
            are never folded. For CUDA graphs, only the trace is done once.
        inductor: a dict of settings of `torch._inductor.config` for this compile. The user's passes
            over joint graphs run before the passes of shardc, and a pass before fusion runs after
            them. Settings that move or merge collectives (`reorder_for_peak_memory`,
            `bucket_all_gathers_fx`, ...), or leave out passes over joint graphs, are refused.
        schedule: `False` leaves collectives where they are used.
        profile: the hardware to plan for: a name such as `"h100-nvlink"`, or a `Profile`; `None`:
            the profile that `calibrate` or `set_profile` set, else the device's profile.
        prefetch: how many units ahead gathers start (0: none); `"auto"` leaves it to the cost
            model.
        backward_prefetch: FSDP1's setting, for the backward: `"pre"`, `"post"` or `None`; `"auto"`
            leaves it to the cost model.
        coalesce: whether small collectives may travel in one message; `None`: yes, except on gloo,
            which copies them for this.
        embedding_rows: whether embeddings fetch the rows that they look up, and send gradients of
            rows back, in place of gathering and reducing whole tables: `"auto"`, where the profile
            says that rows take less than half of the time; `True`, wherever it is possible.
        keep_read_first: whether the bucket that the backward reads first stays gathered, if its
            gather would lie open and the step peaks no higher with it. Only graphs that contain the
            loss keep one, of a unit whose `reshard_after_forward` is `None`.
        memory_budget: bytes that a step may use on this device, segments, gradients and optimizer
            state included: a count, a text such as `"70GB"` or `"16GiB"`, or a fraction of the
            device's memory. The fastest step that fits is chosen: its buckets that stay gathered
            (of units whose `reshard_after_forward` is `None`), its values that are computed again
            or saved on the host, and its units whose optimizer state waits on the host.
        offload_activations: whether a memory budget may save values of the forward on the host (in
            pinned memory); never on CPUs, nor where CUDA graphs are replayed.
        offload_optimizer_state: whether a memory budget may let the optimizer's state of some units
            wait on the host (in pinned memory) while forward and backward run; never on CPUs, nor
            where CUDA graphs are replayed.
        host_memory: bytes of the host's memory that a memory budget may use for this rank, given as
            for `memory_budget`. A fraction is one of the rank's share of the memory of the machine,
            or of the container. `None`: 0.8, and no bound where the plan is for another machine.
        optimizer_states: how many copies of the parameters the optimizer keeps, for the budget
            (2: Adam).
        agreement_timeout: seconds to wait for other ranks when they compare their collectives;
            `None`: the process group's timeout.
    """

    executor: Literal["inductor", "eager"] = "inductor"
    fallback: bool = True
    fold: bool = True
    inductor: InductorSettings = field(default_factory=dict)
    schedule: bool = True
    profile: Profile | str | None = None
    prefetch: Literal["auto"] | Units = "auto"
    backward_prefetch: Literal["auto", "pre", "post"] | None = "auto"
    coalesce: bool | None = None
    embedding_rows: Literal["auto"] | bool = "auto"
    keep_read_first: bool = False
    memory_budget: Amount | None = None
    offload_activations: bool = True
    offload_optimizer_state: bool = True
    host_memory: Amount | None = None
    optimizer_states: NotNegative = 2.0
    agreement_timeout: Seconds | None = None

    @staticmethod
    def parse(given: dict[str, Any] | None) -> "Options":
        """Make options from a user's dict, checked.

        Raises:
            ValueError: an unknown option, or an unknown choice of an option.
            TypeError: a value of another type.
        """
        check_value("options", given, dict | None)
        given, hints = given or {}, hints_of(Options)
        check_known(given, [f.name for f in fields(Options)], "shardc option")
        for name, value in given.items():
            check_value(f"option '{name}'", value, hints[name])
        options = Options(**given)
        if options.inductor:
            settings = compat.inductor_settings()
            check_known(options.inductor, settings, "setting of torch._inductor.config")
            _check_order(options.inductor)
        profile = as_profile(options.profile) if options.profile is not None else None
        if options.keep_read_first and (options.memory_budget is not None or not options.schedule):
            raise ValueError(
                "keep_read_first=True needs schedule=True and no memory_budget, which chooses the "
                "buckets that stay gathered by itself: leave it out"
            )
        if options.memory_budget is not None:
            if not options.schedule:
                raise ValueError(
                    f"memory_budget={options.memory_budget!r} needs schedule=True, not "
                    f"{options.schedule!r}: the budget is kept by the schedule"
                )
            budget_bytes(options.memory_budget, profile or current_profile("cpu"))
        if options.host_memory is not None:
            host_bytes(options.host_memory)
        return options


def _check_order(inductor: dict[str, Any]) -> None:
    """Raise ValueError where a setting of Inductor would undo the plan."""
    for name, value in compat.order_settings().items():
        if inductor.get(name, value) != value:
            raise ValueError(
                f"options={{'inductor': {{'{name}': {inductor[name]!r}}}}} would have Inductor "
                "leave out the passes of shardc, or move or merge the collectives that all ranks "
                f"have agreed on: leave it at {value!r}. shardc's own options for this are "
                "'prefetch', 'coalesce' and 'profile'"
            )


def check_known(given: Iterable[Any], known: Collection[str], what: str) -> None:
    """Raise ValueError for a name in `given` that is not `known`, with the closest known name."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            listed = f" (known: {', '.join(known)})" if len(known) < 20 else ""
            raise ValueError(f"unknown {what} {name!r}{hint}{listed}")
