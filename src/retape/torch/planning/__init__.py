"""From a model, a batch and a budget to an attached, measured plan.

The steps: `discover` finds regions, `profile` runs and times them, `chain` turns that into a problem for the solver, `variants` are
other ways to run a region, `fitting` searches, `executor` runs the plan on the modules that `attach` has attached.
"""
