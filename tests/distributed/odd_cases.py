"""Cases of test_odd.py: unusual settings of the wrappers, under a plan and under a live budget, compared bit for bit with plain steps."""

import shutil
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layout_models import WIDTH, WORDS, Transformer, TransformerBlock, loss
from layouts import assert_equal, in_columns_and_rows, whole
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.errors import BudgetTooSmall, RetapeError
from support.forked import Case
from support.ranks import sharded

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Dropping(TransformerBlock):
    """A block with dropout before and after its collectives."""

    def body(self, x):
        x = x + nn.functional.dropout(self.attn(self.n1(x)), 0.2)
        return x + nn.functional.dropout(self.mlp(self.n2(x)), 0.2)


class TiedWords(Transformer):
    """The embedding's weights are those of the head."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.head.weight = self.emb.weight


class Unused(Transformer):
    """Has a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Skipping(Transformer):
    """Each rank leaves out another block in every second step, as layer dropping does."""

    steps = 0

    def forward(self, ids):
        x, self.steps = self.emb(ids), self.steps + torch.is_grad_enabled()
        for number, block in enumerate(self.blocks):
            if self.steps % 2 or number != dist.get_rank():
                x = block(x)
        return self.head(self.norm(x))


class EmptyExperts(nn.Module):
    """Experts on each rank; every row goes to the first rank, so that the others get none."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, dist.get_world_size()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, ranks = x.flatten(0, 1), dist.get_world_size()
        weights = self.router(rows).softmax(-1)
        sent = torch.zeros(ranks, dtype=torch.int64)
        sent[0] = len(rows)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        there = exchanged(rows, sent.tolist(), got.tolist())
        back = exchanged(torch.tanh(self.expert(there)), got.tolist(), sent.tolist())
        return (back * weights[:, :1]).view_as(x)


def exchanged(rows, sent, got):
    return collectives.all_to_all_single_autograd(rows, got, sent, dist.group.WORLD)


def seeded(kind=Transformer, **parts):
    torch.manual_seed(0)
    return kind(**parts)


def with_dropping(model):
    for block in model.blocks:
        block.__class__ = Dropping
    return model


def parallel_blocks(model):
    return in_columns_and_rows(model, init_device_mesh("cpu", (dist.get_world_size(),)))


MODELS = {
    "fsdp2 offload": lambda: sharded(seeded(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 mixed offload": lambda: sharded(
        seeded(), mp_policy=MIXED, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "fsdp2 tied": lambda: sharded(seeded(TiedWords)),
    "fsdp2 dropout": lambda: sharded(with_dropping(seeded())),
    "ddp static graph": lambda: DistributedDataParallel(seeded(), static_graph=True),
    "ddp unused": lambda: DistributedDataParallel(seeded(Unused), find_unused_parameters=True),
    "ddp skipping": lambda: DistributedDataParallel(seeded(Skipping), find_unused_parameters=True),
    "ddp tied": lambda: DistributedDataParallel(seeded(TiedWords)),
    "ddp views": lambda: DistributedDataParallel(seeded(), gradient_as_bucket_view=True),
    "tensor dropout": lambda: parallel_blocks(with_dropping(seeded())),
    "empty experts": lambda: seeded(mlp=EmptyExperts),
}


def steps(model, ids, *, synchronised=True):
    """Gradients of a step, and of one that accumulates without synchronisation at first."""
    torch.manual_seed(5)
    getattr(model, "module", model).steps = 0
    model.zero_grad()
    found = []
    for number in range(3):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number != 1)
            loss(model, ids).backward()
        elif isinstance(model, DistributedDataParallel) and number == 1:
            with model.no_sync():
                loss(model, ids).backward()
        else:
            loss(model, ids).backward()
        found += [whole(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    return found


def fitted_to(model, ids, share, **group):
    fit = partial(retape.fit, model, ids, step=loss, progress=False, **group)
    try:
        return fit(budget=1)
    except BudgetTooSmall as error:
        return fit(budget=int(share * error.floor_bytes))


def by_fit(model, ids, wanted):
    fit = fitted_to(model, ids, 1.1)
    assert_equal(steps(model, ids), wanted)
    assert fit.regions_run
    fit.remove()
    assert_equal(steps(model, ids), wanted)


def by_adaptive(model, ids, wanted):
    peak = retape.measure(lambda: steps(model, ids)).peak_bytes
    base = retape.measure(lambda: None).base_bytes
    live = retape.adaptive(model, budget=int(base + 0.7 * (peak - base)))
    for _ in range(4):
        assert_equal(steps(model, ids), wanted)
    assert live.stats().reruns
    live.remove()


WAYS = {"fit": by_fit, "adaptive": by_adaptive}


def end_of_case(name, way, rank):
    model = MODELS[name]()
    torch.manual_seed(0 if name.startswith("tensor") else rank)
    ids = torch.randint(0, WORDS, (8, 16))
    steps(model, ids)
    wanted = steps(model, ids)
    try:
        WAYS[way](model, ids, wanted)
    except RetapeError as error:
        return f"refused: {error}"
    return "right"


def without_gradients(rank):
    """A fit inside torch.no_grad."""
    model = DistributedDataParallel(seeded())
    ids = torch.randint(0, WORDS, (8, 16))
    wanted = steps(model, ids)
    try:
        with torch.no_grad():
            fitted_to(model, ids, 1.1)
    except RetapeError as error:
        assert_equal(steps(model, ids), wanted)
        return f"refused: {error}"
    return "not refused"


def other_world(rank):
    """A plan of two ranks on the world of four."""
    pair, found = dist.new_group([0, 1]), [None]
    model, ids = seeded(), torch.randint(0, WORDS, (8, 16))
    wanted = steps(model, ids)
    if rank < 2:
        made = fitted_to(model, ids, 1.1, group=pair)
        made.remove()
        found = [made.record]
    dist.broadcast_object_list(found)
    fit = retape.apply(model, found[0])
    assert_equal(steps(model, ids), wanted)
    return "right" if fit.regions_run else "plain"


def returns_early(rank):
    """Rank 1 has fewer batches than the other, and ends."""
    model, ids = DistributedDataParallel(seeded()), torch.randint(0, WORDS, (8, 16))
    fitted_to(model, ids, 1.1)
    for _ in range(2 if rank else 4):
        loss(model, ids).backward()


def saved_and_loaded(rank):
    """torch.distributed.checkpoint of a fitted FSDP2 model, also after a forward without a backward, into itself and into a plain one."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    ids = torch.randint(0, WORDS, (8, 16))
    for number, fit_to in enumerate(
        (partial(fitted_to, share=1.1), partial(retape.fit, step=loss, budget="1GiB", progress=False))
    ):
        model, fresh = sharded(seeded()), sharded(seeded())
        optimizer, other = (torch.optim.AdamW(each.parameters()) for each in (model, fresh))
        names = list(get_model_state_dict(model))
        fit_to(model, ids)
        loss(model, ids).backward()
        optimizer.step()
        loss(model, ids)  # weights of the plan with room stay gathered
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        assert list(state["model"]) == names
        dcp.save(state, checkpoint_id=f"{folder[0]}/{number}")
        saved = [whole(weight) for weight in optimizer.param_groups[0]["params"]]
        optimizer.zero_grad()
        wanted = steps(model, ids)
        optimizer.step()
        for each, its in ((model, optimizer), (fresh, other)):
            state = dict(zip(("model", "optimizer"), get_state_dict(each, its), strict=True))
            dcp.load(state, checkpoint_id=f"{folder[0]}/{number}")
            set_state_dict(each, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            assert_equal([whole(weight) for weight in its.param_groups[0]["params"]], saved)
            assert_equal(steps(each, ids), wanted)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return "right"


CASES = {f"{name}: {way}": Case(run=partial(end_of_case, name, way), timeout_s=120) for name in MODELS for way in WAYS}
CASES |= {
    "without gradients": Case(run=without_gradients, timeout_s=90),
    "other world": Case(run=other_world, ranks=4, timeout_s=90),
    "saved and loaded": Case(run=saved_and_loaded, timeout_s=90),
    "returns early": Case(run=returns_early, timeout_s=90),
}
