"""Thresholds of planning, each with its unit and its reason, as one frozen value. Tests hand in another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTuning:
    """Thresholds of profiling, of the options of a region and of the search. Shares are fractions of 1."""

    # --- profile ---
    traces: int = 3  # runs per kind of region; the shortest time of each op counts
    most_traces: int = 9  # runs per kind, on a CPU, where other processes disturb the clock
    extra_trace_seconds: float = 0.5  # spent on runs beyond `traces`, for all kinds together
    timed_steps: int = 2  # the shortest counts
    late_free_steps: int = 3  # tracked beyond the first on a CPU with other ranks: in one step of five a thread of gloo frees a tensor late
    few_calls_per_kind: int = (
        4  # with fewer calls of a kind in a step, one disturbed call changes its figures: time twice as often
    )
    long_step_seconds: float = 1.5  # a step this long is timed once: disturbances are short beside it

    # --- regions by bytes ---
    region_bytes: int = (
        8192  # of a region beside its inputs (states of generators); less than that saved makes no region
    )
    cover_tolerance: float = 0.005  # of the predicted floor: regions within it are as good as the best

    # --- chain ---
    ignored_glue_bytes: int = (
        8192  # saved between two regions without making a stage of its own: rounding of allocators
    )
    slack_share: float = 0.003  # of all activations, put aside: allocator rounding, and frees that come a moment later
    latest_forwards: int = 2  # an input's copy to the host may take this many forwards before the device waits for it

    # --- options of a region ---
    small_storage_parts: int = (
        64  # a storage below 1/64 of a small tape is not moved: the copy costs more than it frees
    )
    small_storage_bytes: int = (
        2**20
    )  # nor one below this of a large tape: small copies free little (chosen, not measured)
    most_graph_ops: int = 600  # of a region's op graph that is solved as it is; in a larger one small ops are joined
    graph_groups: int = 200  # ops that are left then: far fewer than above, because what they take is not exact anyway
    offload_shares: tuple[float, ...] = (
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.0,
    )  # of the bytes that the computation hides: how much of a region is moved
    most_offload_options: int = (
        48  # per region: the solver's time grows with each (1.3 s for 32 blocks with 100 options)
    )
    saved_shares: tuple[float, ...] = (
        0.0,
        0.5,
        0.22,
        0.7,
        0.08,
        0.4,
        0.15,
        0.6,
        0.3,
    )  # of a block's tape: its compiled variants, in the order in which they are built
    enough_speed: float = 1.01  # times the seconds of keeping everything: a plan within it needs no further variant
    tiled_shares: tuple[float, ...] = (0.15,)  # of those, the ones that are tried with parts in tiles too
    variant_tiles: tuple[int, ...] = (2, 4)  # slices of a part inside a compiled variant
    tiles: tuple[int, ...] = (2, 4, 8, 16, 32)  # slices of a part of an eager region
    tiles_for_longer: tuple[int, ...] = (
        2,
        4,
        8,
    )  # measured at lengths from which a longer batch is planned: its tiles grow with it
    tile_gain: float = 0.96  # of the peak with half as many slices: twice as many must be below it
    probed_rows: int = 32  # rows on which a part is asked whether it treats rows independently

    # --- search ---
    most_corrections: int = 4  # plans that are measured, each corrected by the measurement of the last
    floor_tolerance: float = (
        0.02  # by which a predicted floor may be wrong: below it by less, the floor plan is measured
    )
    peak_tolerance: float = 0.02  # of the peak: a prediction that is off by more is corrected
    long_step_peak_tolerance: float = 0.05  # the same where a step is long, and each measurement costs one
    out_of_memory_parts: int = 20  # after running out of memory the next plan takes 1/20 less
    min_gain: float = 0.995  # of the best plan's seconds: one that promises no less is not measured

    # --- comparing two plans by the clock ---
    compared_seconds: float = 3.5  # spent on running two plans alternately
    fewest_turns: int = 4  # fewer do not tell a difference from noise
    most_turns: int = 6
    late_share: float = 1.04  # times the promised seconds: a plan that takes longer leaves something out of its figures
    may_be_faster: float = 1.1  # times the promised seconds of a plan: one that promises more is not compared with it
    clearly_faster: float = 0.985  # of the other's seconds: by more than two runs of the same plan differ
    equal_promises: float = 1.04  # times the other's promise: no model of a step is more exact

    # --- updates in backward ---
    gradient_bucket_bytes: int = (
        64 * 2**20
    )  # of complete gradients that are used together: small weights then need few steps of the optimizer

    # --- executor ---
    most_shapes: int = 512  # input shapes whose recipes are kept; the least recently used goes first
    most_region_traces: int = (
        2  # per region and shape: a rejected recipe is made once more, from a trace of that very region
    )


TUNING = PlanningTuning()
