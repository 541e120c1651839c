"""Several processes that fit, apply or measure one model together: who they are, what they agree on, and how they fail together.

`members.ranks_of` finds the ranks that share a model and opens a `ranks.Ranks`: `AloneRanks` (this process) or `together.Together`
(several). `agreed` and `attempt` of a `Ranks` are the whole protocol; `watcher` notices ranks that failed or were killed while this one
waits in a collective of the model. After a fit, `steps.StepWatch` does the same for training steps. What unequal budgets mean for one
plan is in `limits`; which inputs are equal on all ranks of a tensor-parallel group, in `replicas`. Values travel through the store of
the process group (`channel`), never through its collectives.

Not here: the questions themselves (planning), private names of PyTorch (`compat.process_internals`).
"""

__all__ = ["channel", "limits", "members", "ranks", "replicas", "steps", "together", "tuning", "watcher"]
