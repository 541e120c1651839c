"""`odeint`: ordinary differential equations, discretised and then differentiated, in the memory of a few snapshots.

The loop with snapshots is `retape.torch.loops.scan.while_loop`; coefficients of methods are in `retape.core.tableaux`.

Start from `odeint.odeint` (entry point), `odeint.integrate` (also returns the steps taken), `steps.adaptive_stages` (one step),
`control.Control` (step sizes) and `states.LoopRows` (outputs and their gradients).
"""

__all__ = ["control", "odeint", "states", "steps"]
