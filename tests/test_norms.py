import pytest
import tiny
import torch
from peft import get_peft_model
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from sigma_nens_hf import SigmaNormConfig, SigmaNormLayer
from sigma_nens_hf.architectures import backbone_name
from sigma_nens_hf.norms import find_norms

# Two norms a block, one after the embedding where there is one, a final one where there is one.
NUM_NORMS = {
    "albert": 3,  # one block, used twice
    "deberta_v2": 6,  # the convolution's
    "qwen3": 9,  # queries and keys have norms of their own
    "swin": 11, "swinv2": 11,  # four blocks and a merging of patches
    "convnext": 6, "convnextv2": 6,  # one norm a block, three blocks and a downsampling
}  # fmt: skip


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_all_norms_of_the_backbone_are_found(architecture):
    model = tiny.base_model(architecture)
    names = find_norms(model, SigmaNormConfig())
    assert len(names) == NUM_NORMS.get(architecture.partition("-")[0], 5)
    assert all(name.startswith(f"{backbone_name(model)}.") for name in names)
    adapted = tiny.ensemble(architecture)
    assert sum(isinstance(module, SigmaNormLayer) for module in adapted.modules()) == len(names)
    # A second adapter on the same model finds the same norms, now wrapped.
    assert find_norms(adapted.get_base_model(), SigmaNormConfig()) == names


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_branch_layer_keeps_later_blocks_and_the_norms_after_them(architecture):
    model = tiny.base_model(architecture)
    everything = find_norms(model, SigmaNormConfig())
    called = _order_of_calls(architecture)
    assert sorted(called) == sorted(everything)
    num_blocks = {"albert": 1, "swin": 4, "swinv2": 4, "convnext": 3, "convnextv2": 3}
    num_blocks = num_blocks.get(architecture.partition("-")[0], 2)
    kept = [find_norms(model, SigmaNormConfig(branch_layer=block)) for block in range(num_blocks)]
    for earlier, later in zip([everything, *kept], kept, strict=False):
        assert set(later) < set(earlier) or (later == earlier == everything)
    for names in kept:  # all that run from the first of them on, and nothing that runs before
        assert set(called[min(called.index(name) for name in names) :]) == set(names)
    with pytest.raises(ValueError, match=f"beyond the last of the {num_blocks} blocks"):
        find_norms(model, SigmaNormConfig(branch_layer=num_blocks))


def _order_of_calls(architecture):
    """The norms in the order in which they are first called in a forward pass."""
    model, called = tiny.ensemble(architecture), []
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, SigmaNormLayer):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(**tiny.inputs(architecture))
    return list(dict.fromkeys(called))


def test_patterns_are_read_as_in_peft():
    model = tiny.base_model("bert")
    everything = find_norms(model, SigmaNormConfig())
    outputs = [name for name in everything if "attention" in name]
    assert find_norms(model, SigmaNormConfig(target_modules=["attention.output.LayerNorm"])) == outputs
    assert find_norms(model, SigmaNormConfig(target_modules=r".*attention\.output\.LayerNorm")) == outputs
    rest = find_norms(model, SigmaNormConfig(exclude_modules=["attention.output.LayerNorm"]))
    assert sorted(rest + outputs) == sorted(everything)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["query"]}, "a Linear, but only norms"),
        ({"target_modules": ["no_such_norm"]}, "target_modules matches no module"),
        ({"exclude_modules": ["no_such_norm"]}, "exclude_modules matches no module"),
        ({"exclude_modules": ["LayerNorm"]}, "is left to carry members"),
    ],
)
def test_wrong_patterns_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny.ensemble("bert", **fields)


@pytest.mark.parametrize(
    ("architecture", "norm", "reason"),
    [
        ("deberta_v3", "encoder.LayerNorm", "table of relative positions"),
        ("clip", "post_layernorm", "does not see its output"),
        ("siglip", "head.layernorm", "does not see its output"),
    ],
)
def test_norm_that_cannot_carry_members_is_left_out_and_refused_by_name(architecture, norm, reason):
    assert not any(name.endswith(norm) for name in find_norms(tiny.base_model(architecture), SigmaNormConfig()))
    with pytest.raises(ValueError, match=f"{norm}', which cannot carry members: .*{reason}"):
        tiny.ensemble(architecture, target_modules=[norm])
    everything = tiny.ensemble(architecture, target_modules=".*(norm|Norm).?", exclude_modules=[norm])
    assert everything(**tiny.inputs(architecture)).loss.isfinite()


def test_norm_of_unknown_formula_is_refused_before_anything_is_changed():
    base = tiny.base_model("bert")
    base.bert.encoder.layer[0].output.LayerNorm = GemmaRMSNorm(tiny.HIDDEN_SIZE)
    expected = base(**tiny.inputs("bert")).logits
    with pytest.raises(ValueError, match=r"layer\.0\.output\.LayerNorm, a GemmaRMSNorm, multiplies by 1 \+ weight"):
        get_peft_model(base, SigmaNormConfig())
    assert torch.equal(base(**tiny.inputs("bert")).logits, expected)
    model = get_peft_model(base, SigmaNormConfig(exclude_modules=["layer.0.output.LayerNorm"]))
    assert model.peft_config["default"].num_adapted_norms == 4


def test_convolution_beside_the_first_block_belongs_to_it():
    model = tiny.base_model("deberta_v2", num_hidden_layers=3)
    assert any("encoder.conv" in name for name in find_norms(model, SigmaNormConfig(branch_layer=0)))
    for block in (1, 2):
        names = find_norms(model, SigmaNormConfig(branch_layer=block))
        assert all(f".layer.{block}." in name or f".layer.{block + 1}." in name for name in names)
