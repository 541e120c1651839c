"""Code that tests share. Look here before defining a helper in a test file.

`comparing`: one case run plainly and as a region (`same_as_plain`, `refuses`, `every_way`; the decorators `equals_plain` and
    `equals_plain_every_way`; makers of cases: `altered`, a change between forward and backward, and `steps_of`, steps of one module),
    trees of tensors compared bit for bit (`equal`, `assert_equal`), steps (`loss_and_gradients(model, loss)`,
    `parameter_gradients(model)`), `seed`, `leaf`, `Notes`.
`blocks`: modules without Transformers: `MlpBlock`, `TiledMlpBlock`, `Stack`, `seeded_stack`;
    `mean_square(x)` is a loss, `square(model, batch)` a step with it.
`models`: a small model of each of many architectures with a batch; `small_llama`, `small_gpt2`, ... take settings of their
    configurations; `token_batch(length)` and the step `own_loss(model, batch)` are for all of Transformers.
`changing`: models whose steps differ (lengths, trees, experts, depth).
`regions`: `trace_region(function, *inputs)`.
`ops`: dispatch modes: `OpLog` (names of the ops that ran), `FailingOp` (out of memory at the n-th op), `LargestTensor`.
`memory`: `step_peak_bytes(action)`, `FakeMeter` (a MemoryTracker with given readings). `ledger`: `Ledger` (live bytes counted by ops).
`clocks`: `FakeClock` (advanced by the test), `OpClock` (advances with every op).
`forked`: ranks over gloo, forks of one process: `run_script(script, names)`, `ScriptCases(script, names)`, `raised_by_all`,
    `returned_by_all`.
`ranks`: cases that the same ranks run one after the other (`in_order(cases)`), and `sharded(model)`, FSDP2 around its blocks.
`hosts`: memory of the test's own for moved tensors (`host_memory`, `copies_through`), files of a host.
`loops`, `ode_cases`, `late_copies`, `report_page`, `warm_python`: for the tests of one package each, and hazards about it.

Every test starts with all random streams seeded with 0 (`tests/conftest.py`), so a fixture for that is not needed.
"""
