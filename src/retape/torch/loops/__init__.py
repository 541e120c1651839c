"""Loops with exact gradients in the memory of a few snapshots and one block: `scan` and `while_loop`.

Binomial, mixed, multistage and online schedules of `retape.core.schedules` decide which states are stored and which steps are run
again. Solving differential equations on top of `while_loop` is in `retape.torch.ode`.

Start from `scan.scan` and `scan.while_loop` (entry points), `driver.Driver` (runs a schedule), `step.Body` (runs steps),
`side_state.SideState` (state that steps keep outside the carry) and `snapshots.TierStore` (device, host and disk).
"""

__all__ = ["captured_tensors", "driver", "plan", "resume", "scan", "side_state", "snapshots", "state", "step"]
