"""fit(compile=True): blocks compiled once per saved set, and a plan that chooses among them."""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import retape
from retape import Budget
from retape.torch.capture.call import capture_call
from retape.torch.capture.functions import CompiledCall
from retape.torch.compat.compiler_internals import compiler_is_on
from retape.torch.engine.region import Region
from retape.torch.planning import attach
from retape.torch.planning.attach import original_class
from retape.torch.planning.region_options import tape_storages
from retape.torch.planning.region_variants import VARIANTS
from support.comparing import Notes, assert_equal, seed, step_gradients
from support.fits import regions_run
from support.trials import fit_with

# torch's own: its compiler uses deprecated names, and reads .grad of every input.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BLOCKS, WIDTH, ROWS = 8, 32, 512
FORMS: dict = {}  # of this file: what is compiled once need not be compiled for each test
FEW = {"saved_shares": (0.5, 0.0), "tiled_shares": ()}  # thresholds: few variants


def partitioned(share):
    """The partitioner that inductor uses, without its kernels, which take minutes to make here."""
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition)

    def run(graph, inputs, **keywords):
        with config.patch(activation_memory_budget=share):
            return backend(graph, inputs, **keywords)

    return run


@contextmanager
def compiling(backend, forms):
    """Let this backend make the variants of the process, and keep them in `forms`."""
    before = VARIANTS.backend, VARIANTS.variants
    VARIANTS.backend, VARIANTS.variants = backend, forms
    try:
        yield forms
    finally:
        VARIANTS.backend, VARIANTS.variants = before


@pytest.fixture(autouse=True)
def quick_compiler():
    with compiling(partitioned, FORMS):
        yield


@pytest.fixture
def fresh_forms():
    with compiling(partitioned, {}) as forms:
        yield forms


class NumberedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.number = nn.LayerNorm(width), 0
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return (x + self.down(torch.tanh(self.up(torch.sin(self.norm(x)))))) * (1 + self.number / 64)


class Stack(nn.Module):
    def __init__(self, blocks=BLOCKS, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(NumberedBlock(width) for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def made(rows=ROWS):
    seed()
    return Stack(), torch.randn(rows, WIDTH)


def fit_compiled(model, batch, budget, **about):
    return fit_with(model, (batch,), budget=budget, **{"compile": True, "tuning": FEW, **about})


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.5])
def test_compiled_blocks_inside_a_budget(budget):
    model, batch = made()
    wanted = step_gradients(model, batch)
    fit = fit_compiled(model, batch, budget)
    assert all(choice.saved_share is not None for choice in fit.record.assignment.choices)
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    for found, plain in zip(step_gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-7)
    assert retape.verify(model, (batch,)).equal  # with itself, nothing held or dropped by regions
    fit.remove()
    assert_equal(step_gradients(model, batch), wanted)
    assert all(type(block) is NumberedBlock for block in model.blocks)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.Tanh(), nn.Linear(16 * WIDTH, WIDTH))


class Wide(nn.Module):
    """Two parts that treat rows independently."""

    def __init__(self):
        super().__init__()
        self.mix, self.mlp = mlp(), mlp()

    def forward(self, x):
        return x + self.mlp(torch.sin(self.mix(x)))


def wide():
    seed()
    model = Stack(blocks=2)
    model.blocks = nn.ModuleList(Wide() for _ in range(2))
    return model, torch.randn(ROWS, WIDTH)


def floor_bytes(options, **keywords):
    model, batch = wide()
    with pytest.raises(retape.errors.BudgetTooSmall) as caught:
        fit_compiled(model, batch, Budget.activations(4096), options=options, **keywords)
    return caught.value.floor_bytes


def test_compiled_blocks_that_do_not_fit_are_taken_apart():
    in_blocks, in_parts = floor_bytes("exact", regions=[Wide]), floor_bytes("exact")
    assert in_parts < in_blocks
    model, batch = wide()
    wanted = step_gradients(model, batch)
    fit = fit_compiled(model, batch, (in_parts + in_blocks) // 2)
    assert {choice.name for choice in fit.record.assignment.choices} >= {"blocks.0.mix", "blocks.0.mlp"}
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    for found, plain in zip(step_gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("compiles", [True, False])
def test_compiled_blocks_that_do_not_fit_run_in_tiles(compiles):
    tuning = {**FEW, "tiles": (4,), "variant_tiles": (4,), "tiled_shares": (0.5,) if compiles else ()}
    about = {"regions": [Wide], "tuning": tuning}
    whole, tiled = floor_bytes("exact", **about), floor_bytes("all", **about)
    assert tiled < 0.7 * whole
    model, batch = wide()
    wanted = step_gradients(model, batch)
    budget = (tiled + whole) // 2
    fit = fit_compiled(model, batch, budget, options="all", **about)
    forms = {(choice.tiles, choice.saved_share) for choice in fit.record.assignment.choices}
    assert max(forms)[0] > 1
    # Tiles of an eager block are an option too; which is faster without kernels of its own is a matter of the machine's load.
    assert all((share is None) <= (tiles > 1) for tiles, share in forms)
    assert compiles or all((share is None) == (tiles > 1) for tiles, share in forms)
    assert fit.measured.peak_bytes <= budget
    found = step_gradients(model, batch)
    for one, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-7)
    fit.remove()
    again = retape.apply(model, fit.record)
    assert_equal(step_gradients(model, batch), found)
    again.remove()
    assert all(type(block.mlp) is nn.Sequential for block in model.blocks)


class Picky(nn.Module):
    """Treats the rows of short inputs independently, and those of longer ones not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        if x.shape[-2] > 64:
            x = x - x.mean(-2, keepdim=True)
        return self.down(torch.tanh(self.up(x)))


def test_parts_that_cannot_run_in_tiles_after_all_are_taken_apart():
    about = {"options": "all", "tuning": {**FEW, "tiles": (4,), "tiled_shares": (0.5,)}}
    model, batch = wide()
    for block in model.blocks:
        block.mlp = Picky()
    wanted = step_gradients(model, batch)
    with pytest.raises(retape.errors.BudgetTooSmall) as caught:
        fit_compiled(model, batch, Budget.activations(4096), **about)
    budget = int(1.02 * caught.value.floor_bytes)
    fit = fit_compiled(model, batch, budget, **about)
    assert {choice.name for choice in fit.record.assignment.choices} >= {"blocks.0.mix", "blocks.0.mlp"}
    for one, plain in zip(step_gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-7)


def test_each_form_saves_another_part():
    model, batch = made()
    sizes = [taped(model.blocks[0], batch, share) for share in (1.0, 0.5, 0.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def taped(block, batch, share):
    """The bytes of a form's tape."""
    return sum(tape_storages(traced(block, batch, share)).values())


def traced(block, batch, share):
    call = CompiledCall(block, VARIANTS.variant_of(type(block), block, share))
    x = batch.clone().requires_grad_()
    region = Region(capture_call(call, (x,), {}))
    region.run(call, (x,), {})
    trace = region.trace()
    assert len(trace.slots) == region.slot_count
    return trace


def test_a_form_compiles_once_for_all_blocks(fresh_forms):
    model, batch = made()
    fit_compiled(model, batch, 0.6, tuning={**FEW, "enough_speed": 0.0})
    assert [form.compilations for form in fresh_forms.values()] == [1, 1, 1]


def test_the_trace_of_a_compiled_block_is_one_op_with_all_its_slots():
    model, batch = made()
    trace = traced(model.blocks[0], batch, 1.0)
    assert trace.compiled
    assert trace.opaque
    assert len(trace.ops) == 1
    tape = tape_storages(trace)
    assert ROWS * 4 * WIDTH * batch.element_size() in tape.values()
    assert len(set(trace.slots) - tape.keys()) >= 2  # weights and the input are saved too, and cost nothing


def test_a_block_that_does_not_compile_stays_eager_and_it_says_so(caplog):
    model, batch = made()
    wanted = step_gradients(model, batch)
    with caplog.at_level(logging.WARNING, logger="retape"), compiling(refusing, {}):
        fit = fit_compiled(model, batch, 0.6)
    said = [record.message for record in caplog.records if "does not compile" in record.message]
    assert said == [
        "retape: NumberedBlock does not compile and stays eager: NotImplementedError: no kernels for this one"
    ], "once, with the reason, however many variants fail"
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    assert_equal(step_gradients(model, batch), wanted)


def test_sequence_lengths_do_not_compile_for_ever():
    model, batch = made()
    fit_compiled(model, batch, 0.6)
    compilations = []
    for rows in (32, 48, 80, 96, 112, 160, 200):
        other = torch.randn(rows, WIDTH)
        with retape.torch.engine.context.plain():
            wanted = step_gradients(model, other)
        for found, plain in zip(step_gradients(model, other), wanted, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-7)
        compilations.append(sum(form.compilations for form in VARIANTS.variants.values()))
    assert compilations[1:] == compilations[1:2] * 6


def test_a_saved_fit_is_applied_in_its_forms(tmp_path):
    model, batch = made()
    fit = fit_compiled(model, batch, 0.6)
    fit.save(tmp_path / "fit.json")
    wanted = step_gradients(model, batch)
    fit.remove()
    applied = retape.apply(model, tmp_path / "fit.json")
    assert applied.record.assignment == fit.record.assignment
    assert_equal(step_gradients(model, batch), wanted)
    assert original_class(type(model.blocks[0])) is NumberedBlock


def test_no_gradient_runs_stay_eager():
    model, batch = made()
    with torch.no_grad():
        wanted = model(batch)
    fit_compiled(model, batch, 0.6)
    before = [form.compilations for form in VARIANTS.variants.values()]
    with torch.no_grad():
        assert torch.equal(model(batch), wanted)
    assert [form.compilations for form in VARIANTS.variants.values()] == before


@pytest.mark.parametrize("how", [{"retain_graph": True}, {"create_graph": True}])
def test_a_kept_graph_is_refused(how):
    model, batch = made()
    fit_compiled(model, batch, 0.6)
    with pytest.raises(retape.errors.UnsupportedTransform, match="compiled blocks reuse the memory"):
        model(batch).backward(**how)
    step_gradients(model, batch)  # the next step is right


def test_blocks_compiled_with_cuda_graphs_are_refused():
    model, batch = made()
    model.blocks[1].compile(mode="reduce-overhead")
    with pytest.raises(retape.errors.UnsupportedTransform, match=r"blocks.1 is compiled with CUDA graphs"):
        fit_compiled(model, batch, 0.6)


def test_a_plan_is_not_applied_to_blocks_compiled_with_cuda_graphs():
    model, batch = made()
    fit = retape.fit(model, (batch,), budget=0.5, progress=False)
    fit.remove()
    model.blocks[1].compile(mode="reduce-overhead")
    with pytest.raises(retape.errors.UnsupportedTransform, match=r"blocks.1 is compiled with CUDA graphs"):
        retape.apply(model, fit)
    assert all(type(block) is NumberedBlock for block in model.blocks)


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled_as", [wrapped, in_place])
def test_a_model_compiled_as_a_whole_is_taken_with_compiled_blocks(compiled_as):
    """The blocks run in the forms of the plan, and no graph around them takes them in."""
    model, batch = made()
    wanted, seen = step_gradients(model, batch), []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    whole = compiled_as(model, backend)
    fit = retape.fit(whole, (batch,), budget=0.5, progress=False)
    assert all(choice.saved_share is not None for choice in fit.record.assignment.choices)
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    torch.compiler.reset()
    seen.clear()
    for found, plain in zip(step_gradients(whole, batch), wanted, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-7)
    assert not any("tanh" in graph.code for graph in seen)
    fit.remove()
    assert all(type(block) is NumberedBlock for block in model.blocks)
    torch.compiler.reset()
    seen.clear()
    assert_equal(step_gradients(whole, batch), wanted)
    assert [graph.code.count("torch.tanh(") for graph in seen] == [BLOCKS], "the whole is one graph again"


class InContainer(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


def test_a_container_that_is_compiled_after_the_fit_is_said_to_have_no_plan():
    body, batch = made()
    model = InContainer(body)
    wanted = step_gradients(model, batch)
    fit = retape.fit(model, (batch,), budget=0.6, progress=False)
    model.body = torch.compile(model.body, backend="eager")
    with pytest.warns(UserWarning, match="A forward of InContainer called no region of its plan"):
        found = step_gradients(model, batch)
    assert_equal(found, wanted)
    model.body = body
    fit.remove()


def test_a_whole_that_records_cuda_graphs_is_refused():
    model, batch = made()
    with pytest.raises(retape.errors.UnsupportedTransform, match="the model itself is compiled with CUDA graphs"):
        retape.fit(torch.compile(model, mode="reduce-overhead"), (batch,), budget=0.5, progress=False)


@pytest.mark.parametrize("limit", [1, 8])
def test_a_fitted_model_that_is_compiled_afterwards_runs_its_plan_and_says_so(caplog, limit):
    """However often the compiler is willing to compile one function again."""
    attach._say_uncompiled.cache_clear()
    model, batch = made()
    wanted = step_gradients(model, batch)
    fit = retape.fit(model, (batch,), budget=0.5, progress=False)
    whole = torch.compile(model, backend="eager")
    before = regions_run(fit)
    with caplog.at_level(logging.WARNING, logger="retape"), torch._dynamo.config.patch(recompile_limit=limit):
        for _ in range(2):
            assert_equal(step_gradients(whole, batch), wanted)
    assert regions_run(fit) > before
    assert sum("runs uncompiled" in message for message in caplog.messages) == 1
    fit.remove()


@pytest.mark.parametrize("compile", [False, True])
def test_blocks_that_the_user_compiled_are_taken_as_they_are(compile, fresh_forms):
    model, batch = made()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    wanted = step_gradients(model, batch)
    fit = fit_compiled(model, batch, 0.6, compile=compile)
    assert not fresh_forms
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    assert_equal(step_gradients(model, batch), wanted)


def test_autocast_compiles_nothing_anew_in_a_rerun(fresh_forms):
    """A re-run has autocast's cache off, which the compiler guards on."""
    model, batch = made()

    def step(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch)

    fit = fit_compiled(model, batch, 0.5, step=lambda model, batch: step(model, *batch))
    assert {form.compilations for form in fresh_forms.values()} == {1}
    assert fit.measured.peak_bytes <= fit.record.budget_bytes
    assert retape.verify(model, (batch,), step=lambda model, batch: step(model, *batch)).equal


@pytest.mark.parametrize(("enough_speed", "variants"), [(float("inf"), 1), (0.0, 3)])
def test_a_variant_is_compiled_only_while_no_plan_is_fast_enough(fresh_forms, enough_speed, variants):
    model, batch = made()
    fit = fit_compiled(model, batch, 0.8, tuning={**FEW, "enough_speed": enough_speed})
    assert len(fresh_forms) == variants
    assert fit.measured.peak_bytes <= fit.record.budget_bytes


def test_blocks_that_differ_in_a_number_are_all_compiled(fresh_forms):
    """More of them than the compiler would take by itself before it silently goes on eagerly."""
    model, batch = made()
    model.blocks.extend(NumberedBlock(WIDTH) for _ in range(2))
    for number, block in enumerate(model.blocks):
        block.number = number
    fit_compiled(model, batch, 0.7, tuning={"saved_shares": ()})
    assert not any(form.failed for form in fresh_forms.values())
    assert [form.compilations for form in fresh_forms.values()] == [len(model.blocks)]


def test_where_a_form_does_not_compile_any_more_the_region_is_recomputed(tmp_path, caplog):
    model, batch = made()
    wanted = step_gradients(model, batch)
    fit = fit_compiled(model, batch, 0.6)
    fit.save(tmp_path / "fit.json")
    fit.remove()
    with compiling(refusing, {}):
        applied = retape.apply(model, tmp_path / "fit.json")
        step_gradients(model, batch)
        assert_equal(step_gradients(model, batch), wanted)
        assert regions_run(applied) >= BLOCKS
        applied.remove()


def refusing(share):
    def backend(graph, inputs, **keywords):
        raise NotImplementedError("no kernels for this one")

    return backend


def test_a_whole_step_that_is_compiled_runs_the_plan_as_it_is():
    """Backward is called by the compiled step, with the compiler on: neither the engine nor what it runs again is compiled."""
    model, batch = made()
    wanted = step_gradients(model, batch)
    fit = retape.fit(model, (batch,), budget=0.5, progress=False)
    seen = Notes()

    def note(module, args):
        seen((retape.recomputing(), compiler_is_on()))

    for block in model.blocks:
        block.register_forward_pre_hook(note)

    def train(batch):
        model(batch).backward()

    compiled_step = torch.compile(train, backend="eager")
    for _ in range(2):
        model.zero_grad()
        compiled_step(batch)
        assert_equal([parameter.grad for parameter in model.parameters()], wanted[1:])
    assert {again for again, _ in seen.all} == {False, True}
    assert not any(on for _, on in seen.all)
    fit.remove()


@pytest.mark.parametrize("first", ["compiled", "managed"])
def test_a_live_budget_over_a_model_that_is_compiled_as_a_whole(first):
    model, batch = made()
    wanted = step_gradients(model, batch)
    budget = int(0.8 * retape.measure(lambda: step_gradients(model, batch)).peak_bytes)
    if first == "compiled":
        whole = torch.compile(model, backend="eager")
        live = retape.adaptive(whole, budget=budget)
    else:
        live = retape.adaptive(model, budget=budget)
        whole = torch.compile(model, backend="eager")
    for _ in range(3):
        assert_equal(step_gradients(whole, batch), wanted)
    assert live.stats().reruns
    live.remove()
