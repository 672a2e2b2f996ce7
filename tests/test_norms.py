import pytest
import tiny

from sigma_nens_hf import SigmaNormConfig, SigmaNormLayer
from sigma_nens_hf.norms import find_norms

# Embedding norm where there is one, two norms a block, final norm where there is one.
NUM_NORMS = {"bert": 5, "roberta": 5, "distilbert": 5, "vit": 5, "dinov2": 5}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_all_norms_of_the_backbone_are_found(architecture):
    model = tiny.base_model(architecture)
    names = find_norms(model, SigmaNormConfig())
    assert len(names) == NUM_NORMS[architecture]
    assert all(name.startswith(model.base_model_prefix) for name in names)
    adapted = tiny.ensemble(architecture)
    assert sum(isinstance(module, SigmaNormLayer) for module in adapted.modules()) == NUM_NORMS[architecture]
    # A second adapter on the same model finds the same norms, now wrapped.
    assert find_norms(adapted.get_base_model(), SigmaNormConfig()) == names


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_branch_layer_keeps_later_blocks_and_the_norms_after_them(architecture):
    model = tiny.base_model(architecture)
    everything = find_norms(model, SigmaNormConfig())
    last_block = find_norms(model, SigmaNormConfig(branch_layer=1))
    assert everything[-len(last_block) :] == last_block
    assert len(last_block) == (3 if architecture in tiny.IMAGE_ARCHITECTURES else 2)
    from_first = find_norms(model, SigmaNormConfig(branch_layer=0))
    assert len(from_first) == (5 if architecture in tiny.IMAGE_ARCHITECTURES else 4)
    with pytest.raises(ValueError, match="beyond the last of the 2 blocks"):
        find_norms(model, SigmaNormConfig(branch_layer=2))


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
