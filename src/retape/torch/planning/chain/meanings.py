"""What the stages of a modelled chain stand for, as frozen values: which call of which module, and what each option asks of it."""

from __future__ import annotations

from retape.core.assignment import Choice, StageMeaning
from retape.torch.capture.signature import elements, shapes
from retape.torch.planning.chain.modelling import Modelled
from retape.torch.planning.profile import Profile


def meanings_of(profile: Profile, modelled: Modelled) -> tuple[StageMeaning, ...]:
    """For each stage of the chain."""
    kinds = {kind: number for number, kind in enumerate(profile.traces)}
    found = []
    for stage, about in zip(modelled.chain.stages, modelled.stages, strict=True):
        if about.region is None:
            found.append(StageMeaning(choice=None))
            continue
        call = profile.calls[about.region]
        trace = profile.traces[call.kind]
        choice = Choice(
            name=call.name,
            root_call=call.root_call,
            call=call.call,
            kind=kinds[call.kind],
            slots=len(trace.slots) if trace is not None else 0,
            elements=elements(call.inputs),
            shapes=shapes(call.inputs),
            training=call.training,
        )
        held = tuple(tuple(sorted(slots or ())) for slots in about.held)
        moved = tuple(tuple(sorted(slots)) for slots in about.moved)
        inputs = tuple(tuple(sorted(tensors)) for tensors in about.moved_inputs)
        kinds_of_choices = tuple(option.kind for option in stage.choices)
        found.append(
            StageMeaning(
                choice=choice,
                held=held,
                moved=moved,
                moved_inputs=inputs,
                tiles=about.tiles,
                tiled=about.tiled,
                kinds=kinds_of_choices,
                saved_shares=about.saved_shares,
            )
        )
    return tuple(found)
