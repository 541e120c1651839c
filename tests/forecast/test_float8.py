"""Linear layers in float8: what autograd saves, the products, FSDP's buffers, refusals."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import retape
from retape.cli.main import main
from retape.errors import InvalidInput
from retape.forecast.forecasting import search_layouts
from retape.forecast.known_devices import cost_model, measured_device
from retape.forecast.simulation.float8 import Float8Linears, Scaling
from retape.forecast.simulation.simulator import simulated
from support.blocks import MlpBlock

SCALINGS = ["tensorwise", "rowwise"]


class WideMlps(nn.Module):
    def __init__(self, width=4096, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 128)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).float().logsumexp(-1).mean()


@pytest.fixture(scope="module")
def wide_products():
    with torch.device("meta"):
        return WideMlps().to(torch.bfloat16)


@pytest.fixture(scope="module")
def wide_rows():
    return torch.empty(32768, 4096, dtype=torch.bfloat16, device="meta")


@pytest.fixture(scope="module")
def in_bf16(wide_products, wide_rows):
    return retape.forecast(wide_products, wide_rows, optimizer="adamw")


class Products(TorchDispatchMode):
    """Counts products by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("mm", "addmm", "_scaled_mm"):
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_input_and_weight_are_saved_as_they_are(scaling):
    """As torchao's Float8Linear does: `ctx.save_for_backward(input_hp, weight_hp_t)`; three products in float8."""
    with torch.device("meta"):
        linear, rows = nn.Linear(64, 32).to(torch.bfloat16), torch.empty(2, 16, 64, dtype=torch.bfloat16)
    rows.requires_grad_(True)
    saved = []
    linears = Float8Linears(Scaling(scaling), [linear])
    with simulated(cost_model(measured_device()), float8=linears), Products() as products:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            out = linear(rows)
        out.sum().backward()
    assert [(tensor.shape, tensor.dtype) for tensor in saved] == [
        (rows.shape, torch.bfloat16),
        (linear.weight.shape, torch.bfloat16),
    ]
    assert out.shape == (2, 16, 32)
    assert out.dtype == rows.grad.dtype == linear.weight.grad.dtype == torch.bfloat16
    assert linear.weight.grad.shape == linear.weight.shape
    assert products.names == ["_scaled_mm"] * 3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_step_in_float8_keeps_as_much_and_is_faster(wide_products, wide_rows, in_bf16, scaling):
    found = retape.forecast(wide_products, wide_rows, optimizer="adamw", float8=scaling)
    tapes = [[stage.tape_bytes for stage in each.stages[0].problem.chain.stages] for each in (found, in_bf16)]
    assert tapes[0] == tapes[1]
    assert found.seconds < in_bf16.seconds
    assert "float8 never measured" in found.explain()
    assert "float8" not in in_bf16.explain()
    assert found.flops == in_bf16.flops


def test_a_smaller_budget_recomputes_blocks_in_float8(wide_products, wide_rows, in_bf16):
    budget = (in_bf16.floor_bytes + in_bf16.peak_bytes) // 2
    tight = retape.forecast(wide_products, wide_rows, optimizer="adamw", float8="tensorwise", budget=budget)
    assert tight.peak_bytes <= budget
    assert tight.seconds > retape.forecast(wide_products, wide_rows, optimizer="adamw", float8="tensorwise").seconds


def test_weights_of_blocks_are_gathered_in_float8_with_one_scale(wide_products, wide_rows):
    mesh = {"gpus": 8, "fsdp": 8}
    buffers = {
        scaling: retape.forecast(wide_products, wide_rows, mesh=mesh, float8=scaling).stages[0].problem.buffer_bytes
        for scaling in (None, *SCALINGS)
    }
    weights = sum(parameter.numel() for parameter in wide_products.blocks[0].parameters() if parameter.dim() == 2)
    assert buffers["rowwise"] == buffers[None]
    assert buffers["tensorwise"] == buffers[None] - 2 * weights  # of two gathered blocks, one byte less each


def test_a_model_that_multiplies_in_float8_by_itself(wide_rows):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, wide_rows, weight):
            ctx.save_for_backward(wide_rows, weight)
            one = torch.ones((), device=wide_rows.device)
            small = [each.to(torch.float8_e4m3fn) for each in (wide_rows, weight)]
            return torch._scaled_mm(small[0], small[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx, gradient):
            wide_rows, weight = ctx.saved_tensors
            return gradient @ weight, gradient.t() @ wide_rows

    class Own(nn.Linear):
        def forward(self, wide_rows):
            return Product.apply(wide_rows, self.weight)

    def step(model, wide_rows):
        return model(wide_rows).float().mean()

    flops = {}
    for kind in (Own, nn.Linear):
        with torch.device("meta"):
            model = nn.Sequential(*(kind(4096, 4096, bias=False) for _ in range(2))).to(torch.bfloat16)
        flops[kind] = retape.forecast(model, wide_rows, step=step).flops
        if kind is Own:
            with pytest.raises(InvalidInput, match="No rate of float8 products is known for 'a100-80g'"):
                retape.forecast(model, wide_rows, step=step, device="a100")
    assert (
        flops[Own] == flops[nn.Linear] + 2 * 32768 * 4096**2
    )  # its first layer computes the gradient of the batch too


def test_what_cannot_be(wide_products, wide_rows):
    with pytest.raises(InvalidInput, match="No rate of float8 products is known for 'a100-80g'"):
        retape.forecast(wide_products, wide_rows, device="a100", float8="tensorwise")
    with pytest.raises(InvalidInput, match="give 'tensorwise' or 'rowwise'"):
        retape.forecast(wide_products, wide_rows, float8="blockwise")
    with torch.device("meta"):
        odd = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    with pytest.raises(InvalidInput, match="multiples of 16; forecast it without float8"):
        retape.forecast(
            odd,
            torch.empty(8, 24, device="meta"),
            step=lambda wide_products, wide_rows: wide_products(wide_rows).sum(),
            float8="rowwise",
        )


def test_a_number_of_tokens_that_float8_cannot_multiply(wide_products):
    message = r"gets 24 rows \(tokens of a micro-batch on one GPU\), .* a multiple of 16. Use 32 rows"
    with pytest.raises(InvalidInput, match=message):
        retape.forecast(wide_products, torch.empty(24, 4096, dtype=torch.bfloat16, device="meta"), float8="rowwise")


def test_a_search_in_float8_and_the_command(wide_products, wide_rows, capsys):
    fixed = {"tensor": 1, "pipeline": 1}
    found = {
        scaling: search_layouts(wide_products, wide_rows, gpus=2, fixed=fixed, float8=scaling)[0].forecast.seconds
        for scaling in (None, "tensorwise")
    }
    assert found["tensorwise"] < found[None]
    assert main(["forecast", "gpt2", "--float8", "blockwise"]) == 2
    assert "give 'tensorwise' or 'rowwise'" in capsys.readouterr().err


def test_a_weight_given_by_name_is_multiplied_in_float8_too():
    with torch.device("meta"):
        linear, rows = nn.Linear(64, 32), torch.empty(16, 64)
    linears = Float8Linears(Scaling.TENSORWISE, [linear])
    with simulated(cost_model(measured_device()), float8=linears), Products() as products:
        nn.functional.linear(input=rows.bfloat16(), weight=linear.weight.bfloat16())  # another tensor: not converted
        nn.functional.linear(input=rows.bfloat16(), weight=linear.weight, bias=None)
    assert products.names == ["mm", "_scaled_mm"]


def test_scaled_products_are_counted_or_refused():
    one = torch.ones((), device="meta")
    rows, weight = (torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    with simulated(cost_model(measured_device())) as device:
        torch.ops.aten._scaled_mm(rows, weight.t(), one, one, out_dtype=torch.bfloat16)
        assert device.flops == 2 * 64**3
        tensorwise, plain = [0], [0]  # numbers of PyTorch's ScalingType and SwizzleType
        torch.ops.aten._scaled_mm_v2(
            rows,
            weight.t(),
            [one],
            tensorwise,
            plain,
            [one],
            tensorwise,
            plain,
            None,
            torch.bfloat16,
            use_fast_accum=True,
        )
        assert device.flops == 4 * 64**3
        experts, ends = weight.expand(8, 64, 64), torch.empty(8, dtype=torch.int32, device="meta")
        scales = [torch.empty(size, device="meta") for size in ((64,), (8, 64))]
        with pytest.raises(InvalidInput, match="multiplies with _scaled_grouped_mm, whose time is not known"):
            torch.ops.aten._scaled_grouped_mm(rows, experts.transpose(1, 2), *scales, ends, out_dtype=torch.bfloat16)
        with pytest.raises(InvalidInput, match="multiplies with _int_mm, whose"):
            torch._int_mm(rows.to(torch.int8), weight.to(torch.int8))
