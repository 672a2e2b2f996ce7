import json

import benchmark
import benchmark_device
import pytest
import torch
from benchmark_contenders import (
    CACHED,
    FULL,
    KINDS,
    LAST,
    PLAIN_NORMS,
    SEPARATE,
    SINGLE,
    THIRD,
    THIRD_SHARED,
    Contender,
    counted_costs,
)
from benchmark_measures import measure_memory
from benchmark_report import targets
from benchmark_shapes import Shape
from torch.utils.flop_counter import FlopCounterMode

TEXT = Shape(False, 3, 16, 2, 24, batch_size=2, length=6)
IMAGE = Shape(True, 3, 16, 2, 24, batch_size=2, length=32)


@pytest.mark.parametrize("num_blocks", [6, 12])
@pytest.mark.parametrize(
    ("kind", "num_members", "training", "inference"),
    [
        (SINGLE, 4, 1, 1),
        (SEPARATE, 4, 4, 4),
        (FULL, 4, 4, 4),
        (THIRD, 4, 5 / 3, 2),  # a forward through two thirds, and four times both through one
        (f"{THIRD}{CACHED}", 4, 4 / 3, 2),
        (THIRD_SHARED, 4, 2, 2),
        (THIRD, 8, 3, 10 / 3),
    ],
)
def test_counted_costs(num_blocks, kind, num_members, training, inference):
    assert counted_costs(kind, num_blocks, num_members) == pytest.approx((training, inference))


def test_counted_costs_are_those_of_the_work_that_is_done():
    base = TEXT.make_base()

    def flops(kind, step):
        contender = Contender(kind, TEXT, base, 4)
        with FlopCounterMode(display=False) as counter:
            getattr(contender, step)()
        return counter.get_total_flops()

    single = {step: flops(SINGLE, step) for step in ("train", "infer")}
    for kind in (FULL, THIRD, THIRD_SHARED, f"{THIRD}{CACHED}"):
        training, inference = counted_costs(kind, TEXT.layers, 4)
        # Less than counted: what goes into the first block of members needs no gradient where the prefix is frozen.
        assert 0.7 * training < flops(kind, "train") / single["train"] < 1.05 * training
        assert flops(kind, "infer") / single["infer"] == pytest.approx(inference, rel=0.05)


def test_flops_of_a_block_are_counted_with_attention():
    base = TEXT.make_base()
    base.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        base.bert.encoder(torch.randn(TEXT.batch_size, TEXT.tokens, TEXT.hidden_size))
    assert counter.get_total_flops() == TEXT.layers * TEXT.block_flops


@pytest.mark.parametrize("shape", [TEXT, IMAGE], ids=["text", "image"])
def test_every_kind_trains_what_is_its_own(shape):
    base = shape.make_base()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    for kind in (*KINDS, PLAIN_NORMS):
        contender = Contender(kind, shape, base, 2)
        trained = {n: p for n, p in contender.models[-1].named_parameters() if p.requires_grad}
        start = {name: parameter.detach().clone() for name, parameter in trained.items()}
        contender.switch(True)
        contender.train()
        still = [name for name, parameter in trained.items() if torch.equal(parameter, start[name])]
        # LoRA starts with one of its two matrices at zero, so that the other one waits for it.
        assert all(name.endswith(".down") for name in still)
        contender.switch(False)
        contender.infer()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_the_command_writes_all_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "run_in_own_process", lambda _, given: measure_memory(json.loads(given["measure"])))
    monkeypatch.setattr(benchmark, "SHAPES", {"text": TEXT})
    monkeypatch.setattr("benchmark_measures.KINDS", {kind: KINDS[kind] for kind in (SINGLE, THIRD)})
    output = tmp_path / "figures.json"
    benchmark.main(
        ["--quick", "--shapes", "text", "--members", "4", "--threads", "1", "--skip_growth", "--output", str(output)]
    )
    found = json.loads(output.read_text())
    assert found["growth"] == []
    rows = {row["kind"]: row for row in found["shapes"]["text"]["rows"]}
    assert list(rows) == list(KINDS)
    assert rows[SINGLE]["training"] == rows[SINGLE]["inference"] == rows[SINGLE]["load"] == 1
    assert rows[SEPARATE]["stored_bytes"] == 4 * rows[SINGLE]["stored_bytes"]
    assert rows[LAST]["stored_bytes"] < rows[THIRD_SHARED]["stored_bytes"] < rows[FULL]["stored_bytes"]
    assert rows[f"{THIRD}{CACHED}"]["stored_bytes"] == rows[THIRD]["stored_bytes"]
    assert rows[FULL]["counted_training"] == 4
    assert rows[SINGLE]["peak_bytes"] > 0
    assert rows[FULL]["peak_bytes"] is None
    assert [kind for kind, row in rows.items() if row["inference"] is None] == [k for k in KINDS if k.endswith(CACHED)]
    assert found["norm_overhead"]["text"]["lower"] <= found["norm_overhead"]["text"]["upper"]
    assert len(found["targets"]) == 7
    printed = capsys.readouterr().out
    assert "| last third, prefix shared | 4 |" in printed
    assert printed.count("- text, M=4: ") == 7


def test_growth_goes_through_every_dimension(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", {"text": TEXT})
    rows = benchmark.measure_growth(benchmark.Arguments(shapes=["text"], quick=True))
    assert [row["grows"] for row in rows] == 3 * ["depth"] + 3 * ["width"] + 3 * ["batch"] + 3 * ["M"]
    assert [row["counted"] for row in rows if row["grows"] == "depth"] == pytest.approx(3 * [5 / 3])
    assert [row["counted"] for row in rows if row["grows"] == "M"] == pytest.approx([2 / 3, 5 / 3, 3])


def test_targets_are_met_up_to_their_limit():
    row = {"kind": THIRD, "members": 4, "counted_training": 2.0, "counted_inference": 2.0}
    found = {
        "shapes": {"text": {"rows": [{**row, "training": 2.25, "inference": 2.2}]}},
        "norm_overhead": {"text": {"median": 0.05}},
    }
    held = targets(found)
    assert [target["limit"] for target in held] == pytest.approx([2.24, 2.24, 0.05])
    assert [target["is_met"] for target in held] == [False, True, True]


@pytest.mark.parametrize(("shape", "is_bf16"), [(TEXT, False), (IMAGE, True)], ids=["text", "image"])
def test_throughput_of_a_device(shape, is_bf16, capsys):
    found = benchmark_device.measure_device({"tiny": shape}, [2], "cpu", is_bf16, rounds=1)
    assert max(found["errors"]["tiny"].values()) < 1e-4
    assert [row["kind"] for row in found["rows"]] == list(KINDS)
    assert all(row["training_per_second"] > 0 and row["training_of_peak"] > 0 for row in found["rows"])
    assert all(("inference_of_peak" in row) != row["kind"].endswith(CACHED) for row in found["rows"])
    assert "fast paths equal the plain path" in capsys.readouterr().out


def test_a_wrong_fast_path_is_found(monkeypatch):
    # The plain path is given other members than the fast one.
    def disturb(base_model, adapter_name, block):
        with torch.no_grad():
            next(p for n, p in base_model.named_parameters() if "sigma_norm_scaler" in n).add_(1.0)

    monkeypatch.setattr(benchmark_device, "branch_at", disturb)
    with pytest.raises(RuntimeError, match="differs from the plain one"):
        benchmark_device.check_fast_paths(TEXT, TEXT.make_base(), 2, "cpu")


def test_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="There is no shape"):
        benchmark.main(["--shapes", "resnet"])
