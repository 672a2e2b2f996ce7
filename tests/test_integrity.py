import json

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from sigma_nens_hf import SigmaNormConfig, load_ensemble
from sigma_nens_hf.adapter_info import adapter_infos
from sigma_nens_hf.integrity import base_fingerprint, check_base, digest_of_file, joint_digest, tensor_digest
from sigma_nens_hf.layer import MemberLayer
from sigma_nens_hf.members import base_model_of


@pytest.fixture
def saved(tmp_path):
    tiny.ensemble("bert").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_digest_tells_values_shapes_and_dtypes_apart_but_not_orders(tmp_path):
    zeros = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), torch.full((2, 3), 1e-45), -zeros]
    digests = [tensor_digest(tensor) for tensor in (zeros, *others)]
    assert len(set(digests)) == 5
    assert tensor_digest(torch.zeros(3, 2).T) == digests[0]
    assert joint_digest(digests) == joint_digest(reversed(digests)) != joint_digest(digests[1:])
    save_file({str(i): tensor for i, tensor in enumerate((zeros, *others))}, tmp_path / "file")
    assert digest_of_file(tmp_path / "file") == joint_digest(digests)
    assert tensor_digest(torch.tensor(2.0)) != tensor_digest(torch.tensor([2.0]))


def test_one_flipped_bit_is_refused(saved):
    file = saved / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # in the numbers, where it changes one by little
    file.write_bytes(content)
    for load in (lambda: PeftModel.from_pretrained(tiny.base_model("bert"), saved), lambda: adapter_infos(saved)):
        with pytest.raises(ValueError, match=r"does not hold the weights that its adapter_config\.json was saved with"):
            load()
    edit_config(saved, weights_digest=None)
    PeftModel.from_pretrained(tiny.base_model("bert"), saved)


def test_weights_of_another_adapter_of_the_same_shape_are_refused(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    tiny.ensemble("bert", init_scaler_std=0.5).save_pretrained(other)
    (saved / "adapter_model.safetensors").write_bytes((other / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="is another adapter's"):
        PeftModel.from_pretrained(tiny.base_model("bert"), saved)


def test_saved_again_the_digest_is_that_of_the_new_weights(saved):
    model = PeftModel.from_pretrained(tiny.base_model("bert"), saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sigma_norm_" in name:
                parameter.add_(1)
    model.save_pretrained(saved)
    found = json.loads((saved / "adapter_config.json").read_text())["weights_digest"]
    tensors = load_file(saved / "adapter_model.safetensors").values()
    assert found == joint_digest(map(tensor_digest, tensors))
    PeftModel.from_pretrained(tiny.base_model("bert"), saved)


def test_config_saved_without_weights_has_no_digest(tmp_path):
    SigmaNormConfig(weights_digest="of something else").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["weights_digest"] is None


@pytest.mark.parametrize("part", ["attention.self.query.weight", "attention.output.LayerNorm.weight", "pooler"])
def test_base_that_has_changed_is_refused(saved, part):
    base = tiny.base_model("bert")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if part in name:
                parameter.mul_(1.01)
    with pytest.raises(ValueError, match="does not have the weights that the adapter was trained over"):
        PeftModel.from_pretrained(base, saved)
    edit_config(saved, base_fingerprint=None)
    PeftModel.from_pretrained(base, saved)


def test_refused_base_stays_as_it_was(saved):
    model = tiny.ensemble("bert")
    with torch.no_grad():
        base_model_of(model).bert.encoder.layer[0].output.dense.weight.mul_(2)
    with pytest.raises(ValueError, match="does not have the weights"):
        model.load_adapter(saved, "second")
    assert list(model.peft_config) == ["default"]
    model(**tiny.inputs("bert"))


@pytest.mark.parametrize(("field", "message"), [("num_members", "is of 4 members, but .* says 4000"),
                                                 ("num_labels", "has no head of 4000 classes")])  # fmt: skip
def test_claim_of_enormous_sizes_is_refused_before_memory_is_taken(saved, field, message, monkeypatch):
    edit_config(saved, **{field: 4000}, id2label=None, label2id=None)
    monkeypatch.setattr(MemberLayer, "add_parameters", lambda *args, **kwargs: pytest.fail("memory was taken"))
    for load in (PeftModel.from_pretrained, lambda base, folder: load_ensemble(folder)):
        with pytest.raises(ValueError, match=message):
            load(tiny.base_model("bert"), saved)


def test_pickle_is_never_opened(saved):
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    for load in (PeftModel.from_pretrained, lambda base, folder: load_ensemble(folder)):
        with pytest.raises(ValueError, match=r"never adapter_model\.bin, which can run code"):
            load(tiny.base_model("bert"), saved)
    model = tiny.ensemble("bert")
    with pytest.raises(ValueError, match=r"never adapter_model\.bin, which can run code"):
        model.load_adapter(saved, "second")


def test_what_the_adapter_brings_itself_may_change(saved):
    base = tiny.base_model("bert")
    nn.init.normal_(base.classifier.weight)
    base.resize_token_embeddings(base.config.vocab_size + 3)
    PeftModel.from_pretrained(base, saved)


def test_fingerprint_is_the_same_with_adapters_on_the_model():
    plain = base_fingerprint(tiny.base_model("roberta"), ["classifier"])
    model = tiny.ensemble("roberta", modules_to_save=["classifier.dense"])
    model.add_adapter("second", SigmaNormConfig(num_members=2, branch_layer=1))
    assert base_fingerprint(base_model_of(model), ["classifier"]) == plain
    assert plain.startswith("float32:")
    assert model.peft_config["default"].base_fingerprint == model.peft_config["second"].base_fingerprint


def test_another_precision_cannot_be_compared(saved):
    PeftModel.from_pretrained(tiny.base_model("bert").bfloat16(), saved)
    check_base("bfloat16:1", "float32:2", "base")
    with pytest.raises(ValueError, match="base has changed since"):
        check_base("float32:1", "float32:2", "base")


def test_weights_that_are_not_in_memory_have_no_fingerprint():
    with torch.device("meta"):
        assert base_fingerprint(nn.LayerNorm(3), []) is None
