import itertools
import math

import pytest
import tiny
import torch

from sigma_nens_hf import diversity_regularizer, expected_sharing, realized_sharing, temperature_for_sharing
from sigma_nens_hf.regularizer import member_gates

# Temperatures at which k* steps up, from the method's description.
STEPS = {4: [0.595], 8: [0.185, 0.396, 1.299], 16: [0.090, 0.155, 0.230, 0.332, 0.498, 0.866, 2.649]}


def corner_value(k, tau, num_members):
    """The regulariser of one feature whose gates are 1 for k members and 0 for the others, summed by hand."""
    gates = [1.0] * k + [0.0] * (num_members - k)
    normaliser = math.log(sum(math.exp(gate / tau) for gate in gates))
    return sum(gate / tau - normaliser for gate in gates)


def scalers(model):
    return [p for n, p in model.named_parameters() if "sigma_norm_scaler" in n]


@pytest.mark.parametrize("num_members", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("tau", [0.02, 0.1, 0.3, 0.55, 0.65, 1.0, 3.0, 20.0])
def test_expected_sharing_is_the_lowest_corner(tau, num_members):
    values = [corner_value(k, tau, num_members) for k in range(1, num_members + 1)]
    best = min(range(num_members), key=values.__getitem__) + 1
    assert expected_sharing(tau, num_members) == best


@pytest.mark.parametrize("num_members", [3, 4])
def test_corners_are_the_minima_over_all_gates(num_members):
    """Brute force over a grid in the cube of gates: no inner point is lower than the best corner."""
    tau = 0.4
    grid = torch.tensor(list(itertools.product(torch.linspace(0, 1, 9).tolist(), repeat=num_members)))
    values = (grid / tau).log_softmax(1).sum(1)
    best = grid[values.argmin()]
    assert set(best.tolist()) <= {0.0, 1.0}
    assert best.sum() == expected_sharing(tau, num_members)


@pytest.mark.parametrize("num_members", [2, 4, 8, 16])
def test_temperature_and_sharing_round_trip(num_members):
    for k in range(1, max(1, num_members // 2) + 1):
        tau = temperature_for_sharing(k, num_members)
        assert expected_sharing(tau, num_members) == k
        # well inside: a tenth more or less does not matter
        assert expected_sharing(tau * 0.9, num_members) == expected_sharing(tau * 1.1, num_members) == k


@pytest.mark.parametrize("num_members", STEPS)
def test_sharing_steps_where_it_should(num_members):
    for k, tau in enumerate(STEPS[num_members], start=1):
        assert expected_sharing(tau - 0.002, num_members) == k
        assert expected_sharing(tau + 0.002, num_members) == k + 1
    lower, upper = STEPS[16][2], STEPS[16][3]
    assert temperature_for_sharing(4, 16) == pytest.approx(math.sqrt(lower * upper), rel=0.01)
    assert temperature_for_sharing(8, 16) == pytest.approx(2 * STEPS[16][-1], rel=0.01)


@pytest.mark.parametrize(("k", "num_members"), [(0, 4), (3, 4), (2, 2), (5, 8), (1.5, 8), (True, 4)])
def test_impossible_sharing_is_refused(k, num_members):
    with pytest.raises(ValueError, match="whole number from 1 to"):
        temperature_for_sharing(k, num_members)


def test_too_few_members_are_refused():
    with pytest.raises(ValueError, match="at least 2 members"):
        expected_sharing(0.1, 1)
    with pytest.raises(ValueError, match="at least 2 members"):
        temperature_for_sharing(1, 1)


@pytest.mark.parametrize("tau", [0.0, -0.1, float("nan"), float("inf")])
def test_wrong_temperatures_are_refused(tau):
    with pytest.raises(ValueError, match="finite and positive"):
        diversity_regularizer(tiny.ensemble("bert"), tau)
    with pytest.raises(ValueError, match="finite and positive"):
        expected_sharing(tau, 4)


@pytest.mark.parametrize("tau", [0.1, 0.7])
def test_value_is_the_triple_sum(tau):
    model = tiny.ensemble("vit", num_members=3)
    total, features = 0.0, 0
    for scaler in scalers(model):
        for i in range(scaler.shape[1]):
            gates = [1 / (1 + math.exp(-g)) for g in scaler[:, i].tolist()]
            normaliser = math.log(sum(math.exp(gate / tau) for gate in gates))
            total += sum(gate / tau - normaliser for gate in gates)
            features += 1
    assert diversity_regularizer(model, tau, reduction="sum").item() == pytest.approx(total, rel=1e-5)
    assert diversity_regularizer(model, tau).item() == pytest.approx(total / features, rel=1e-5)


def test_gradient_by_finite_differences_and_closed_form():
    model = tiny.ensemble("bert", num_members=4).double()
    tau = 0.3
    scaler = scalers(model)[1]
    _regularizer_in_double(model, tau).backward()
    with torch.no_grad():
        gates = scaler.sigmoid()
        p = (gates / tau).softmax(0)
        closed_form = (1 - 4 * p) / tau * gates * (1 - gates)
        torch.testing.assert_close(scaler.grad, closed_form)
        for index in [(0, 0), (3, 5), (2, 31)]:
            before = scaler[index].item()
            values = []
            for step in (1e-6, -1e-6):
                scaler[index] = before + step
                values.append(_regularizer_in_double(model, tau).item())
            scaler[index] = before
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(scaler.grad[index].item(), rel=1e-4, abs=1e-6)
    # and the gradient that users get, in fp32
    model32 = tiny.ensemble("bert", num_members=4)
    diversity_regularizer(model32, tau, reduction="sum").backward()
    torch.testing.assert_close(scalers(model32)[1].grad.double(), scaler.grad, rtol=1e-4, atol=1e-5)


def _regularizer_in_double(model, tau):
    return sum((scaler.sigmoid() / tau).log_softmax(0).sum() for scaler in scalers(model))


def test_identical_members_feel_no_force():
    model = tiny.ensemble("bert", init_scaler_std=0.0)
    diversity_regularizer(model, 0.1).backward()
    assert all(not scaler.grad.any() for scaler in scalers(model))


def test_single_member_has_no_diversity():
    assert diversity_regularizer(tiny.ensemble("bert", num_members=1), 0.1).item() == 0


def test_layers_can_be_chosen():
    model = tiny.ensemble("bert")
    gates = member_gates(model, ["attention.output.LayerNorm"])
    assert len(gates) == 2
    expected = sum((g / 0.1).log_softmax(0).sum() for g in gates.values()) / (2 * tiny.HIDDEN_SIZE)
    torch.testing.assert_close(diversity_regularizer(model, 0.1, layers=["attention.output.LayerNorm"]), expected)
    with pytest.raises(ValueError, match="match no norm"):
        diversity_regularizer(model, 0.1, layers=["nowhere"])


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction must be one of"):
        diversity_regularizer(tiny.ensemble("bert"), 0.1, reduction="max")


def test_regularizer_stays_fp32_under_autocast():
    model = tiny.ensemble("bert")
    expected = diversity_regularizer(model, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = diversity_regularizer(model, 0.05)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


def test_scalers_that_are_not_finite_are_named():
    model = tiny.ensemble("vit")
    with torch.no_grad():
        scalers(model)[2][1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"scalers of \['.*'\] \(1 norms\) are not finite"):
        diversity_regularizer(model, 0.1)


def test_realized_sharing_counts_owners():
    model = tiny.ensemble("bert", num_members=4, init_scaler_std=0.0)
    assert realized_sharing(model) == 4
    with torch.no_grad():
        for scaler in scalers(model):
            scaler.fill_(-20)
            scaler[0] = 20
            scaler[1, ::2] = 20  # every other feature has a second owner
        scalers(model)[0].fill_(20)  # and in the first norm everyone owns all
    per_layer = realized_sharing(model, per_layer=True)
    assert list(per_layer.values()) == [4.0, 1.5, 1.5, 1.5, 1.5]
    assert realized_sharing(model) == pytest.approx(2.0)
