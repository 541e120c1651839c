"""Stages and options of chains in one line each: sizes first, then seconds."""

from retape.core.problem import Chain, Option, Stage


def stage(state, tape, forward=1.0, backward=1.0, **more):
    return Stage(state_bytes=state, tape_bytes=tape, forward_seconds=forward, backward_seconds=backward, **more)


def option(kind, held, forward=1.0, backward=1.0, **more):
    return Option(kind=kind, held_bytes=held, forward_seconds=forward, backward_seconds=backward, **more)


def chain_of(*sizes):
    """A chain of stages of one second each way, with these bytes of states and tapes."""
    return Chain(stages=tuple(stage(*each) for each in sizes))
