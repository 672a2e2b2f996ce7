import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import numpy as np
import pandas
import pytest
import tiny
import torch
from matplotlib.figure import Figure
from scipy.stats import norm as normal
from sklearn.metrics import roc_auc_score

from sigma_nens_hf.metrics.example_table import ExampleTable
from sigma_nens_hf.metrics.noise_floor import calibration_noise_floor
from sigma_nens_hf.plots import (
    entropy_histogram,
    frontier_plot,
    gates_plot,
    reliability_diagram,
    risk_coverage_plot,
    sharing_histogram,
)
from sigma_nens_hf.plots.gates import short_names
from sigma_nens_hf.plots.style import SERIES_STYLES, house_style
from sigma_nens_hf.regularizer import member_gates

pytestmark = [
    pytest.mark.filterwarnings(f"error::{kind}") for kind in ("UserWarning", "RuntimeWarning", "DeprecationWarning")
]


def table(num_examples=300, num_classes=2, seed=0, sharpness=2.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_examples)
    logits = rng.normal(size=(num_examples, 4, num_classes)) * 0.6 + rng.normal(size=(num_examples, 1, num_classes))
    logits[np.arange(num_examples), :, labels] += 0.8
    return ExampleTable.of_members(logits * sharpness, labels)


def constant_table(probabilities, labels):
    return ExampleTable.of_probabilities(np.tile(probabilities, (len(labels), 1)), np.array(labels))


SINGLE, ENSEMBLE = table(seed=1, sharpness=4.0), table()
MODELS = {"single": SINGLE, "ensemble": ENSEMBLE}
REFERENCE_ROWS = [
    {"model": "single model", "members": 1, "ece": 0.05, "accuracy": 0.85, "scaled_nll": 0.37, "disagreement": 0.0},
    {"model": "scaled single model", "members": 1, "ece": 0.03, "accuracy": 0.85, "scaled_nll": 0.36,
     "disagreement": 0.0},
    {"model": "deep ensemble", "members": 4, "ece": 0.02, "accuracy": 0.86, "scaled_nll": 0.34, "disagreement": 0.08},
]  # fmt: skip
FRONTIER = pandas.DataFrame(
    [
        *REFERENCE_ROWS,
        *(
            {"model": "sigma-N-Ens", "members": members, "tau": tau, "diversity_weight": 0.5, "expected_sharing": 1 + i,
             "ece": 0.02 + i / 100, "ece_low": 0.01 + i / 100, "ece_high": 0.03 + i / 100, "accuracy": 0.84 + i / 100,
             "scaled_nll": 0.35, "disagreement": 0.15 - 0.05 * i, "realized_sharing": 1.5 + i}
            for members in (4, 8)
            for i, tau in enumerate((0.1, 0.5, 1.0))
        ),
    ]
)  # fmt: skip
NO_LABELS = ExampleTable.of_probabilities([[0.3, 0.7]])


@pytest.fixture(scope="module")
def model():
    return tiny.ensemble("bert", init_scaler_std=2.0)


@pytest.fixture
def every_figure(model):
    """All figures as functions of the path alone."""
    return {
        "reliability": lambda path=None: reliability_diagram(MODELS, path=path),
        "risk": lambda path=None: risk_coverage_plot(MODELS, path=path),
        "entropy": lambda path=None: entropy_histogram(SINGLE, ENSEMBLE, path=path),
        "gates": lambda path=None: gates_plot(model, path=path),
        "sharing": lambda path=None: sharing_histogram(model, path=path),
        "frontier": lambda path=None: frontier_plot(FRONTIER, path=path),
    }


def scalers(model):
    return [parameter for name, parameter in model.named_parameters() if "sigma_norm_scaler" in name]


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def wilson(right, examples):
    z = normal.ppf(0.975)
    p = right / examples
    centre = (p + z**2 / (2 * examples)) / (1 + z**2 / examples)
    half = z / (1 + z**2 / examples) * np.sqrt(p * (1 - p) / examples + z**2 / (4 * examples**2))
    return centre - half, centre + half


def test_reliability_is_that_of_bins_made_by_hand(tmp_path):
    figure = reliability_diagram(MODELS, n_bins=10, path=tmp_path / "reliability.png")
    numbers = pandas.read_csv(tmp_path / "reliability.csv")
    upper, lower = figure.axes
    for name, drawn, steps in zip(MODELS, upper.containers, lower.patches, strict=True):
        of_model = numbers[numbers["model"] == name]
        rows, error = [], 0
        confidence, correct = MODELS[name].probability, MODELS[name].prediction == MODELS[name].label
        for b in range(10):
            inside = (confidence > b / 10) & (confidence <= (b + 1) / 10)
            if inside.any():
                accuracy, mean_confidence = correct[inside].mean(), confidence[inside].mean()
                interval = wilson(correct[inside].sum(), inside.sum())
                gap = accuracy - mean_confidence
                rows.append([b / 10, (b + 1) / 10, inside.sum(), mean_confidence, accuracy, *interval, gap])
                error += inside.mean() * abs(gap)
        columns = ["bin_from", "bin_to", "examples", "confidence", "accuracy", "accuracy_low", "accuracy_high", "gap"]
        np.testing.assert_allclose(of_model[columns], rows, atol=1e-12)
        floor = calibration_noise_floor(confidence, 10)
        summary = of_model[["ece", "noise_floor_mean", "noise_floor_95"]].drop_duplicates().to_numpy()
        np.testing.assert_allclose(summary, [[error, *floor]])
        expected_text = (
            f"{name}: ECE {error:.3f} (if calibrated: mean {floor.mean:.3f}, 95% below {floor.percentile_95:.3f})"
        )
        assert expected_text in legend_texts(figure)

        line, _, (bars,) = drawn
        np.testing.assert_allclose(line.get_xydata(), of_model[["confidence", "accuracy"]])
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, of_model[["accuracy_low", "accuracy_high"]], atol=1e-12)
        values, edges, _ = steps.get_data()
        assert values.sum() == len(confidence)
        np.testing.assert_array_equal(values[values > 0], of_model["examples"])
        np.testing.assert_allclose(edges[:-1][values > 0], of_model["bin_from"])
    (diagonal,) = [line for line in upper.lines if line.get_label() == "perfect calibration"]
    assert (diagonal.get_xdata() == diagonal.get_ydata()).all()


def test_reliability_of_one_model_shows_gaps_from_confidence_to_accuracy(tmp_path):
    figure = reliability_diagram(ENSEMBLE, path=tmp_path / "one.png")
    numbers = pandas.read_csv(tmp_path / "one.csv")
    assert set(numbers["model"]) == {"model"}
    gaps = np.array([bar.get_bbox().intervaly for bar in figure.axes[0].patches])
    np.testing.assert_allclose(np.sort(gaps), np.sort(numbers[["confidence", "accuracy"]]))
    assert all(bar.get_hatch() for bar in figure.axes[0].patches)


def test_empty_bins_are_left_out(tmp_path):
    figure = reliability_diagram(constant_table([0.25, 0.75], [1, 1, 0, 1, 1]), n_bins=4, path=tmp_path / "same.png")
    numbers = pandas.read_csv(tmp_path / "same.csv")
    assert numbers[["bin_from", "bin_to", "examples", "confidence", "accuracy"]].to_numpy().tolist() == [
        [0.5, 0.75, 5, 0.75, 0.8]
    ]
    steps = next(patch for patch in figure.axes[1].patches)
    assert steps.get_data().values.tolist() == [5, 0]


def test_risk_coverage_is_that_of_thresholds_tried_one_by_one(tmp_path):
    tied = constant_table([0.25, 0.75], [1, 1, 0, 1])
    figure = risk_coverage_plot({**MODELS, "tied": tied}, path=tmp_path / "risk.png")
    numbers = pandas.read_csv(tmp_path / "risk.csv")
    for name, line in zip([*MODELS, "tied"], figure.axes[0].lines, strict=True):
        one = MODELS.get(name, tied)
        thresholds = np.unique(one.probability)[::-1]
        accepted = [one.probability >= threshold for threshold in thresholds]
        expected = [[mask.mean(), (one.prediction != one.label)[mask].mean()] for mask in accepted]
        of_model = numbers[numbers["model"] == name]
        np.testing.assert_allclose(of_model[["coverage", "risk"]], expected)
        np.testing.assert_allclose(line.get_xydata()[1:], expected)
        # The area under the steps as drawn: each risk holds back to the coverage before it.
        x, y = line.get_xydata().T
        assert line.get_drawstyle() == "steps-pre"
        area = (np.diff(x) * y[1:]).sum()
        assert of_model["aurc"].unique() == pytest.approx([area])
        assert f"{name}: AURC {area:.4f}" in legend_texts(figure)


@pytest.mark.parametrize("measure", ["predictive_entropy", "expected_entropy", "modulation_uncertainty"])
def test_entropy_densities_share_bins_and_integrate_to_one(tmp_path, measure):
    other = table(num_examples=100, seed=5, sharpness=0.5)
    figure = entropy_histogram(ENSEMBLE, other, measure, path=tmp_path / "entropy.svg")
    numbers = pandas.read_csv(tmp_path / "entropy.csv")
    values = {"in distribution": getattr(ENSEMBLE, measure), "out of distribution": getattr(other, measure)}
    auroc = roc_auc_score([0] * 300 + [1] * 100, np.concatenate(list(values.values())))
    assert numbers["auroc"].unique() == pytest.approx([auroc])
    assert figure.legends[0].get_title().get_text() == f"AUROC {auroc:.3f}"
    all_edges = []
    for (name, of_table), steps in zip(values.items(), figure.axes[0].patches, strict=True):
        part = numbers[numbers["distribution"] == name]
        density, edges, _ = steps.get_data()
        np.testing.assert_allclose(density, part["density"])
        np.testing.assert_allclose(edges, [*part["nats_from"], part["nats_to"].iloc[-1]])
        assert part["examples"].sum() == len(of_table)
        inside = [((of_table >= low) & (of_table < high)).sum() for low, high in itertools.pairwise(edges)]
        inside[-1] += (of_table == edges[-1]).sum()
        assert part["examples"].tolist() == inside
        assert (density * np.diff(edges)).sum() == pytest.approx(1)
        all_edges.append(edges.tolist())
    assert all_edges[0] == all_edges[1]
    assert all_edges[0][-1] == pytest.approx(max(column.max() for column in values.values()))


def test_gates_are_counted_by_norm_and_member(model, tmp_path):
    figure = gates_plot(model, tmp_path / "gates.pdf")
    numbers = pandas.read_csv(tmp_path / "gates.csv")
    gates = {name: values.detach().numpy() for name, values in member_gates(model).items()}
    panels = [axes for axes in figure.axes if axes.get_title(loc="left").startswith("member")]
    assert [axes.get_title(loc="left") for axes in panels] == [f"member {m}" for m in range(4)]
    assert list(numbers["norm"].unique()) == list(gates)
    for member, axes in enumerate(panels):
        shades = np.asarray(axes.collections[0].get_array()).reshape(len(gates), -1)
        means = axes.lines[0].get_xdata()
        for row, (name, values) in enumerate(gates.items()):
            part = numbers[(numbers["norm"] == name) & (numbers["member"] == member)]
            lows, highs = part["gate_from"].to_numpy(), part["gate_to"].to_numpy()
            assert lows[0] == 0
            assert highs[-1] == 1
            inside = (values[member] >= lows[:, None]) & (values[member] < highs[:, None])
            np.testing.assert_allclose(part["share"], inside.mean(1))
            np.testing.assert_allclose(shades[row], part["share"])
            assert part["mean_gate"].unique() == pytest.approx([values[member].mean()])
            assert means[row] == pytest.approx(values[member].mean())
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels[:3] == ["embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"]
    assert all(axes.yaxis_inverted() for axes in panels)  # shared axes are turned once, not M times


def test_sharing_counts_owners(tmp_path):
    model = tiny.ensemble("bert", num_members=4)
    with torch.no_grad():
        for scaler in scalers(model):
            scaler.fill_(-20)
            scaler[0] = 20
            scaler[1, ::2] = 20  # every other feature has a second owner
        scalers(model)[0].fill_(20)  # and in the first norm everyone owns all
    figure = sharing_histogram(model, tmp_path / "sharing.png")
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == pytest.approx([0.4, 0.4, 0, 0.2])
    assert [text.get_text() for text in upper.texts] == ["40%", "40%", "0%", "20%"]
    assert lower.lines[1].get_xydata().tolist() == [[4, 0], [1.5, 1], [1.5, 2], [1.5, 3], [1.5, 4]]
    assert lower.lines[0].get_xdata() == [2, 2]
    numbers = pandas.read_csv(tmp_path / "sharing.csv")
    assert numbers["norm"].unique().tolist() == ["all norms", *member_gates(model)]
    assert numbers["owners"].tolist() == [1, 2, 3, 4] * 6
    assert numbers["features"].tolist()[:8] == [64, 64, 0, 32, 0, 0, 0, 32]
    np.testing.assert_allclose(numbers["share"][4:], numbers["features"][4:] / 32)
    assert numbers["realized_sharing"].tolist()[::4] == [2, 4, 1.5, 1.5, 1.5, 1.5]

    with torch.no_grad():
        scalers(model)[1].fill_(-200)  # gates of exactly 0, which nobody owns
    upper, _ = sharing_histogram(model).axes
    assert [bar.get_height() for bar in upper.patches] == pytest.approx([0.2, 0.3, 0.3, 0, 0.2])


@pytest.mark.parametrize(("num_members", "num_blocks"), [(1, 1), (9, 2), pytest.param(16, 25, marks=pytest.mark.slow)])
def test_few_and_many_members_and_norms_can_be_drawn(num_members, num_blocks, tmp_path):
    model = tiny.ensemble("vit", num_members=num_members, base={"num_hidden_layers": num_blocks})
    figure = gates_plot(model, tmp_path / "gates.pdf")
    assert sum(axes.get_title(loc="left").startswith("member") for axes in figure.axes) == num_members
    assert len(pandas.read_csv(tmp_path / "gates.csv")) == 15 * num_members * (2 * num_blocks + 1)
    upper, lower = sharing_histogram(model, tmp_path / "sharing.png").axes
    assert len(upper.patches) == num_members
    assert len(lower.get_yticklabels()) == 2 * num_blocks + 1


def test_names_of_norms_are_shortened_by_what_they_share():
    assert short_names(["a.b.0.x.norm", "a.b.1.norm"]) == ["0.x", "1"]
    assert short_names(["a.b.norm"]) == ["norm"]
    assert short_names(["norm", "a.norm"]) == ["norm", "a.norm"]


EDGE_TABLES = {
    "one example": ENSEMBLE.select(np.array([3])),
    "equal confidences": constant_table([0.2, 0.8], [0, 1, 1, 1, 0]),
    "always right and sure": constant_table([1.0, 0.0], [0, 0, 0]),
    "always wrong and sure": constant_table([1.0, 0.0], [1, 1, 1]),
    "many classes": table(num_examples=40, num_classes=1000),
}


@pytest.mark.parametrize("name", EDGE_TABLES)
def test_edge_cases_are_drawn_without_warnings(name, tmp_path):
    edge = EDGE_TABLES[name]
    for figure in (reliability_diagram, risk_coverage_plot):
        figure(edge, path=tmp_path / "figure.png")
        assert not pandas.read_csv(tmp_path / "figure.csv").isna().any(axis=None)
    entropy_histogram(edge, edge, path=tmp_path / "figure.png")
    numbers = pandas.read_csv(tmp_path / "figure.csv")
    assert np.isfinite(numbers[["nats_from", "nats_to", "density"]]).all(axis=None)
    assert numbers["auroc"].unique() == pytest.approx([0.5])


def test_series_differ_in_more_than_colour():
    models = {f"model {i}": table(num_examples=50, seed=i) for i in range(len(SERIES_STYLES))}
    risk, reliability = risk_coverage_plot(models), reliability_diagram(models)
    for lines in (risk.axes[0].lines, [container[0] for container in reliability.axes[0].containers]):
        for looks in ({line.get_color() for line in lines}, {line.get_marker() for line in lines}):
            assert len(looks) == len(models)
        dashes = {str(line._unscaled_dash_pattern) for line in lines}
        assert len(dashes) == len(models)
    inside, outside = entropy_histogram(SINGLE, ENSEMBLE).axes[0].patches
    assert (inside.get_hatch(), outside.get_hatch()) == (None, "////")
    assert inside.get_linestyle() != outside.get_linestyle()


def test_no_global_state_of_matplotlib_is_touched(every_figure, tmp_path):
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.grid": False, "figure.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        for name, figure in every_figure.items():
            drawn = figure(tmp_path / f"{name}.png")
            assert isinstance(drawn, Figure)
            assert drawn.get_facecolor() == (1, 1, 1, 1)  # and the user's style does not reach the figure
        with pytest.raises(ValueError, match="saved as one of"):
            every_figure["risk"](tmp_path / "risk.gif")
        assert dict(matplotlib.rcParams) == before


def test_the_style_is_one_threads_at_a_time():
    entered = threading.Event()

    @house_style()
    def draw():
        entered.set()

    before = dict(matplotlib.rcParams)
    other = threading.Thread(target=draw)
    with house_style():
        other.start()
        assert not entered.wait(0.1)
    other.join()
    assert entered.is_set()
    assert dict(matplotlib.rcParams) == before


def test_figures_are_the_same_every_time_and_on_threads(every_figure, tmp_path):
    jobs = [(name, tmp_path / f"{name}-{run}{suffix}") for run in range(2) for name, suffix in
            [("reliability", ".png"), ("risk", ".svg"), ("entropy", ".pdf"), ("sharing", ".png")]]  # fmt: skip
    before = dict(matplotlib.rcParams)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda job: every_figure[job[0]](job[1]), jobs))
    assert dict(matplotlib.rcParams) == before
    for (_, first), (_, second) in zip(jobs[:4], jobs[4:], strict=True):
        assert first.read_bytes() == second.read_bytes()
        assert first.with_suffix(".csv").read_bytes() == second.with_suffix(".csv").read_bytes()


def test_pyplot_which_chooses_a_backend_is_not_needed(every_figure, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    for name, figure in every_figure.items():
        figure(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.slow
def test_works_without_display_or_backend_in_a_process_of_its_own(tmp_path):
    code = (
        "import sys, numpy as np; from sigma_nens_hf.plots import risk_coverage_plot as plot;"
        "from sigma_nens_hf.metrics.example_table import ExampleTable as T;"
        f"plot(T.of_probabilities([[.2, .8]], [1]), path={str(tmp_path / 'risk.png')!r});"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "DISPLAY", "WAYLAND_DISPLAY")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert (tmp_path / "risk.png").read_bytes().startswith(b"\x89PNG")


def test_folders_are_made_and_nothing_else_is_left(every_figure, tmp_path):
    path = tmp_path / "new" / "folder" / "risk.v2.PDF"
    every_figure["risk"](str(path))
    assert sorted(p.name for p in path.parent.iterdir()) == ["risk.v2.PDF", "risk.v2.csv"]
    assert path.read_bytes().startswith(b"%PDF")
    mode = path.stat().st_mode
    (tmp_path / "plain").touch()
    assert mode == (tmp_path / "plain").stat().st_mode


def test_other_suffixes_are_refused_before_anything_is_written(every_figure, tmp_path):
    refusal = r"saved as one of \.png, \.pdf, \.svg, got"
    for figure in every_figure.values():
        with pytest.raises(ValueError, match=refusal):
            figure(tmp_path / "new" / "figure.jpg")
    for name in ("figure", "figure.csv"):
        with pytest.raises(ValueError, match=refusal):
            every_figure["risk"](tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["savefig", "to_csv", "replace"])
def test_failed_saving_leaves_what_was_there(failing, tmp_path, monkeypatch):
    risk_coverage_plot(MODELS, path=tmp_path / "risk.png")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replace = os.replace

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    def locked(source, target):
        # The spreadsheet that shows the numbers keeps the file, on Windows.
        full() if str(target).endswith(".csv") else replace(source, target)

    owner, stand_in = {"savefig": (Figure, full), "to_csv": (pandas.DataFrame, full), "replace": (os, locked)}[failing]
    monkeypatch.setattr(owner, failing, stand_in)
    for name in ("risk.png", "fresh.png"):
        with pytest.raises(OSError, match="No space left"):
            risk_coverage_plot(ENSEMBLE, path=tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folders_in_the_way_are_named(tmp_path):
    (tmp_path / "risk.csv").mkdir()
    with pytest.raises(IsADirectoryError, match=r"risk\.csv' is a folder"):
        risk_coverage_plot(MODELS, path=tmp_path / "risk.png")
    assert [path.name for path in tmp_path.iterdir()] == ["risk.csv"]


@pytest.mark.parametrize("figure", [reliability_diagram, risk_coverage_plot])
def test_what_cannot_be_compared_is_refused(figure):
    with pytest.raises(ValueError, match="1 to 6 models, got 0"):
        figure({})
    with pytest.raises(ValueError, match="1 to 6 models, got 7"):
        figure({str(i): ENSEMBLE for i in range(7)})
    with pytest.raises(ValueError, match="needs labels"):
        figure({"ensemble": ENSEMBLE, "unlabelled": NO_LABELS})
    with pytest.raises(ValueError, match="does not begin with '_', got '_hidden'"):
        figure({"_hidden": ENSEMBLE})
    with pytest.raises(ValueError, match="'empty' has no examples"):
        figure({"empty": ENSEMBLE.select(np.array([], dtype=int))})
    with pytest.raises(TypeError, match="'model' must be an ExampleTable, got ndarray"):
        figure(np.ones((3, 2)) / 2)


@pytest.mark.parametrize("n_bins", [0, -1, 2.5])
def test_wrong_numbers_of_bins_are_refused(n_bins):
    with pytest.raises(ValueError, match="n_bins must be a whole number"):
        reliability_diagram(ENSEMBLE, n_bins)


def test_wrong_inputs_of_entropies_are_refused():
    with pytest.raises(ValueError, match="measure must be one of"):
        entropy_histogram(ENSEMBLE, ENSEMBLE, "disagreement")
    with pytest.raises(TypeError, match="examples out of distribution must be an ExampleTable, got list"):
        entropy_histogram(ENSEMBLE, [])
    with pytest.raises(ValueError, match="examples in distribution has no examples"):
        entropy_histogram(ENSEMBLE.select(np.array([], dtype=int)), ENSEMBLE)
    entropy_histogram(NO_LABELS, NO_LABELS)  # labels are not needed


@pytest.mark.parametrize("figure", [gates_plot, sharing_histogram])
def test_models_without_sound_gates_are_refused(figure):
    with pytest.raises(ValueError, match="No norm of the model carries members"):
        figure(tiny.base_model("vit"))
    damaged = tiny.ensemble("vit")
    with torch.no_grad():
        scalers(damaged)[2][1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"\(1 norms\) are not finite"):
        figure(damaged)


def test_frontier_shows_every_series_its_intervals_and_what_it_competes_with(tmp_path):
    figure = frontier_plot(FRONTIER, tmp_path / "frontier.png")
    trade, nll, disagreement, sharing = figure.axes
    assert set(legend_texts(figure)) == {
        "4 members, λ 0.5", "8 members, λ 0.5", "single model", "single model, temperature scaled",
        "deep ensemble of so many",
    }  # fmt: skip
    of_four = FRONTIER[FRONTIER["members"].eq(4) & FRONTIER["tau"].notna()]
    panels = ((trade, "ece", "accuracy"), (nll, "tau", "scaled_nll"), (disagreement, "tau", "disagreement"),
              (sharing, "tau", "realized_sharing"))  # fmt: skip
    for axes, x, y in panels:
        np.testing.assert_allclose(axes.containers[0].lines[0].get_xydata(), of_four[[x, y]])
    (bars,) = trade.containers[0].lines[2]
    np.testing.assert_allclose([segment[:, 0] for segment in bars.get_segments()], of_four[["ece_low", "ece_high"]])
    texts = {axes: {text.get_text() for text in axes.texts} for axes in (trade, nll, disagreement)}
    assert texts[trade] == {"0.1", "0.5", "1", "4"}
    assert texts[nll] == {"single", "deep 4"}
    assert texts[disagreement] == {"deep 4"}
    assert {tuple(line.get_ydata()) for line in nll.lines} >= {(0.36, 0.36), (0.34, 0.34)}
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "frontier.csv"), FRONTIER)
    with pytest.raises(ValueError, match="holds no ensemble yet"):
        frontier_plot(pandas.DataFrame(REFERENCE_ROWS).assign(tau=np.nan))
