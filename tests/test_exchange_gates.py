import exchange_gates
import pytest
import tiny
import torch
from evaluate_tiny import dataset, save_adapter

from sigma_nens_hf.regularizer import member_gates


def test_gates_are_shuffled_within_each_norm_and_member():
    model = tiny.ensemble("bert")
    before = {name: gates.clone() for name, gates in member_gates(model).items()}
    exchange_gates.exchange_gates(model, exchange_gates.shuffled, seed=0)
    for name, gates in member_gates(model).items():
        assert not torch.equal(gates, before[name])
        assert torch.equal(gates.sort(1).values, before[name].sort(1).values)
        orders = [
            [row.tolist().index(value) for value in after] for row, after in zip(before[name], gates, strict=True)
        ]
        assert orders[0] != orders[1]


def test_all_members_get_the_gates_of_one():
    model = tiny.ensemble("bert", branch_layer=1, prefix="shared")
    before = {name: gates.clone() for name, gates in member_gates(model).items()}
    exchange_gates.exchange_gates(model, exchange_gates.of_first_member, seed=0)
    for name, gates in member_gates(model).items():
        assert torch.equal(gates, before[name][:1].expand(4, -1))


@pytest.mark.filterwarnings("ignore:.*bias-corrected")
def test_ensembles_are_compared_with_themselves(tmp_path, capsys):
    save_adapter(tmp_path)
    dataset("bert", 25).to_csv(tmp_path / "texts.csv")
    adapter = str(tmp_path / "adapter")
    exchange_gates.main(
        ["--adapters", adapter, adapter, "--dataset_name", str(tmp_path / "texts.csv"), "--resamples", "20"]
    )
    header, _, plain, shuffled, one = capsys.readouterr().out.strip().splitlines()
    assert header.startswith("| gates | adapters | NLL | accuracy | members disagree |")
    assert plain.endswith("| +0.000 [+0.000, +0.000] |")
    assert len({line.split("|")[3] for line in (plain, shuffled, one)}) == 3
    assert all(line.split("|")[2].strip() == "2" for line in (plain, shuffled, one))
