"""QLoRA: adapters on weights in four bits, which bitsandbytes unpacks in each forward and backward."""

import pytest
import torch

from support.comparing import assert_equal, loss_and_gradients
from support.fits import fit

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


@pytest.fixture
def four_bit_model(tmp_path):
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=packed, device_map={"": "cpu"}
    )
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    return peft.get_peft_model(base, adapter).train()


def test_gradients_of_the_adapters_are_those_of_plain_autograd(four_bit_model):
    assert any(type(parameter).__name__ == "Params4bit" for parameter in four_bit_model.parameters())
    step = lambda: four_bit_model(**BATCH).loss  # noqa: E731 - a step in one line
    wanted = loss_and_gradients(four_bit_model, step)
    fitted = fit(four_bit_model, BATCH, budget=0.6)
    assert not fitted.record.assignment.keeps_everything
    assert_equal(loss_and_gradients(four_bit_model, step), wanted)
    fitted.remove()
