"""`scan` and `while_loop`: long loops with few snapshots, by binomial, mixed, multistage and online schedules.

Start from `scan.scan`, `plan`, `run`, `snapshots` and `resume`.
"""
