import pytest
import tiny
import torch
import transformers
from peft import get_peft_model

from sigma_nens_hf import SigmaNormConfig, SigmaNormLayer
from sigma_nens_hf.architectures import ARCHITECTURES, task_of_class

TEXT = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 40, "pad_token_id": 0, "num_heads": 2,
    "state_size": 4,
}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_every_supported_architecture_is_tested():
    assert {tiny.model_class(name).__name__ for name in tiny.ARCHITECTURES} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_head_table_names_all_linear_layers_outside_the_backbone(architecture):
    model = tiny.base_model(architecture)
    head = ARCHITECTURES[type(model).__name__]
    backbone = f"{head.backbone or model.base_model_prefix}."
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(head.projections) == sorted(name for name in linears if not name.startswith(backbone))
    assert task_of_class(type(model).__name__) == tiny.task(architecture)


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        ("BertModel", TEXT, "it has no classification head"),
        ("BertForQuestionAnswering", TEXT, "it has no classification head"),
        ("GPT2LMHeadModel", {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 2}, "beam search reorders"),
        ("GemmaForSequenceClassification", TEXT, r"input_layernorm, a GemmaRMSNorm, multiplies by 1 \+ weight"),
        ("CLIPModel", {"vision_config": IMAGE, "text_config": TEXT}, "every image of a batch with every text"),
        ("SiglipModel", {"vision_config": IMAGE, "text_config": TEXT}, "logits_per_image"),
        ("MambaForCausalLM", TEXT, "norms are fused with other operations"),
        ("SplinterForPreTraining", TEXT, "it has no classification head"),
        ("RoFormerForSequenceClassification", {**TEXT, "embedding_size": 32}, "its head is not known here"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_reason(model_class, config, reason):
    model_class = getattr(transformers, model_class)
    model = model_class(model_class.config_class(**config))
    with pytest.raises(ValueError, match=f"{model_class.__name__} is not supported: .*{reason}"):
        get_peft_model(model, SigmaNormConfig())
    assert not any(isinstance(module, SigmaNormLayer) for module in model.modules())
