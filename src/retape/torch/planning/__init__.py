"""From a model, a batch and a budget to an attached, measured plan.

`discover` finds the regions, `step_trials` runs steps of the model (`profiles` measures what each region takes), `chain_builder` makes the
solver's problem from that with the options of `region_options`, `plan_search` looks for the fastest plan that a real step confirms,
and `executor` runs it on the modules that `attach` has attached. `region_variants` are compiled and sliced versions of a region;
`plan_cache` keeps plans on disk.

Not here: the solver (`retape.core`), the engine that holds and recomputes (`retape.torch.engine`), budgets that are enforced while a
step runs (`retape.torch.adaptive`). Start from `plan_search.PlanSearch`, `step_trials.StepTrials`, `chain_builder.build_chain`,
`executor.Executor` and `tuning.PlanningTuning`.
"""

__all__ = [
    "attach",
    "candidates",
    "chain_builder",
    "discover",
    "executor",
    "instruments",
    "plan_cache",
    "plan_search",
    "profiles",
    "region_options",
    "region_variants",
    "step_trials",
    "tuning",
]
