"""What a call reads, and how a re-run sees it again: arguments, closures, modules, containers, random streams, settings.

Not here: what becomes of saved tensors (`engine`). Start from `call.capture_call`, `mutation.Watch` and `mutation.AsBefore`,
`ambient.capture`, `module_tree.Layout` and `decisions.Decisions`.
"""
