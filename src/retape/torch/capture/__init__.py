"""What a call reads, and how a re-run sees it again.

Not here: what becomes of saved tensors (`engine`). Start from `call.capture_call`, `snapshot.Snapshot`, `rng.capture`,
`ambient.RestoredAmbient` and `mutation.version_of`.
"""
